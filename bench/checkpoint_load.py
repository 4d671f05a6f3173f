"""How much host memory and time does loading a sharded checkpoint of about 1 GB take?

A random model in the released layout is written in several shards, then loaded by new processes:
once with the files out of the page cache, then repeatedly, on one CPU device and split over four.
Peak memory is the process's maximum resident set, interpreter and JAX included. The bound is the
result plus 2 GiB, on an accelerator 2 GiB over the start of the load. Processor seconds stand
beside elapsed ones, for machines with other work.

    python bench/checkpoint_load.py --machine cpu2
    python bench/checkpoint_load.py --machine h200 --platform cuda
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from environment import write_result

from deepinfer_jax import axes, checkpoint, params, resources
from deepinfer_jax.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = 2 << 30
RULES = axes.Rules.of(expert="device", engram_rows="device", vocab="device", heads="device")


def model(gigabytes: float) -> ModelConfig:
    """A 12-layer model of the released kinds; experts and Engram rows set its size."""
    released = ModelConfig.from_json(resources.config_file("deepseek-v4.1-flash"))
    cfg = dataclasses.replace(
        released,
        vocab_size=32768,
        hidden_size=1024,
        moe_intermediate_size=768,
        num_hidden_layers=12,
        num_attention_heads=8,
        q_lora_rank=256,
        o_lora_rank=256,
        head_dim=128,
        compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 6),
        index_source_layer_ids=(2, 6, 10),
        candidate_source_layer_id=6,
        engram_layer_ids=(1,),
        engram_num_embeddings=(1,),
        dspark_noise_token_id=32767,
        dspark_target_layer_ids=(9, 10, 11),
        n_routed_experts=8,
        dspark_n_routed_experts=8,
        vision=None,
        image_token_id=None,
    )
    rows = int(gigabytes * 0.3e9) // 264 // 4 * 4
    cfg = dataclasses.replace(cfg, engram_num_embeddings=(rows,))
    base = params.census(cfg).total_bytes
    more = dataclasses.replace(cfg, n_routed_experts=16)
    each = (params.census(more).total_bytes - base) // 8
    experts = 8 + 4 * round((gigabytes * 1e9 - base) / each / 4)
    return dataclasses.replace(cfg, n_routed_experts=max(8, experts))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(folder: Path, gigabytes: float, shard_bytes: int) -> dict[str, Any]:
    cfg = model(gigabytes)
    rng = np.random.default_rng(0)

    def draw(spec: params.Spec) -> np.ndarray:
        raw = rng.integers(0, 256, spec.dtype.itemsize * int(np.prod(spec.shape)), np.uint8)
        return raw.view(spec.dtype).reshape(spec.shape)

    tree = jax.tree.map(draw, params.abstract(cfg))
    before, start = peak_bytes(), time.perf_counter()
    checkpoint.save_params(tree, cfg, folder, max_shard_bytes=shard_bytes)
    return {"s": time.perf_counter() - start, "more_bytes_than_the_tree": peak_bytes() - before}


def load(folder: Path, devices: int) -> dict[str, Any]:
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    cfg = ModelConfig.from_json(folder)
    sharding = None
    if devices > 1:
        mesh = axes.make_mesh({"device": devices})
        sharding = axes.shardings(params.abstract(cfg), mesh, RULES)
    jax.block_until_ready(jax.numpy.zeros(()))
    base, start, busy = peak_bytes(), time.perf_counter(), time.process_time()
    tree = jax.block_until_ready(checkpoint.load_params(folder, cfg, sharding))
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    held = {
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }
    return {
        "s": seconds,
        "cpu_s": busy,
        "peak_bytes": peak_bytes(),
        "base_bytes": base,
        "result_bytes": sum(size for _, size in held),
    }


def child(platform: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": platform, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def forget(folder: Path) -> None:
    """Ask the kernel to drop the files from its page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, platform: str, repeats: int) -> dict[str, Any]:
    """Runs of `load` by name: cold first, then warm ones after a discarded run."""

    def run(devices: int) -> dict[str, Any]:
        return child(platform, "--load", str(folder), "--devices", str(devices))

    forget(folder)
    runs = {"cold": [run(1)]}
    for name, devices in (("one_device", 1), ("four_devices", 4)):
        if devices == 1 or platform == "cpu":
            runs[name] = [run(devices) for _ in range(repeats + 1)][1:]
    return runs


def summary(runs: list[dict[str, Any]], platform: str) -> dict[str, Any]:
    seconds = statistics.median(run["s"] for run in runs)
    peak, result = max(run["peak_bytes"] for run in runs), runs[0]["result_bytes"]
    on_host = result if platform == "cpu" else max(run["base_bytes"] for run in runs)
    return {
        "s": seconds,
        "spread_s": [min(run["s"] for run in runs), max(run["s"] for run in runs)],
        "cpu_s": statistics.median(run["cpu_s"] for run in runs),
        "gb_per_s": result / seconds / 1e9,
        "result_bytes": result,
        "peak_bytes": peak,
        "peak_over_bound_base_bytes": peak - on_host,
        "load_bytes": max(run["peak_bytes"] - run["base_bytes"] for run in runs),
        "within_2_gib": peak - on_host <= ALLOWED,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--platform", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shard-megabytes", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scratch", help="folder for the checkpoint; default: a temporary one")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        print(json.dumps(write(Path(given.write), given.gigabytes, given.shard_megabytes << 20)))
        return
    if given.load:
        print(json.dumps(load(Path(given.load), given.devices)))
        return
    report(given)


def report(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        folder = Path(scratch)
        size = (
            "--gigabytes",
            str(given.gigabytes),
            "--shard-megabytes",
            str(given.shard_megabytes),
        )
        written = child("cpu", "--write", scratch, *size)
        shards = len(list(folder.glob("*.safetensors")))
        digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
        runs = measure(folder, given.platform, given.repeats)
    results = {name: summary(each, given.platform) for name, each in runs.items()}
    results["write"] = written
    write_result(
        "checkpoint_load", given.machine, __doc__,
        {"name": "random 12-layer model", "sha256": digest, "shards": shards},
        {"samples": {name: [run["s"] for run in each] for name, each in runs.items()},
         "results": results},
    )  # fmt: skip
    print(f"{shards} shards; writing: {written['s']:.2f} s")
    print(
        f"{'load':14}{'s':>8}{'cpu s':>8}{'GB/s':>8}{'result MB':>12}{'peak MB':>10}{'over MB':>10}"
    )
    for name in runs:
        r = results[name]
        sizes = (r["result_bytes"], r["peak_bytes"], r["peak_over_bound_base_bytes"])
        result, peak, over = (size / 1e6 for size in sizes)
        print(
            f"{name:14}{r['s']:8.2f}{r['cpu_s']:8.2f}{r['gb_per_s']:8.2f}"
            f"{result:12.1f}{peak:10.1f}{over:10.1f}"
        )


if __name__ == "__main__":
    main()
