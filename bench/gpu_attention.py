"""How long does sparse attention take with us, beside FlashMLA's own call on the same GPU?

One layer of the released model (64 heads of 512, a window of 128 and 512 chosen entries) and one
token of each sequence. Ours reads the cache as it is stored, FP8 and FP4, and is the engine's own
function with its Pallas kernels; `decoded` is the part of it that stands behind the gather.
FlashMLA reads bfloat16 rows, 1 KiB each, that somebody has stored so: `flash_mla` is its sparse
kernel called by torch and recorded into a CUDA graph, `bridge` the same from a program of JAX
through `kernels_bridge`, where every call asks Python. Times are of a chain of calls, in
microseconds a call.

    python bench/gpu_attention.py --machine h200
    python bench/gpu_attention.py --machine local --small --batches 2      # tries it without a GPU
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs a part

import jax
import jax.numpy as jnp
import numpy as np
import released
from environment import machine, write_result
from jax import lax

from deepinfer_jax import cache as caches
from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention
from deepinfer_jax.model.attention import Entries, Reach, Ring
from deepinfer_jax.numerics import Numerics, rows_for
from deepinfer_jax.rows import spans_of, text_rows
from kernels_bridge.calling import call
from kernels_bridge.ops.attention import attend_rows

LAYER, HELD, CHAIN = 2, 4096, 32


def chained(one: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`one(q, zero, ...)` CHAIN times, each with the queries of all before it and a zero that comes
    from them too, so that nothing of one is done for all; the last result.
    """

    @jax.jit
    def run(q: jax.Array, *rest: Any) -> jax.Array:
        def step(carry: Any, _: Any) -> tuple[Any, None]:
            q, zero, _ = carry
            out = one(q, zero, *rest)
            nothing = 0 * out
            return (q + nothing.astype(q.dtype), nothing[0, 0, 0].astype(jnp.int32), out), None

        start = q, jnp.int32(0), jnp.zeros_like(jax.eval_shape(one, q, jnp.int32(0), *rest))
        return lax.scan(step, start, length=CHAIN)[0][2]

    return run


