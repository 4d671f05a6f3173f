"""How near is the vision tower to the arithmetic of a GPU?

The tower and the aligner of DeepSeek-V4.1-Flash with random weights, on random pictures of several
sizes and several pictures in a call: seconds of a call, pictures and patches in a second, and the
share of the peak of bfloat16 products. Counted are the multiply-adds of products and attention, as
the model needs them for the patches there are (`useful`), and as the padded call makes them in its
products (`computed`). Calls follow each other without waiting, inputs are on the device.

    python bench/vision.py --machine h200
    python bench/vision.py --machine h200 --pictures 39x39 --batches 1 4 --kernels
    python bench/vision.py --machine cpu2 --small --pictures 3x4 --batches 1 2   # tries the script
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from environment import machine, write_result
from recording import recorded

from deepinfer_jax import params, resources
from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.images import Picture, encoding
from deepinfer_jax.numerics import Numerics, rows_for

# Patch rows and columns: the least there is, 640 x 480, two square ones, 1920 x 1080.
PICTURES = ("39x39", "35x46", "56x56", "78x78", "69x122")
BATCHES = (1, 2, 4, 8)
MOST = 40_000  # patches of a call
PEAK = 989.0  # TFLOP/s of dense bfloat16 products of an H200


def config(small: bool) -> ModelConfig:
    """The released model, or its form with a tiny tower."""
    cfg = ModelConfig.from_json(resources.config_file("deepseek-v4.1-flash"))
    assert cfg.vision is not None
    if not small:
        return cfg
    tiny = dataclasses.replace(
        cfg.vision, num_hidden_layers=2, hidden_size=64, num_attention_heads=2,
        intermediate_size=96, patch_size=4,
    )  # fmt: skip
    return dataclasses.replace(cfg, vision=tiny, hidden_size=128)


def random_tower(cfg: ModelConfig) -> params.Params:
    """`params["vision"]` made on the device."""
    keys = iter(jax.random.split(jax.random.key(0), 100))

    def one(spec: params.Spec) -> jax.Array:
        if spec.constant:
            return jnp.full(spec.shape, spec.init, spec.dtype)
        return jax.random.normal(next(keys), spec.shape, spec.dtype) * jnp.bfloat16(spec.init)

    return jax.tree.map(one, params.abstract(cfg)["vision"])


def picture(height: int, width: int, side: int, seed: int) -> Picture:
    values = np.random.default_rng(seed).uniform(-1, 1, (height * width, 3, side, side))
    return Picture(values.astype(ml_dtypes.bfloat16).astype(np.float32), height, width)


def flops(patches: int, pairs: int, cells: int, vision: VisionConfig, hidden: int) -> float:
    """Of `patches` rows of the tower, `pairs` of rows that attend, `cells` rows of the aligner."""
    w, mlp, layers = vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers
    entry, block = 3 * vision.patch_size**2 * w, 4 * w * w + 3 * w * mlp
    cell = vision.downsample_ratio**2 * w * hidden + hidden * hidden
    return 2.0 * (patches * (entry + layers * block) + pairs * layers * 2 * w + cells * cell)


def timed(run: Any, loops: int, repeats: int) -> list[float]:
    """Seconds of one of `loops` calls in a row, `repeats` times."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(loops):
            last = run()
        jax.block_until_ready(last)
        samples.append((time.perf_counter() - start) / loops)
    return samples


def kernels(run: Any) -> dict[str, float]:
    """Device milliseconds of one call by the name of the kernel, the largest first."""
    total: collections.Counter[str] = collections.Counter()
    for kernel in recorded(run)[1]:
        total[kernel.name] += (kernel.end - kernel.begin) / 1e6
    return dict(total.most_common(20))


def measure(
    shape: tuple[int, int], batch: int, tower: params.Params, cfg: ModelConfig, rows: str,
    arguments: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """One size and one number of pictures in one form of numerics."""
    vision = cfg.vision
    assert vision is not None
    (height, width), ratio = shape, vision.downsample_ratio
    numerics = Numerics.native(False, rows)  # pyright: ignore[reportArgumentType]
    size = encoding.size_class(height, width, ratio)
    given = [picture(height, width, vision.patch_size, i) for i in range(batch)]
    patches = jax.device_put(encoding.pack(given, size, vision))
    start = time.perf_counter()
    program = encoding.encode.lower(tower, patches, vision, numerics).compile()
    compiled = time.perf_counter() - start
    run = functools.partial(program, tower, patches)
    jax.block_until_ready(run())
    samples = timed(run, arguments.loops, arguments.repeats)
    seconds, count = statistics.median(samples), height * width
    cells, room = -(-height // ratio) * -(-width // ratio), encoding.cell_room(size, ratio)
    useful = batch * flops(count, count**2, cells, vision, cfg.hidden_size)
    computed = batch * flops(size, count**2, room, vision, cfg.hidden_size)
    found = {
        "height": height, "width": width, "pictures": batch, "patches": count, "padded": size,
        "rows": rows, "compile_s": compiled, "samples": samples, "seconds": seconds,
        "pictures_per_s": batch / seconds, "patches_per_s": batch * count / seconds,
        "useful_tflops": useful / seconds / 1e12, "computed_tflops": computed / seconds / 1e12,
    }  # fmt: skip
    if jax.default_backend() == "gpu":
        peak = arguments.peak
        found |= {f"{k}_share": found[f"{k}_tflops"] / peak for k in ("useful", "computed")}
        if arguments.kernels and rows == "pallas":
            found["kernels_ms"] = kernels(run)
    return found


def show(found: dict[str, Any]) -> None:
    share = found.get("useful_share", float("nan"))
    print(
        f"{found['height']:4}x{found['width']:<4} x{found['pictures']:<2} {found['rows']:8}"
        f"{1e3 * found['seconds']:9.2f} ms {found['pictures_per_s']:9.1f} pictures/s "
        f"{found['useful_tflops']:8.2f} TFLOP/s useful, {found['computed_tflops']:8.2f} computed, "
        f"{share:6.1%} of the peak; compiled in {found['compile_s']:.0f} s",
        flush=True,
    )
    for name, ms in found.get("kernels_ms", {}).items():
        print(f"    {ms:8.3f} ms {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--pictures", nargs="+", default=PICTURES, help="patch rows x columns")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--plain", action="store_true", help="plain XLA (batched) beside it")
    parser.add_argument("--peak", type=float, default=PEAK, help="TFLOP/s of the device")
    parser.add_argument("--loops", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="list kernels by time")
    parser.add_argument("--small", action="store_true", help="a tiny tower, to try the script")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    arguments, start = parser.parse_args(), machine()
    cfg = config(arguments.small)
    tower = random_tower(cfg)
    forms = [rows_for(jax.default_backend()), *(["batched"] if arguments.plain else [])]
    settings = {
        "name": "small" if arguments.small else "deepseek-v4.1-flash, random weights",
        "numerics": Numerics.native(False, forms[0]).fingerprint(),
        "peak_tflops": arguments.peak,
    }
    results = []
    for text in arguments.pictures:
        height, width = (int(side) for side in text.split("x"))
        for batch in arguments.batches:
            if batch > 1 and batch * height * width > MOST:
                continue
            for rows in forms:
                found = measure((height, width), batch, tower, cfg, rows, arguments)
                results.append(found)
                show(found)
                write_result(  # what there is, should the rest not come to its end
                    "vision", arguments.machine, __doc__, settings, {"results": results},
                    arguments.out, start,
                )  # fmt: skip


if __name__ == "__main__":
    main()
