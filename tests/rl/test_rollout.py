"""Rollouts: what the engine says at every draft schedule, and a trainer that agrees."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepinfer_jax as di
from deepinfer_jax import params as parameters
from deepinfer_jax import rl, sampling
from deepinfer_jax.determinism.equality import bits
from tests import tiny_model

B, P, NEW, DRAFTS = 3, 11, 14, 3
LENGTHS = np.array([11, 4, 7], np.int32)
STOPS = np.array([1, 700, 701], np.int32)
# The random model's drafts are right where noise decides, at a high temperature.
OPTIONS = {"temperature": (30.0, 0.6, 0.0), "top_p": (1.0, 0.8, 1.0), "top_k": (-1, 300, -1)}
SEEDS = range(4)
ADAM = optax.adam(3e-3)

_rollout = jax.jit(rl.rollout, static_argnames=("cfg", "numerics", "new", "size"))
_gradient = jax.jit(rl.policy_gradient, static_argnames=("cfg", "numerics", "remat"))


@functools.cache
def prompts() -> np.ndarray:
    return np.random.default_rng(3).integers(3, 2048, (B, P)).astype(np.int32)


@functools.cache
def masters():
    """What a trainer holds: float32, from the stored weights."""
    return parameters.widen(tiny_model.model().params)


def seeds_of(seed: int) -> list[int]:
    return [seed, 1000 + seed, 2**63 + seed]


def options(seed: int, **changes) -> sampling.Sampling:
    return sampling.make_sampling(B, **(OPTIONS | changes), seeds=seeds_of(seed))


def roll(weights, chosen: sampling.Sampling, scheduled: np.ndarray) -> rl.Rollout:
    model = tiny_model.model()
    made = _rollout(
        weights, model.tables, prompts(), LENGTHS, chosen, STOPS, model.cfg, model.numerics,
        new=NEW, size=DRAFTS, scheduled=scheduled,
    )  # fmt: skip
    return jax.tree.map(np.asarray, made)


def every_round(count: int) -> np.ndarray:
    return np.full((4, B), count, np.int32)


@functools.cache
def engine(seed: int) -> list[di.Result]:
    """The replies by `generate`, one by one, without drafts, from the stored weights."""
    requests = [
        {"tokens": row[:length].tolist(), "seed": own} | {n: OPTIONS[n][i] for n in OPTIONS}
        for i, (row, length, own) in enumerate(
            zip(prompts(), LENGTHS.tolist(), seeds_of(seed), strict=True)
        )
    ]
    stops = STOPS.tolist()
    return di.generate(
        tiny_model.model(), requests, max_tokens=NEW, stop_token_ids=stops, batch_size=1
    )


def check(made: rl.Rollout, seed: int) -> None:
    """Tokens and all numbers are the engine's in every bit; nothing stands elsewhere."""
    for row, want in enumerate(engine(seed)):
        start, end = LENGTHS[row], made.lengths[row]
        np.testing.assert_array_equal(made.tokens[row, :start], prompts()[row, :start])
        np.testing.assert_array_equal(made.tokens[row, start:end], want.tokens)
        for name, values in (
            ("raw", want.logprobs),
            ("processed", want.logprobs_processed),
            ("kept_mass", want.kept_mass),
        ):
            got = getattr(made, name)[row]
            expected = np.zeros_like(got)
            expected[start - 1 : end - 1] = values
            np.testing.assert_array_equal(bits(got), bits(expected), err_msg=name)
        assert not made.tokens[row, end:].any()
        assert made.sampled[row].sum() == end - start


SCHEDULES = st.lists(
    st.tuples(*[st.integers(0, DRAFTS)] * B), min_size=4, max_size=4
).map(lambda rounds: np.array(rounds, np.int32))  # fmt: skip


@pytest.mark.exhaustive
@given(scheduled=SCHEDULES, seed=st.sampled_from(SEEDS))
@settings(max_examples=20)
def test_no_schedule_of_drafts_changes_a_bit(scheduled, seed):
    check(roll(masters(), options(seed), scheduled), seed)