def timed(run: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> list[float]:
    """Microseconds of one of the CHAIN calls, after two runs that do not count."""
    samples = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        wait(run())
        samples.append(1e6 * (time.perf_counter() - start) / CHAIN)
    return samples[2:]


def ours(cfg: ModelConfig, numerics: Numerics, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """The engine's attention of a layer, and its operands: queries and the cache."""
    held = min(HELD, cfg.max_position_embeddings - 2)
    cache = released.filled_cache(cfg, numerics, batch, held + 2, held)
    slots = jnp.arange(batch, dtype=jnp.int32)
    rows = text_rows(slots, slots, jnp.full((batch,), held, jnp.int32))
    spans = spans_of(rows, batch)
    count = held // 2
    chosen = [np.sort(np.random.default_rng(i).permutation(count)[: cfg.index_topk])
              for i in range(batch)]  # fmt: skip
    selected = jnp.asarray(np.stack(chosen).astype(np.int32))
    reach = Reach(
        cfg.sliding_window, 2, caches.window_codec(cfg, numerics),
        caches.main_codec(cfg, numerics), cfg.head_dim**-0.5,
    )  # fmt: skip
    new = quant.qdq_fp8(random(7, batch, cfg.head_dim))
    floor, sink = jnp.zeros_like(slots), jnp.ones((cfg.num_attention_heads,), jnp.float32)

    def one(q, zero, window, kv, pages):
        ring, entries = Ring(window, LAYER), Entries(kv, 0, pages)
        own = dataclasses.replace(rows, positions=rows.positions + zero)
        return attention.attend(
            q, new, ring, entries, selected + zero, floor, sink, own, spans, reach, numerics
        )

    return one, (cache.window, cache.kv[0], cache.pages)


def random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def decoded(cfg: ModelConfig, numerics: Numerics, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """The kernels of scores and values on keys that are gathered and decoded already."""
    width = cfg.sliding_window + cfg.index_topk
    keys, mask = random(3, batch, width, cfg.head_dim), jnp.ones((batch, width), bool)
    sink = jnp.ones((cfg.num_attention_heads,), jnp.float32)

    def one(q, _, keys, mask):
        def row(own, shared):
            return nx.attend(*own, shared, cfg.head_dim**-0.5, numerics)

        return nx.map_rows(row, (q, keys, mask), sink, numerics)

    return one, (keys, mask)


def table(cfg: ModelConfig, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers [batch, S] into `batch` times HELD rows, each sequence among its own."""
    rng, width = np.random.default_rng(1), cfg.sliding_window + cfg.index_topk
    held = max(HELD, width)
    ids = np.stack([rng.permutation(held)[:width] + i * held for i in range(batch)])
    return ids.astype(np.int32), np.int64(held * batch)


def bridge(cfg: ModelConfig, numerics: Numerics, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """FlashMLA inside a program of JAX."""
    ids, count = table(cfg, batch)
    sink, scale = jnp.ones((cfg.num_attention_heads,), jnp.float32), cfg.head_dim**-0.5

    def one(q, _, rows, ids):
        nobody = jnp.zeros((batch, 0), jnp.int32)
        return call(attend_rows, q, rows, ids, nobody, sink, asked="flash_mla", scale=scale)[0]

    return one, (random(5, int(count), cfg.head_dim), jnp.asarray(ids))


def by_torch(cfg: ModelConfig, batch: int, repeats: int) -> list[float]:
    """FlashMLA's own call, recorded into a CUDA graph."""
    import torch
    from flash_mla import flash_mla_sparse_fwd

    ids, count = table(cfg, batch)
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, rows = make(batch, cfg.num_attention_heads, cfg.head_dim), make(int(count), 1, cfg.head_dim)
    where, sink = torch.from_numpy(ids).cuda()[:, None], torch.ones(len(q[0]), device="cuda")

    def chain() -> None:
        for _ in range(CHAIN):
            flash_mla_sparse_fwd(q, rows, where, cfg.head_dim**-0.5, 512, sink)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return timed(graph.replay, lambda _: torch.cuda.synchronize(), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="tiny widths, to try the script")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, cfg = machine(), released.slice_config(given.small)
    numerics = Numerics.native(rows=rows_for(jax.default_backend()))
    there = importlib.util.find_spec("flash_mla") is not None and jax.default_backend() == "gpu"
    forms = {"ours": ours, "decoded": decoded, **({"bridge": bridge} if there else {})}
    rows: list[dict[str, Any]] = []
    for batch in given.batches:
        row: dict[str, Any] = {"batch": batch}
        for name, form in forms.items():
            one, rest = form(cfg, numerics, batch)
            q = random(1, batch, cfg.num_attention_heads, cfg.head_dim)
            run = functools.partial(chained(one), q, *rest)
            row[f"{name}_us"] = timed(run, jax.block_until_ready, given.repeats)
        if there:
            row["flash_mla_us"] = by_torch(cfg, batch, given.repeats)
        medians = {k: statistics.median(v) for k, v in row.items() if k.endswith("_us")}
        if there:
            row["flash_mla_over_ours"] = medians["flash_mla_us"] / medians["ours_us"]
        rows.append(row)
        print(batch, {k: round(v, 1) for k, v in medians.items()}, flush=True)
        path = write_result(
            "gpu_attention", given.machine, __doc__,
            {"heads": cfg.num_attention_heads, "width": cfg.head_dim, "window": cfg.sliding_window,
             "entries": cfg.index_topk, "held": HELD, "numerics": numerics.fingerprint(),
             "flash_mla": importlib.metadata.version("flash_mla") if there else None},
            {"results": rows}, given.out, start,
        )  # fmt: skip
    print(path)


if __name__ == "__main__":
    main()
