"""Groups: who gets which seed, and what a reward is worth within its group."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import rl
from deepinfer_jax.evaluation import tasks
from deepinfer_jax.sampling import seed_words

PROMPTS = [[5, 9, 17], [8], [3, 4, 6, 7, 11]]


def test_a_seed_is_that_of_the_request_of_this_name():
    """In `generate` and in an evaluation the same reply has the same noise."""
    for prompt, member in itertools.product(("sums-03", 7), (0, 5)):
        name = tasks.request_id(str(prompt), member)
        assert rl.member_seed(41, prompt, member) == di.request_seed(41, name)


def test_no_two_members_share_a_seed():
    names = itertools.product(range(3), range(40), range(16))
    assert len({rl.member_seed(*each) for each in names}) == 3 * 40 * 16


def test_a_group_is_the_same_beside_any_other():
    whole = rl.make_groups(PROMPTS, 4, seed=9, names=["a", "b", "c"], width=6)
    other = rl.make_groups([[1, 2], PROMPTS[1]], 4, seed=9, names=["z", "b"], width=6)
    np.testing.assert_array_equal(whole.tokens[4:8], other.tokens[4:8])
    np.testing.assert_array_equal(whole.sampling.seed[4:8], other.sampling.seed[4:8])


def test_arrays_fit_a_rollout():
    made = rl.make_groups(PROMPTS, 2, seed=9, temperature=0.7, top_k=3)
    np.testing.assert_array_equal(
        made.tokens,
        [[5, 9, 17, 0, 0]] * 2 + [[8, 0, 0, 0, 0]] * 2 + [[3, 4, 6, 7, 11]] * 2,
    )
    np.testing.assert_array_equal(made.lengths, [3, 3, 1, 1, 5, 5])
    seeds = [rl.member_seed(9, prompt, member) for prompt in range(3) for member in range(2)]
    np.testing.assert_array_equal(made.sampling.seed, seed_words(seeds, 6))
    assert set(made.sampling.temperature.tolist()) == {np.float32(0.7)}
    assert set(made.sampling.top_k.tolist()) == {3}
    assert made.tokens.dtype == made.lengths.dtype == np.int32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"members": 0}, r"members .* at least 1, got 0"),
        ({"names": ["a", "b"]}, r"names must be one for each of 3 prompts, got 2"),
        ({"names": ["1", 1, "b"]}, r"names must differ"),
        ({"width": 4}, r"prompts\[2\] has 5 tokens, more than width=4"),
        ({"prompts": []}, r"there are no prompts"),
        ({"prompts": [[1], []]}, r"prompts\[1\] is empty"),
        ({"temperature": -1.0}, r"temperature must be"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    given = {"prompts": PROMPTS, "members": 2, "seed": 0} | changes
    with pytest.raises(ValueError, match=message):
        rl.make_groups(given.pop("prompts"), given.pop("members"), **given)


def test_advantages_are_of_the_group():
    rewards = np.array([1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5, 0, 0, 0, 1])
    plain = rl.group_advantages(rewards, 4, scaled=False)
    np.testing.assert_array_equal(
        plain, np.float32([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, -0.25, -0.25, -0.25, 0.75])
    )
    scaled = rl.group_advantages(rewards, 4)
    spread = [0.5] * 4 + [1] * 4 + [0.1875**0.5] * 4
    np.testing.assert_allclose(scaled, plain / np.float32(spread), rtol=1e-5)  # the added 1e-6
    assert scaled.dtype == np.float32


def test_the_order_of_members_changes_no_bit():
    rewards = np.random.default_rng(4).random(8)
    for order in (np.arange(8)[::-1], np.random.default_rng(5).permutation(8)):
        np.testing.assert_array_equal(
            rl.group_advantages(rewards[order], 8), rl.group_advantages(rewards, 8)[order]
        )


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (np.zeros(5), r"multiple of members=2, got \(5,\)"),
        (np.zeros((2, 2)), r"got \(2, 2\)"),
        (np.array([0, np.nan]), r"rewards\[1\] must be finite, got nan"),
    ],
)
def test_odd_rewards_are_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        rl.group_advantages(rewards, 2)
