"""How far is decoding on a CPU from the speed that its memory traffic allows?

The floor of a step is the bytes that it must read over the read bandwidth of this machine. It reads
the stored weights of the backbone and the head, of routed experts the number that B tokens are
expected to touch when routing is even, the rows of embedding and Engram tables, and from the cache
the windows, the selected entries and all index keys. The drafter's context projections are left
out. Bandwidth is measured twice, by all cores reading: a buffer far larger than any cache, and one
of the size of the weights, which a small model's weights may stay in.

    python bench/decode_cpu.py --machine cpu2
    python bench/decode_cpu.py --machine cpu2 --model DIR --batches 1 8 --prompt-tokens 400
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import machine, write_result

import deepinfer_jax as di
from deepinfer_jax import info, loading, quant
from deepinfer_jax.engine import sizes
from deepinfer_jax.rounds import Running

LARGE = 512 << 20
_STATIC = {"static_argnames": ("cfg", "numerics"), "donate_argnames": "cache"}


def bandwidth(size: int, repeats: int = 7) -> float:
    """Bytes per second of all cores reading `size` bytes, best of `repeats`."""
    cores = machine()["cores"]
    parts = np.array_split(np.ones(size // 8, np.uint64), cores)
    passes = max(1, (64 << 20) // size)

    def read(part: np.ndarray) -> None:
        for _ in range(passes):
            part.max()

    best = float("inf")
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(read, parts))
            best = min(best, time.perf_counter() - start)
    return passes * size / best


def weight_bytes(cfg: di.ModelConfig, batch: int) -> float:
    """Stored bytes of weights that a decode step of `batch` tokens reads."""
    unread = (
        "embedding",
        "Engram tables",
        "DSpark draft",
        "vision tower",
        "aligner and delimiters",
    )
    experts, active = cfg.n_routed_experts, cfg.num_experts_per_tok
    touched = 1 - (1 - active / experts) ** batch
    total = 0.0
    for component in info.describe(cfg).components:
        if component.name not in unread:
            share = touched if component.name == "routed experts" else 1.0
            total += component.nbytes * share
    engram_row = quant_row_bytes(cfg.engram_head_dim, cfg.quantized)
    rows = len(cfg.engram_layer_ids) * cfg.engram_columns * engram_row + 2 * cfg.hidden_size
    return total + batch * rows


def quant_row_bytes(width: int, quantized: bool) -> int:
    """Bytes of a table row: FP8 and a scale for 32 values, or bfloat16."""
    return width + width // 32 if quantized else 2 * width


def cache_bytes(cfg: di.ModelConfig, length: float) -> float:
    """Packed cache bytes that one slot reads in a step at this length."""
    total = cfg.num_hidden_layers * cfg.sliding_window * quant.window_bytes(cfg.head_dim)
    for kind in cfg.kinds():
        if kind.ratio:
            entries = length / kind.ratio
            total += min(cfg.index_topk, entries) * quant.main_bytes(cfg.head_dim)
            if kind.index_source:
                total += entries * quant.index_bytes(cfg.index_head_dim)
    return total


def decode(model: di.Model, batch: int, prompt_tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of one decode step, `repeats` samples of MOST_STEPS steps each."""
    cfg, numerics, steps = model.cfg, model.numerics, sizes.MOST_STEPS
    rng = np.random.default_rng(0)
    prompts = rng.integers(8, cfg.vocab_size, (batch, prompt_tokens), np.int32)
    length = prompt_tokens + steps * (repeats + 2)
    capacity = min(max(sizes.SHORTEST_CAPACITY, length), model.max_length)
    if length > capacity:
        raise SystemExit(f"{length} tokens exceed the model's {model.max_length}: lower --repeats")
    sampling = di.make_sampling(batch, 1.0, seeds=range(batch))
    rows = di.batch_rows(jnp.asarray(prompts), jnp.full((batch,), prompt_tokens, jnp.int32))
    prefill = jax.jit(di.prefill, **_STATIC)
    cache = di.init_cache(cfg, numerics, batch, capacity)
    sampled, cache = prefill(model.params, model.tables, rows, cache, sampling, cfg, numerics)
    running = Running(
        tokens=sampled.token,
        active=jnp.ones((batch,), bool),
        left=jnp.full((batch,), 2**30, jnp.int32),
        stops=jnp.full((batch, sizes.STOP_IDS), -1, jnp.int32),
    )
    many = jax.jit(
        di.decode_many, static_argnames=("cfg", "numerics", "steps"), donate_argnames="cache"
    )
    start = time.perf_counter()
    arguments = (model.params, model.tables, running, cache, sampling)
    program = many.lower(*arguments, cfg, numerics, steps=steps).compile()
    compile_s = time.perf_counter() - start
    samples, busy = [], []
    for _ in range(repeats + 1):
        start, used = time.perf_counter(), time.process_time()
        made, _, cache = program(model.params, model.tables, running, cache, sampling)
        jax.block_until_ready((made, cache))
        samples.append((time.perf_counter() - start) / steps)
        busy.append((time.process_time() - used) / steps)
        running = dataclasses.replace(running, tokens=made.sampled.token[-1, :, 0])
    return {
        "compile_s": compile_s,
        "samples": samples[1:],
        "cpu_s": statistics.median(busy[1:]),
        "length": prompt_tokens + steps * (repeats + 2) / 2,
    }


