"""What does it cost a GPU to score index keys of a cache and to choose the best of them?

Scores of every entry of the batch's sequences and the choice of 512 of them, at released widths:
the kernels that read a packed cache and count digits, against keys decoded into memory some at a
time and XLA's sort. A decode step of one row for each sequence, and a chunk of one prompt. Times
are those of the kernels alone, from the profiler; the floor of scores is the bytes of the keys,
each sequence's once, over the bandwidth of a copy in the same run.

    python bench/gpu_index.py --machine h200
    python bench/gpu_index.py --machine h200 --batches 64 --contexts 262144 --walks
    python bench/gpu_index.py --machine local --small      # tries it, in an interpreter
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import machine, write_result
from gpu_decode import bandwidth
from jax import lax
from recording import recorded

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.cache import Codec
from deepinfer_jax.model import index
from deepinfer_jax.model.attention import Entries
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.numerics.pallas import indexing
from deepinfer_jax.rows import Rows, spans_of, text_rows

HEADS, WIDTH, BEST = 32, 128, 512
SIZE = quant.index_bytes(WIDTH)
CODEC = Codec("words", WIDTH, SIZE, quant.pack_index, quant.unpack_index, quant.qdq_index)
FIELD = index.Field(1, CODEC)


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` newest rows of each of `batch` sequences of `context` tokens."""

    batch: int
    rows: int
    context: int


