"""The trainer's pass over finished sequences: no cache, whole batches, under differentiation."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import numerics as nx
from deepinfer_jax import params as parameters
from deepinfer_jax import steps
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.determinism.reference import Setup
from deepinfer_jax.determinism.schedules import Pair
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.steps import Scores
from deepinfer_jax.tables import Tables

MICRO_BATCH = 8
_PAD = 5  # contents of padding, which must not matter

scored = jax.jit(steps.score, static_argnames=("cfg", "numerics", "remat"))


@functools.partial(jax.jit, static_argnames=("cfg", "numerics", "remat"))
def trained(
    params: Any, tables: Tables, tokens: jax.Array, lengths: jax.Array, sampling: Sampling,
    cfg: ModelConfig, numerics: Numerics, remat: bool,
) -> tuple[tuple[jax.Array, Scores], Any]:  # fmt: skip
    """((mean negative log-probability, scores), gradient) of tokens [B, S] with lengths [B]."""

    def loss(params):
        scores = steps.score(
            params, tables, tokens, lengths, cfg, numerics, sampling=sampling, remat=remat
        )
        real = jnp.arange(1, tokens.shape[1])[None, :] < lengths[:, None]
        total = nx.plain_sum(jnp.where(real, scores.raw, 0).reshape(-1), 0)
        return -total / jnp.sum(lengths - 1, dtype=jnp.int32).astype(jnp.float32), scores

    return jax.value_and_grad(loss, has_aux=True)(params)


def score(setup: Setup) -> Iterator[Pair]:
    """`steps.score` of eight sequences at once, padded."""
    model = setup.model
    for numbers in _groups(setup, MICRO_BATCH):
        tokens, lengths = padded(setup, numbers, setup.capacity + 3)
        scores = scored(
            model.params, model.tables, tokens, lengths, model.cfg, model.numerics,
            sampling=sampling_of(setup, numbers),
        )  # fmt: skip
        yield from score_pairs(setup, numbers, scores)


def gradient(setup: Setup) -> Iterator[Pair]:
    """The same inside `value_and_grad`, float32 master weights, one sequence at a time."""
    yield from _train(setup, 1, setup.capacity + 1, remat=False)


def remat(setup: Setup) -> Iterator[Pair]:
    """The same with recomputation in the backward pass, eight sequences, other padding."""
    yield from _train(setup, MICRO_BATCH, setup.capacity + 6, remat=True)


def _train(setup: Setup, batch: int, width: int, *, remat: bool) -> Iterator[Pair]:
    model = setup.model
    masters = parameters.widen(model.params)
    for numbers in _groups(setup, batch):
        tokens, lengths = padded(setup, numbers, width)
        (_, scores), _ = trained(
            masters, model.tables, tokens, lengths, sampling_of(setup, numbers), model.cfg,
            model.numerics, remat,
        )  # fmt: skip
        yield from score_pairs(setup, numbers, scores)


def _groups(setup: Setup, batch: int) -> list[list[int]]:
    """The numbers of all references in groups of `batch`, the last group filled up."""
    count = len(setup.references)
    numbers = [i % count for i in range(-(-count // batch) * batch)]
    return [numbers[i : i + batch] for i in range(0, len(numbers), batch)]


def sampling_of(setup: Setup, numbers: Sequence[int]) -> Sampling:
    """What these references were sampled with, in order."""
    return setup.sampling(dict(enumerate(numbers)), len(numbers))


def padded(setup: Setup, numbers: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens [B, width] of these references, right-padded, and lengths [B]."""
    texts = [setup.references[n].text for n in numbers]
    tokens = np.full((len(texts), width), _PAD, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text.tokens
    return tokens, np.array([len(text) for text in texts], np.int32)


def score_pairs(setup: Setup, numbers: Sequence[int], scores: Scores) -> Iterator[Pair]:
    """What the sampler saw: log-probabilities of the following tokens, experts of every token.

    Processed log-probabilities and kept mass are compared where a token was drawn.
    """
    raw, routed = np.asarray(scores.raw), np.moveaxis(np.asarray(scores.routed), 0, 2)
    processed, kept = np.asarray(scores.processed), np.asarray(scores.kept_mass)
    for row, number in enumerate(numbers):
        reference = setup.references[number]
        length, reply = len(reference.text), reference.prompt - 1
        want = {name: reference.row(name, 0, length) for name in ("scored", "routed")}
        want |= {n: reference.row(n, reply, length - 1) for n in ("processed", "kept")}
        got = {
            "scored": raw[row, : length - 1],
            "routed": routed[row, :length],
            "processed": processed[row, reply : length - 1],
            "kept": kept[row, reply : length - 1],
        }
        yield Pair(f"request {number}, row {row} of {len(numbers)}", got, want)