def answer(cfg: di.ModelConfig, batch: int, run: dict[str, Any], speed: dict[str, float]) -> dict:
    """Times beside the floors of both bandwidths."""
    step = statistics.median(run["samples"])
    weights = weight_bytes(cfg, batch)
    cache = batch * cache_bytes(cfg, run["length"])
    floors = {name: (weights + cache) / each for name, each in speed.items()}
    return {
        "ms_per_step": 1e3 * step,
        "spread_ms": [1e3 * min(run["samples"]), 1e3 * max(run["samples"])],
        "cpu_ms_per_step": 1e3 * run["cpu_s"],
        "tokens_per_s": batch / step,
        "weight_bytes_per_step": round(weights),
        "cache_bytes_per_step": round(cache),
        "floor_ms": {name: 1e3 * floor for name, floor in floors.items()},
        "step_over_floor": {name: step / floor for name, floor in floors.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--model", default="spark-tiny")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    model = di.load(given.model)
    size = round(weight_bytes(model.cfg, 1))
    speed = {"memory": bandwidth(LARGE), "buffer_of_weight_size": bandwidth(size)}
    runs = {b: decode(model, b, given.prompt_tokens, given.repeats) for b in given.batches}
    results = {f"batch_{b}": answer(model.cfg, b, run, speed) for b, run in runs.items()}
    config = loading.find_folder(given.model) / "config.json"
    settings = {
        "name": Path(given.model).name,
        "sha256": hashlib.sha256(config.read_bytes()).hexdigest(),
        "numerics": dataclasses.asdict(model.numerics),
        "prompt_tokens": given.prompt_tokens,
    }
    found = {
        "compile_s": {f"batch_{b}": run["compile_s"] for b, run in runs.items()},
        "samples": {f"batch_{b}": run["samples"] for b, run in runs.items()},
        "results": {"bandwidth_bytes_per_s": speed, **results},
    }
    where = machine()
    write_result("decode_cpu", given.machine, __doc__, settings, found, where=where)
    print_table(where, speed, results)


def print_table(where: dict[str, Any], speed: dict[str, float], results: dict[str, dict]) -> None:
    print(f"{where['cpu']}, {where['cores']} cores, load average {where['load_average']}")
    for name, each in speed.items():
        print(f"{name}: {each / 1e9:.1f} GB/s")
    head = ("", "ms/step", "cpu ms", "tokens/s", "floor ms", "ratio", "resident ms", "ratio")
    print("".join(f"{cell:>12}" for cell in head))
    for name, r in results.items():
        memory, resident = r["floor_ms"].values()
        ratios = list(r["step_over_floor"].values())
        print(
            f"{name:>12}{r['ms_per_step']:12.2f}{r['cpu_ms_per_step']:12.2f}"
            f"{r['tokens_per_s']:12.1f}{memory:12.3f}{ratios[0]:12.1f}{resident:12.3f}"
            f"{ratios[1]:12.1f}"
        )


if __name__ == "__main__":
    main()
