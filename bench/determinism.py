"""What does bit invariance cost, against plain XLA in the same run?

Whole programs of a model (decode, verification, scoring), and the products of one layer of the
released model by number of rows: the invariant form of this back end against `rows="batched"`,
plain XLA with the same grouped experts. Forms take turns; a ratio is of medians. On a GPU, where a
single product is over before the clock has ticked, its products are the matter of gpu_products.py.

    python bench/determinism.py --machine cpu2
    python bench/determinism.py --machine h200 --rows
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import machine, write_result
from layer import EXPERT, PRODUCTS

import deepinfer_jax as di
from deepinfer_jax import numerics as nx
from deepinfer_jax import quant, rounds
from deepinfer_jax.numerics import Numerics

DECODE, DRAFTS, SCORE = (1, 8, 32), 5, (8, 128)  # slots; drafts of 8 slots; sequences and tokens
_STATIC = ("cfg", "numerics")
_prefill = jax.jit(di.prefill, static_argnames=_STATIC)
_score = jax.jit(di.score, static_argnames=_STATIC)


def forms() -> dict[str, str]:
    """The two forms of `Numerics.rows` that are compared here."""
    return {"invariant": nx.rows_for(jax.default_backend()), "plain": "batched"}


# -- timing ----------------------------------------------------------------------------------------


def in_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, `repeats` times in turns, after one discarded turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def compared(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians in milliseconds and their ratio."""
    invariant, plain = (statistics.median(seconds[name]) for name in ("invariant", "plain"))
    return {"invariant_ms": 1e3 * invariant, "plain_ms": 1e3 * plain, "ratio": invariant / plain}


# -- whole programs --------------------------------------------------------------------------------


def programs(model: di.Model, repeats: int, loops: int) -> Iterator[tuple[str, dict[str, list]]]:
    """(name, seconds by form) of decode, verification and scoring; compiled side by side first."""
    builders: dict[str, Callable[[Numerics], Callable[[], Any]]] = {
        f"decode {batch}": functools.partial(_stepping, model, batch, 0, loops) for batch in DECODE
    }
    builders[f"verify 8x{DRAFTS + 1}"] = functools.partial(_stepping, model, 8, DRAFTS, loops)
    builders["score {}x{}".format(*SCORE)] = functools.partial(_scoring, model)

    def build(name: str, rows: str) -> Callable[[], Any]:
        run = builders[name](dataclasses.replace(model.numerics, rows=rows))
        jax.block_until_ready(run())
        return run

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        built = {
            name: {form: pool.submit(build, name, rows) for form, rows in forms().items()}
            for name in builders
        }
        runs = {name: {form: job.result() for form, job in each.items()}
                for name, each in built.items()}  # fmt: skip
    for name, each in runs.items():
        yield name, in_turns(each, repeats)


def _stepping(
    model: di.Model, batch: int, drafts: int, loops: int, numerics: Numerics
) -> Callable[[], Any]:
    """`loops` calls of `rounds.verify` behind a prompt of 96 tokens."""
    rng = np.random.default_rng(0)
    prompt = jnp.asarray(rng.integers(8, model.cfg.vocab_size, (batch, 96), np.int32))
    tokens, proposed = prompt[:, 0], prompt[:, :drafts]
    sampling = jax.device_put(di.make_sampling(batch, 1.0, seeds=range(batch)))
    active, scheduled = jnp.ones((batch,), bool), jnp.full((batch,), drafts, jnp.int32)
    cache = di.init_cache(model.cfg, numerics, batch, 512)
    every = di.batch_rows(prompt, jnp.full((batch,), 96, jnp.int32))
    _, cache = _prefill(model.params, model.tables, every, cache, sampling, model.cfg, numerics)
    return functools.partial(
        _many, model.params, model.tables, tokens, proposed, scheduled, active, cache, sampling,
        model.cfg, numerics, loops=loops,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=(*_STATIC, "loops"))
def _many(params, tables, tokens, drafts, scheduled, active, cache, sampling, cfg, numerics, loops):
    def step(carry, _):
        cache, tokens = carry
        sampled, cache = rounds.verify(
            params, tables, tokens, drafts, scheduled, active, cache, sampling, cfg, numerics
        )
        return (cache, sampled.token[:, 0]), None

    (_, tokens), _ = jax.lax.scan(step, (cache, tokens), length=loops)
    return tokens


def _scoring(model: di.Model, numerics: Numerics) -> Callable[[], Any]:
    b, s = SCORE
    tokens = np.random.default_rng(1).integers(8, model.cfg.vocab_size, (b, s), np.int32)
    lengths = np.full(b, s, np.int32)
    return functools.partial(
        _score, model.params, model.tables, tokens, lengths, model.cfg, numerics
    )


# -- products of a released layer ------------------------------------------------------------------

_product = jax.jit(nx.linear, static_argnames="numerics")


def products(counts: list[int], repeats: int) -> list[dict[str, Any]]:
    """Every product of the layer at every number of rows, from bfloat16 and from stored weights."""
    found = []
    for name, (k, n, times, stored) in {**PRODUCTS, **EXPERT}.items():
        wide = jax.random.normal(jax.random.key(0), (n, k)).astype(jnp.bfloat16)
        for kind in ("bf16", "released"):
            storage = stored if kind == "released" and stored else "bf16"
            weight = wide if storage == "bf16" else quant.quantize(wide, storage)
            for m in counts:
                x = jax.random.normal(jax.random.key(m), (m, k)).astype(jnp.bfloat16)
                runs = {
                    form: lambda x=x, w=weight, rows=rows: _product(
                        x, w, Numerics.native(False, rows)
                    )
                    for form, rows in forms().items()
                }
                row = {
                    "of": kind,
                    "name": name,
                    "k": k,
                    "n": n,
                    "times": times,
                    "storage": storage,
                    "rows": m,
                }
                found.append(row | compared(in_turns(runs, repeats)))
                print(name, storage, m, round(found[-1]["ratio"], 2), flush=True)
    return found


def layer_sums(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layer's products added up by storage and rows."""
    totals: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        total = totals.setdefault((row["of"], row["rows"]), [0.0, 0.0])
        for place, form in enumerate(("invariant_ms", "plain_ms")):
            total[place] += row["times"] * row[form]
    return [
        {"storage": kind, "rows": m, "invariant_ms": a, "plain_ms": b, "ratio": a / b}
        for (kind, m), (a, b) in totals.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--model", default="spark-tiny")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--loops", type=int, default=16, help="decode steps in one program")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start = machine()
    model = di.load(given.model)
    samples = {}
    for name, seconds in programs(model, given.repeats, given.loops):
        samples[name] = seconds
        print(name, {k: round(v, 3) for k, v in compared(seconds).items()}, flush=True)
    rows = products(given.rows, given.repeats)
    settings = {
        "name": Path(given.model).name, "numerics": dataclasses.asdict(model.numerics),
        "forms": forms(), "loops": given.loops,
    }  # fmt: skip
    results = {
        "programs": {name: compared(seconds) for name, seconds in samples.items()},
        "products": rows,
        "layer": layer_sums(rows),
    }
    found = {"samples": samples, "results": results}
    path = write_result("determinism", given.machine, __doc__, settings, found, given.out, start)
    for row in layer_sums(rows):
        print(f"layer, {row['storage']:9}{row['rows']:6} rows: {row['ratio']:.2f}")
    print(path)


if __name__ == "__main__":
    main()
