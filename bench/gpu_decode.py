"""How far is decoding on a GPU from the speed that its memory traffic allows, at released widths?

A slice of the released model (`released.py`) decodes with a cache that holds 4k, 64k or 256k
tokens a slot. Its floor is the bytes that a step must read over the bandwidth of a copy measured in
the same run. Times are wall times of many steps in one call. A profile of the same steps tells the
share of the time in which no kernel ran, one of the program compiled without CUDA graphs the time
of every role and layer, by the scopes in the code. Forms: our kernels ("pallas", "cuda"),
plain XLA ("batched").

    python bench/gpu_decode.py --machine h200
    python bench/gpu_decode.py --machine h200 --batches 1 --contexts 4096 --kernels 40
    python bench/gpu_decode.py --machine h200 --no-profile    # times alone: half the programs
    python bench/gpu_decode.py --machine local --small --batches 1 --contexts 64      # tries it
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import released
from environment import machine, write_result
from jax import lax
from recording import Kernel, recorded

from deepinfer_jax import sampling as samplers
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import head
from deepinfer_jax.model.forward import forward
from deepinfer_jax.numerics import Form, Numerics, rows_for
from deepinfer_jax.rows import text_rows

SCOPES = {
    "head": "head", "sample": "sampling", "mhc": "mhc", "engram": "engram", "index": "indexer",
    "compress": "compressor", "moe": "moe", "attention": "attention",
}  # fmt: skip

# Of kernels inside a graph the profiler does not say where they come from.
WITHOUT_GRAPHS: Any = {"xla_gpu_graph_min_graph_size": 1 << 30}


def bandwidth(size: int) -> float:
    """Bytes per second of a copy, those read and those written, best of several."""
    x = jnp.zeros((size // 4,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(8):
            x = copy(x)
        x.block_until_ready()
        times.append((time.perf_counter() - start) / 8)
    return 2 * size / min(times)


@functools.partial(
    jax.jit, static_argnames=("cfg", "numerics", "steps"), donate_argnames=("tokens", "cache")
)
def decode(
    params: Any, tables: Any, tokens: jax.Array, cache: Cache, sampling: Any, cfg: ModelConfig,
    numerics: Numerics, steps: int,
) -> tuple[jax.Array, Cache, jax.Array]:  # fmt: skip
    """`steps` plain decode steps: (newest tokens [B], cache, experts [steps, L, B, k])."""
    slots = jnp.arange(cache.slots, dtype=jnp.int32)

    def step(carry, _):
        tokens, cache = carry
        rows = text_rows(tokens, slots, cache.lengths)
        hidden, cache = forward(params, tables, rows, cache, cfg, numerics)
        assert cache is not None  # one went in
        with jax.named_scope("head"):
            logits = head.logits(params, hidden.output, numerics)
        made = samplers.sample(logits, sampling, cache.lengths + 1)
        cache = dataclasses.replace(cache, lengths=cache.lengths + 1)
        return (made.token, cache), hidden.routed

    (tokens, cache), routed = lax.scan(step, (tokens, cache), length=steps)
    return tokens, cache, routed


# -- what the profile says -------------------------------------------------------------------------


def places(text: str) -> dict[str, str]:
    """Name of every instruction of a compiled program -> the scopes that it comes from."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = .*op_name=\"([^\"]*)\"", line)
        if match:
            found[match[1]] = match[2]
    return found


def role_of(scopes: str) -> str:
    """The innermost scope that names a role."""
    for part in reversed(scopes.split("/")):
        if part in SCOPES:
            return SCOPES[part]
    return "other"


def layer_of(scopes: str) -> int:
    match = re.search(r"layer_(\d+)", scopes)
    return int(match[1]) if match else -1


def breakdown(ran: list[Kernel], where: dict[str, str], steps: int) -> dict[str, Any]:
    """Microseconds of a step: busy, idle, by role, by layer; and how many kernels."""
    begin, end = ran[0].begin, max(kernel.end for kernel in ran)
    busy = sum(kernel.end - kernel.begin for kernel in ran)
    roles: dict[str, float] = collections.defaultdict(float)
    layers: dict[int, float] = collections.defaultdict(float)
    for kernel in ran:
        scopes = where.get(kernel.op, "")
        us = (kernel.end - kernel.begin) / 1e3 / steps
        roles[role_of(scopes)] += us
        layers[layer_of(scopes)] += us
    unknown = sum(1 for kernel in ran if kernel.op not in where)
    return {
        "kernels": len(ran) / steps, "kernels_without_place": unknown / steps,
        "span_us": (end - begin) / 1e3 / steps, "busy_us": busy / 1e3 / steps,
        "role_us": dict(roles), "layer_us": dict(sorted(layers.items())),
    }  # fmt: skip


