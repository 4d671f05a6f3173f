"""Speculation with the model's own drafter, and whole batches over several devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import numpy as np

from deepinfer_jax import layout, parallel, rl
from deepinfer_jax.determinism.reference import LONGEST_PROMPT, Setup
from deepinfer_jax.determinism.schedules import Pair
from deepinfer_jax.determinism.training import MICRO_BATCH, padded, sampling_of, score_pairs

MOST_DEVICES = 8
_ROUNDS = 16  # of a schedule, then it repeats
_NO_STOPS = np.array([-1], np.int32)

_rollout = jax.jit(rl.rollout, static_argnames=("cfg", "numerics", "new", "size"))
_score = jax.jit(parallel.score, static_argnames=("cfg", "numerics", "mesh"))


def speculation(setup: Setup) -> Iterator[Pair]:
    """All requests at once in verified rounds, as many drafts of each as a schedule says."""
    model, references = setup.model, setup.references
    size = model.cfg.most_drafts
    prompts = np.zeros((len(references), LONGEST_PROMPT), np.int32)
    for row, reference in zip(prompts, references, strict=True):
        row[: reference.prompt] = reference.request.tokens
    lengths = np.array([reference.prompt for reference in references], np.int32)
    sampling = setup.sampling({n: n for n in range(len(references))}, len(references))
    drawn = setup.rng("speculation").integers(0, size + 1, (_ROUNDS, len(references)))
    made = _rollout(
        model.params, model.tables, prompts, lengths, sampling, _NO_STOPS, model.cfg,
        model.numerics, new=references[0].request.options.max_tokens, size=size,
        scheduled=drawn.astype(np.int32),
    )  # fmt: skip
    tokens = np.asarray(made.tokens)
    for number, reference in enumerate(references):
        first, end = reference.prompt - 1, len(reference.text) - 1
        want = {n: reference.row(n, first, end) for n in ("token", "raw", "processed", "kept")}
        got = {
            "token": tokens[number, first + 1 : end + 1],
            "raw": np.asarray(made.raw)[number, first:end],
            "processed": np.asarray(made.processed)[number, first:end],
            "kept": np.asarray(made.kept_mass)[number, first:end],
        }
        yield Pair(f"request {number}", got, want)


def devices_to_use() -> int:
    """The largest power of two of devices, at most eight."""
    count = 1
    while 2 * count <= min(len(jax.devices()), MOST_DEVICES):
        count *= 2
    return count


def devices(setup: Setup) -> Iterator[Pair]:
    """Scores over a data and expert mesh of `devices_to_use()`.

    The experts are split as far as their number allows. One device alone: nothing to compare.
    """
    model, count = setup.model, devices_to_use()
    if count == 1:
        return
    experts = [model.cfg.n_routed_experts]
    if model.cfg.num_nextn_predict_layers:
        experts.append(model.cfg.dspark_n_routed_experts)
    expert = math.gcd(count, *experts)
    mesh = parallel.data_expert_mesh(count // expert, expert, model.cfg, jax.devices()[:count])
    numbers = [i % len(setup.references) for i in range(MICRO_BATCH)]
    tokens, lengths = padded(setup, numbers, setup.capacity + 3)
    scores = _score(
        layout.place(model.params, model.cfg, mesh), model.tables, tokens, lengths, model.cfg,
        model.numerics, mesh, sampling=sampling_of(setup, numbers),
    )  # fmt: skip
    yield from score_pairs(setup, numbers, scores)
