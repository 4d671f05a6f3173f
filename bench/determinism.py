"""What does bit invariance cost, against plain XLA in the same run?

Two halves. `--programs`: whole programs of a model (decode, verification, scoring), the invariant
form of this back end against `rows="batched"`, which runs the same grouped experts. `--products`:
the products of one released layer (K 5120/1280/8192/2304, N as released) by number of rows M, with
weights in bfloat16 and as stored (FP8, FP4). Forms take turns; a ratio is of medians.

    python bench/determinism.py --machine cpu2
    python bench/determinism.py --machine h200 --rows 1 8 64 256 1024 4096
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import deepinfer_jax as di
from deepinfer_jax import numerics as nx
from deepinfer_jax import steps

DECODE, DRAFTS, SCORE = (1, 8, 32), 5, (8, 128)  # slots; drafts of 8 slots; sequences and tokens
_STATIC = ("cfg", "numerics")


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
    """(name, seconds by form) of decode, verification and scoring."""
    for batch in DECODE:
        yield f"decode {batch}", in_turns(_stepping(model, batch, 0, loops), repeats)
    yield f"verify 8x{DRAFTS + 1}", in_turns(_stepping(model, 8, DRAFTS, loops), repeats)
    yield "score {}x{}".format(*SCORE), in_turns(_scoring(model), repeats)


def _stepping(model: di.Model, batch: int, drafts: int, loops: int) -> dict[str, Callable]:
    """`loops` calls of `steps.verify` behind a prompt of 96 tokens, by form."""
    rng = np.random.default_rng(0)
    prompt = jnp.asarray(rng.integers(8, model.cfg.vocab_size, (batch, 96), np.int32))
    tokens, proposed = prompt[:, 0], prompt[:, :drafts]
    sampling = jax.device_put(di.make_sampling(batch, 1.0, seeds=range(batch)))
    active, scheduled = jnp.ones((batch,), bool), jnp.full((batch,), drafts, jnp.int32)
    found = {}
    for name, rows in forms().items():
        numerics = dataclasses.replace(model.numerics, rows=rows)
        cache = di.init_cache(model.cfg, numerics, batch, 512)
        fill = jax.jit(di.prefill, static_argnames=_STATIC)
        every = di.batch_rows(prompt, jnp.full((batch,), 96, jnp.int32))
        _, cache = fill(model.params, model.tables, every, cache, sampling, model.cfg, numerics)
        many = jax.jit(_many, static_argnames=(*_STATIC, "loops"))

        def run(many=many, cache=cache, numerics=numerics):
            return many(
                model.params, model.tables, tokens, proposed, scheduled, active, cache, sampling,
                model.cfg, numerics, loops=loops,
            )  # fmt: skip

        found[name] = run
    return found


def _many(params, tables, tokens, drafts, scheduled, active, cache, sampling, cfg, numerics, loops):
    def step(carry, _):
        cache, tokens = carry
        sampled, cache = steps.verify(
            params, tables, tokens, drafts, scheduled, active, cache, sampling, cfg, numerics
        )
        return (cache, sampled.token[:, 0]), None

    (_, tokens), _ = jax.lax.scan(step, (cache, tokens), length=loops)
    return tokens


def _scoring(model: di.Model) -> dict[str, Callable]:
    b, s = SCORE
    tokens = np.random.default_rng(1).integers(8, model.cfg.vocab_size, (b, s), np.int32)
    lengths = np.full(b, s, np.int32)
    score = jax.jit(di.score, static_argnames=_STATIC)
    return {
        name: lambda rows=rows: score(
            model.params, model.tables, tokens, lengths, model.cfg,
            dataclasses.replace(model.numerics, rows=rows),
        )
        for name, rows in forms().items()
    }  # fmt: skip