def idle(ran: list[Kernel]) -> float:
    """Share of the time in which no kernel ran."""
    span = max(kernel.end for kernel in ran) - ran[0].begin
    return 1 - sum(kernel.end - kernel.begin for kernel in ran) / span


def longest(ran: list[Kernel], where: dict[str, str], steps: int, count: int) -> None:
    """Print the kernels that took longest, all calls of one name and place together."""
    total: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for kernel in ran:
        scopes = re.sub(r"layer_\d+/[\w+]+/", "", where.get(kernel.op, f"? {kernel.op}"))
        scopes = "/".join(scopes.split("/")[-5:])
        total[re.sub(r"[\d.]+$", "", kernel.name), scopes].append(kernel.end - kernel.begin)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))
    for (name, scopes), each in ranked[:count]:
        print(
            f"  {sum(each) / 1e3 / steps:9.1f} us {len(each) / steps:7.1f} times "
            f"{name[:40]:40} {scopes}"
        )


def numerics_of(form: Form, small: bool) -> Numerics:
    """Of a form; trying the script on a CPU takes the form of a CPU."""
    return Numerics.native(rows=rows_for(jax.default_backend()) if small else form)


# -- one cell of the table -------------------------------------------------------------------------


def fresh(cfg: ModelConfig, numerics: Numerics, batch: int, context: int, room: int) -> Cache:
    return released.filled_cache(cfg, numerics, batch, room, context)


def compiled(
    made: tuple[Any, Any], cfg: ModelConfig, numerics: Numerics, batch: int, room: int,
    steps: int, profile: bool,
) -> Any:  # fmt: skip
    """The program as the engine runs it, and where wanted the one without graphs."""
    cache = jax.eval_shape(lambda: fresh(cfg, numerics, batch, 1, room))
    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    sampling = samplers.untruncated(samplers.make_sampling(batch, 1.0, seeds=range(batch)))
    lowered = decode.lower(*made, tokens, cache, sampling, cfg, numerics, steps)
    return lowered.compile(), lowered.compile(WITHOUT_GRAPHS) if profile else None


def cell(
    programs: tuple[Any, Any], made: tuple[Any, Any], cfg: ModelConfig, numerics: Numerics,
    batch: int, context: int, room: int, steps: int, repeats: int, shown: int,
) -> dict[str, Any]:  # fmt: skip
    """One batch at one context: samples of a step, experts touched, breakdown.

    programs: as `compiled` gives them.
    """
    program, apart = programs
    sampling = samplers.untruncated(samplers.make_sampling(batch, 1.0, seeds=range(batch)))
    cache = fresh(cfg, numerics, batch, context, room)
    tokens = jnp.arange(batch, dtype=jnp.int32) * 7 + 11
    samples, routed = [], None
    for _ in range(repeats + 1):
        start = time.perf_counter()
        tokens, cache, routed = jax.block_until_ready(program(*made, tokens, cache, sampling))
        samples.append(1e3 * (time.perf_counter() - start) / steps)
    experts = np.asarray(routed)
    touched = [
        statistics.mean(len(np.unique(experts[step, layer])) for step in range(steps))
        for layer in range(cfg.num_hidden_layers)
    ]
    found: dict[str, Any] = {"samples_ms": samples[1:], "touched": touched}
    if apart is not None:
        (tokens, cache, _), ran = recorded(lambda: program(*made, tokens, cache, sampling))
        found["idle"] = idle(ran)
        _, ran = recorded(lambda: apart(*made, tokens, cache, sampling))
        where = places(apart.as_text())
        found["profile"] = breakdown(ran, where, steps)
        if shown:
            longest(ran, where, steps, shown)
    return found