@pytest.mark.exhaustive  # the default run counts accepted drafts in tests/test_rounds.py
def test_drafts_are_accepted_and_save_rounds():
    """The property above would hold of a drafter that is always wrong, too."""
    flat = options(5, temperature=30.0, top_p=1.0, top_k=-1)
    alone, drafted = (roll(masters(), flat, every_round(count)) for count in (0, DRAFTS))
    np.testing.assert_array_equal(drafted.tokens, alone.tokens)
    assert drafted.rounds < alone.rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "remat"), [(4, False), pytest.param(20, True, marks=pytest.mark.exhaustive)]
)
def test_steps_without_any_difference(count, remat):
    """Policy gradient: after every update sampler and trainer give the same bits, KL exactly 0;
    with recomputation, which trainers of large models need, too.
    """
    model, weights = tiny_model.model(), masters()
    state = jax.jit(ADAM.init)(weights)
    for step in range(count):
        chosen = options(100 + step, temperature=(1.0, 0.9, 1.2), top_p=(1.0, 0.95, 1.0))
        made = roll(weights, chosen, every_round(step % (DRAFTS + 1)))
        reward = _share_of_odd_tokens(made)
        slope, agreement = _gradient(
            weights, model.tables, made, reward - reward.mean(), chosen, model.cfg, model.numerics,
            remat=remat,
        )  # fmt: skip
        assert float(agreement.raw) == 0
        assert float(agreement.processed) == 0
        assert float(agreement.kl) == 0
        assert int(agreement.tokens) == made.sampled.sum()
        moved, state = _moved(weights, slope, state)
        assert (moved["head"] != weights["head"]).any()
        weights = moved


@jax.jit
def _moved(weights, slope, state):
    with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with integers
        updates, state = ADAM.update(slope, state)
    return optax.apply_updates(weights, updates), state


def _share_of_odd_tokens(made: rl.Rollout) -> np.ndarray:
    odd = made.sampled & (made.tokens[:, 1:] % 2 == 1)
    return (odd.sum(axis=1) / made.sampled.sum(axis=1)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_step_along_the_gradient_lowers_the_loss_of_its_batch():
    """By what the slope says, as far as weights in bfloat16 follow: measured 1.1 of it. A token
    that the new weights' truncation removes has a ratio of 0 and leaves no NaN.
    """
    model, weights = tiny_model.model(), masters()
    chosen = options(100, temperature=(1.0, 0.9, 1.2), top_p=(1.0, 0.95, 1.0))
    made = roll(weights, chosen, every_round(0))
    advantages = _share_of_odd_tokens(made) - _share_of_odd_tokens(made).mean()

    def gradient(at):
        return _gradient(
            at, model.tables, made, advantages, chosen, model.cfg, model.numerics
        )  # fmt: skip

    slope, before = gradient(weights)
    steepness = _length(slope)
    size = np.float32(0.1 / steepness)
    again, after = gradient(jax.tree.map(lambda w, g: w - size * g, weights, slope))
    fall = float(before.loss) - float(after.loss)
    assert 0.5 < fall / (0.1 * steepness) < 1.5
    assert float(after.kl) == float(after.processed) == np.inf
    assert np.isfinite(_length(again))


def _length(tree) -> float:
    return math.sqrt(sum(float(np.vdot(leaf, leaf)) for leaf in jax.tree.leaves(tree)))


def test_one_last_bit_would_be_noticed():
    """The zeros above are no blindness: one log-prob moved by one unit in the last place."""
    model, chosen = tiny_model.model(), options(7)
    made = roll(masters(), chosen, every_round(0))
    raw = made.raw.copy()
    raw[1, LENGTHS[1]] = np.nextafter(raw[1, LENGTHS[1]], np.float32(0))
    zeros = jnp.zeros((B,), jnp.float32)
    moved = dataclasses.replace(made, raw=raw)
    _, agreement = _gradient(
        masters(), model.tables, moved, zeros, chosen, model.cfg, model.numerics
    )
    assert float(agreement.raw) == np.abs(raw - made.raw).max() > 0
