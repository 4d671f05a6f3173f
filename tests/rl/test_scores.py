"""Any policy's log-probs of a rollout, why replies end, and new weights in a compiled program.

Programs of their own, hence exhaustive; the default run has `test_rollout.py`, whose gradient calls
`score`.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from deepinfer_jax import params as parameters
from deepinfer_jax import rl, sampling, scoring
from deepinfer_jax.determinism.equality import bits
from tests import tiny_model

B, P, NEW = 3, 7, 6
LENGTHS = np.array([7, 2, 5], np.int32)
NUMBERS = ("raw", "processed", "kept_mass")
SAMPLING = sampling.make_sampling(B, (1.0, 0.8, 1.3), (1.0, 0.9, 1.0), seeds=[3, 5, 2**40])
LIMITS = np.array([NEW, 3, NEW], np.int32)

_rollout = jax.jit(rl.rollout, static_argnames=("cfg", "numerics", "new", "size", "routed"))
_score = jax.jit(rl.score, static_argnames=("cfg", "numerics", "micro", "remat"))


@functools.cache
def prompts() -> np.ndarray:
    return np.random.default_rng(8).integers(3, 2048, (B, P)).astype(np.int32)


@functools.cache
def weights(key: int):
    """Two policies of one shape."""
    model = tiny_model.model()
    if key == 0:
        return model.params
    return parameters.decode(parameters.init(jax.random.key(key), model.cfg))


def roll(key: int, stops: np.ndarray) -> rl.Rollout:
    model = tiny_model.model()
    made = _rollout(
        weights(key), model.tables, prompts(), LENGTHS, SAMPLING, stops, model.cfg,
        model.numerics, new=NEW, limits=LIMITS, routed=True,
    )  # fmt: skip
    return jax.tree.map(np.asarray, made)


NO_STOPS = np.full((B, 1), -1, np.int32)


@functools.cache
def made() -> rl.Rollout:
    return roll(0, NO_STOPS)


def scored(key: int, **how) -> rl.Logprobs:
    model = tiny_model.model()
    seen = _score(
        weights(key), model.tables, made(), SAMPLING, model.cfg, model.numerics, **how
    )  # fmt: skip
    return jax.tree.map(np.asarray, seen)


@pytest.mark.exhaustive
def test_scores_are_the_samplers_whatever_the_micro_batch():
    """Zeros in the same places, the same bits elsewhere; the reply of three tokens among them."""
    assert made().sampled.sum() == 2 * NEW + 3
    for how in ({}, {"micro": 1}):
        seen = scored(0, **how)
        for name in NUMBERS:
            want = getattr(made(), name)
            np.testing.assert_array_equal(bits(getattr(seen, name)), bits(want), err_msg=name)


@pytest.mark.exhaustive
def test_new_weights_are_another_argument():
    """Of sampler and scorer: other numbers from the program that is there."""
    made(), scored(0)
    counts = _rollout._cache_size(), _score._cache_size()
    other, seen = roll(1, NO_STOPS), scored(1)
    assert (other.tokens != made().tokens).any()
    assert (seen.raw != made().raw)[made().sampled].all()
    again = roll(0, NO_STOPS)
    for name in ("tokens", *NUMBERS):
        np.testing.assert_array_equal(bits(getattr(again, name)), bits(getattr(made(), name)))
    assert (_rollout._cache_size(), _score._cache_size()) == counts


@pytest.mark.exhaustive
def test_a_reply_ends_at_its_own_stop_token_or_limit():
    assert made().stop_reasons() == ["length"] * B
    stop = made().tokens[0, LENGTHS[0] + 2]
    ended = roll(0, np.array([[stop], [made().tokens[1, 2 + 2]], [-1]], np.int32))
    assert ended.stop_reasons() == ["stop", "stop", "length"]
    np.testing.assert_array_equal(ended.lengths - LENGTHS, [3, 3, NEW])
    for row, end in enumerate(ended.lengths):
        np.testing.assert_array_equal(ended.tokens[row, :end], made().tokens[row, :end])
        assert not ended.tokens[row, end:].any()


@pytest.mark.exhaustive
def test_experts_are_those_of_every_token():
    model = tiny_model.model()
    rows = [made().tokens[row, :end].tolist() for row, end in enumerate(made().lengths)]
    wanted = scoring.score_sequences(model, rows, routed=True)
    got = made().routed
    assert got.shape == (model.cfg.num_hidden_layers, B, P + NEW, model.cfg.num_experts_per_tok)
    for row, want in enumerate(wanted):
        end = len(rows[row])
        np.testing.assert_array_equal(np.moveaxis(got[:, row, :end], 0, 1), want.routed)
        assert (got[:, row, end:] == -1).all()


def refused(message: str, call, **changes) -> None:
    model = tiny_model.model()
    with pytest.raises(ValueError, match=message):
        call(weights(0), model.tables, cfg=model.cfg, numerics=model.numerics, **changes)


def test_what_does_not_fit_is_refused():
    nothing = np.zeros((B, P + NEW), np.int32)
    numbers = np.zeros((B, P + NEW - 1), np.float32)
    made = rl.Rollout(nothing, LENGTHS, LENGTHS, *[numbers] * 3, LENGTHS > 0, np.int32(0))
    refused(r"micro .* divide the 3 replies", rl.score, rollout=made, sampling=SAMPLING, micro=2)
    given = {"rollout": made, "sampling": SAMPLING, "advantages": np.zeros(B, np.float32)}
    one, early = {"advantages": np.zeros(1, np.float32)}, np.zeros((1, P + NEW - 1), np.float32)
    for message, change in (
        (r"advantages must have shape \[3\].* got \[1\]", one),
        (r"reference must have shape \[3, 12\].* got \[1, 12\]", {"reference": early}),
        (r"clip must be above 0", {"clip": 0.0}),
        (r"beta must be at least 0", {"beta": float("nan")}),
        (r"beta=0.1 .* pass reference", {"beta": 0.1}),
    ):
        refused(message, rl.policy_gradient, **(given | change))
    whole = {"prompts": prompts(), "lengths": LENGTHS, "sampling": SAMPLING, "new": NEW}
    refused(
        r"lengths must have shape \[3\]", rl.rollout, stops=NO_STOPS,
        **(whole | {"lengths": LENGTHS[:1]}),
    )  # fmt: skip
    refused(r"stops must have shape \[K\]", rl.rollout, stops=np.zeros((2, 1), np.int32), **whole)
    refused(
        r"limits must have shape \[3\]", rl.rollout, stops=NO_STOPS, limits=np.ones(2, np.int32),
        **whole,
    )  # fmt: skip