def answer(
    row: dict[str, Any], params: Any, cfg: ModelConfig, speed: float
) -> dict[str, Any]:  # fmt: skip
    """The cell with its floor by role, its share of it, and the whole model's step."""
    roles = released.role_bytes(params, cfg, row["batch"], row["context"], row["touched"])
    ms = statistics.median(row["samples_ms"])
    floor = 1e3 * sum(roles.values()) / speed
    row |= {
        "ms": ms, "bytes": sum(roles.values()), "floor_ms": floor, "share": floor / ms,
        "role_floor_us": {name: 1e6 * each / speed for name, each in roles.items()},
    }  # fmt: skip
    if "profile" in row:
        profile = row["profile"]
        stretch = 1e3 * ms / profile["busy_us"]
        layers = profile["layer_us"]
        engram = profile["role_us"].get("engram", 0.0)
        each = [layers.get(i, 0.0) for i in range(cfg.num_hidden_layers)]
        each[cfg.engram_layer_ids[0]] -= engram
        once = profile["busy_us"] - sum(each) - engram
        row["whole_model"] = released.whole_model(
            cfg, released.released_config(), [us * stretch / 1e3 for us in each],
            once * stretch / 1e3, engram * stretch / 1e3,
        )  # fmt: skip
    return row


def show(row: dict[str, Any]) -> None:
    profile = row.get("profile", {})
    print(
        f"{row['form']:8} batch {row['batch']:4} context {row['context']:7}: {row['ms']:8.3f} ms, "
        f"floor {row['floor_ms']:7.3f} ms, share {row['share']:.3f}, "
        f"kernels {profile.get('kernels', 0):.0f}, busy {profile.get('busy_us', 0) / 1e3:.3f} ms",
        flush=True,
    )
    for name, us in sorted(profile.get("role_us", {}).items(), key=lambda item: -item[1]):
        print(f"    {name:10} {us:9.1f} us, floor {row['role_floor_us'][name]:8.1f}")
    if "whole_model" in row:
        print("    whole model", {k: round(v, 2) for k, v in row["whole_model"].items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 65536, 262144])
    parser.add_argument(
        "--forms", nargs="+", default=["pallas"], choices=["pallas", "cuda", "batched"]
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=0, help="print the longest so many")
    parser.add_argument(
        "--profile", action=argparse.BooleanOptionalAction, default=True,
        help="tell where the time of a step goes (not on a CPU)",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="tiny widths, to try the script")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, cfg = machine(), released.slice_config(given.small)
    speed = bandwidth(1 << 20 if given.small else 4 << 30)
    print(f"copy: {speed / 1e12:.2f} TB/s", flush=True)
    spare = given.steps * (given.repeats + 2) + 2
    made = released.make(cfg, max(given.contexts) + spare)
    cells = [(form, b, c) for form in given.forms for b in given.batches for c in given.contexts]
    made = jax.block_until_ready(made)

    def build(key: tuple[Form, int, int]) -> Any:
        form, batch, context = key
        numerics = numerics_of(form, given.small)
        profile = given.profile and jax.default_backend() != "cpu"
        return compiled(made, cfg, numerics, batch, context + spare, given.steps, profile)

    begin = time.perf_counter()
    with ThreadPoolExecutor(1 if given.small else 12) as pool:
        programs = dict(zip(cells, pool.map(build, cells), strict=True))
    compile_s = time.perf_counter() - begin
    print(f"compiled in {compile_s:.0f} s", flush=True)
    settings = {
        "layers": cfg.num_hidden_layers, "weight_bytes": released.nbytes(made[0]),
        "numerics": {form: Numerics.native(rows=form).fingerprint() for form in given.forms},
        **{name: getattr(given, name) for name in ("steps", "repeats")},
    }  # fmt: skip
    answers = {"compile_s": compile_s, "bandwidth_bytes_per_s": speed, "results": []}
    for form, batch, context in cells:
        numerics = numerics_of(form, given.small)
        row = cell(
            programs[form, batch, context], made, cfg, numerics, batch, context, context + spare,
            given.steps, given.repeats, given.kernels,
        )  # fmt: skip
        row = {"form": form, "batch": batch, "context": context, **row}
        answers["results"].append(answer(row, made[0], cfg, speed))
        show(row)
        path = write_result(  # what there is, should the rest not come to its end
            "gpu_decode", given.machine, __doc__, settings, answers, given.out, start
        )
    print(path)


if __name__ == "__main__":
    main()