@functools.partial(jax.jit, static_argnums=0)
def made(case: Case) -> tuple[index.IndexQuery, jax.Array, Rows]:
    """Queries, packed keys of one page a sequence, and rows."""
    t, keys = case.batch * case.rows, jax.random.split(jax.random.key(1), 4)
    heads = quant.qdq_index(jax.random.normal(keys[0], (t, HEADS, WIDTH)).astype(jnp.bfloat16))
    gain = jax.random.normal(keys[1], (t, HEADS)).astype(jnp.bfloat16)
    words = jax.random.bits(keys[2], (1, case.batch, case.context, SIZE // 4), jnp.uint32)
    scale = (words & 0x03030303) + np.uint32(0x7A7A7A7A)
    last = lax.broadcasted_iota(jnp.int32, words.shape, 3) == SIZE // 4 - 1
    slot = jnp.repeat(jnp.arange(case.batch, dtype=jnp.int32), case.rows)
    place = jnp.tile(jnp.arange(case.rows, dtype=jnp.int32), case.batch)
    rows = text_rows(slot * 0, slot, case.context - case.rows + place)
    return index.IndexQuery(heads, gain), jnp.where(last, scale, words), rows


def arguments(query: Any, data: jax.Array, rows: Rows) -> tuple[Any, ...]:
    pages = jnp.arange(data.shape[1], dtype=jnp.int32)[:, None]
    ids = jnp.arange(data.shape[2], dtype=jnp.int32)
    return query, Entries(data, jnp.int32(0), pages), ids, rows.positions + 1, rows


@functools.partial(jax.jit, static_argnames=("numerics", "walk"))
def scored(
    query: Any, data: jax.Array, rows: Rows, numerics: Numerics, walk: indexing.Walk | None = None
) -> jax.Array:
    """By the kernel over the cache."""
    query, entries, ids, visible, rows = arguments(query, data, rows)
    where = entries.data, entries.source, entries.pages
    if walk is None:
        return nx.index_cache(query.heads, query.weights, where, rows.slots, visible, ids, numerics)
    return indexing.index_cache(
        query.heads,
        query.weights,
        where,
        rows.slots,
        visible,
        ids,
        "once",
        numerics.interpret,
        walk,
    )


@functools.partial(jax.jit, static_argnames="numerics")
def scored_in_blocks(query: Any, data: jax.Array, rows: Rows, numerics: Numerics) -> jax.Array:
    each = arguments(query, data, rows)
    spans = spans_of(rows, data.shape[1])
    return index.scores_in_blocks(*each, spans, FIELD, numerics)


@functools.partial(jax.jit, static_argnames="numerics")
def selected(score: jax.Array, numerics: Numerics) -> jax.Array:
    ids = jnp.arange(score.shape[1], dtype=jnp.int32)
    return index.select(score, ids, BEST, numerics)


def device_us(run: Any, repeats: int) -> tuple[Any, float]:
    """What `run` returns, and microseconds of its kernels, the mean of `repeats` calls."""
    value = jax.block_until_ready(run())
    if jax.default_backend() == "cpu":
        return value, float("nan")
    _, ran = recorded(lambda: [run() for _ in range(repeats)])
    return value, sum(kernel.end - kernel.begin for kernel in ran) / 1e3 / repeats


def programs(case: Case, numerics: Numerics, walks: bool) -> dict[str, Any]:
    """All that is measured, compiled."""
    given = jax.eval_shape(functools.partial(made, case))
    score = jax.ShapeDtypeStruct((case.batch * case.rows, case.context), jnp.float32)
    plain = dataclasses.replace(numerics, rows="batched", interpret=False)
    found = {
        "made": made.lower(case),
        "scores": scored.lower(*given, numerics),
        "scores_in_blocks": scored_in_blocks.lower(*given, numerics),
        "choice": selected.lower(score, numerics),
        "choice_sorted": selected.lower(score, plain),
    }
    for tiles, stages in ((4, 1), (16, 1), (32, 1), (8, 2), (8, 3)) if walks else ():
        walk = indexing.Walk(tiles, 4, stages)
        found[f"scores_{tiles}_tiles_{stages}_stages"] = scored.lower(*given, numerics, walk)
    return {name: each.compile() for name, each in found.items()}


def measured(case: Case, run: dict[str, Any], repeats: int, speed: float) -> dict[str, Any]:
    given, made_by, us = jax.block_until_ready(run.pop("made")()), {}, {}
    for name, program in run.items():
        what = (made_by["scores"],) if name.startswith("choice") else given
        value, us[f"{name}_us"] = device_us(functools.partial(program, *what), repeats)
        if name in ("scores", "choice"):
            made_by[name] = value
        else:
            same = made_by[name.split("_")[0]]
            us[f"{name}_differ"] = int(jnp.sum(value != same, dtype=jnp.int32))
    floor = 1e6 * case.batch * case.context * SIZE / speed
    return {**dataclasses.asdict(case), "floor_us": floor, **us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 65536, 262144])
    parser.add_argument("--chunks", type=int, nargs="*", default=[1024, 4096], help="prompt rows")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--walks", action="store_true", help="other schedules too")
    parser.add_argument("--small", action="store_true", help="few and short sequences")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given, start = parser.parse_args(), machine()
    numerics, began = Numerics.native(rows="pallas"), time.perf_counter()
    cases = [Case(b, 1, n) for n in given.contexts for b in given.batches]
    cases += [Case(1, rows, 2 * rows) for rows in given.chunks]
    if given.small:
        numerics = dataclasses.replace(numerics, interpret=jax.default_backend() == "cpu")
        cases = [Case(2, 1, 600), Case(1, 3, 700)]
    speed = bandwidth(1 << 20 if given.small else 4 << 30)
    answers: dict[str, Any] = {"bandwidth_bytes_per_s": speed, "results": []}
    settings = {"numerics": numerics.fingerprint(), "repeats": given.repeats}
    with ThreadPoolExecutor(1 if given.small else 12) as pool:
        compiled = list(pool.map(lambda case: programs(case, numerics, given.walks), cases))
    answers["compile_s"] = time.perf_counter() - began
    for case, run in zip(cases, compiled, strict=True):
        row = measured(case, run, given.repeats, speed)
        answers["results"].append(row)
        print({name: round(v, 1) for name, v in row.items()}, flush=True)
        answers["seconds"] = time.perf_counter() - began
        path = write_result(
            "gpu_index", given.machine, __doc__, settings, answers, given.out, start
        )
    print(path)


if __name__ == "__main__":
    main()
