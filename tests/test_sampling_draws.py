"""Tokens follow the distribution they should, alone and by coupled speculation."""

import dataclasses
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from deepinfer_jax import sampling
from tests.compiled_sampling import (
    ACCEPTANCE,
    ACCEPTED,
    CHOOSE,
    GUMBEL,
    SAMPLE,
    WORDS,
    log_probabilities,
    survivors_by_sorting,
)

# -- goodness of fit ------------------------------------------------------------------------------

DRAWS = 20_000


def assert_fits(counts, expected):
    """Chi-square at one in a million (Wilson-Hilferty); cells are pooled up to 8 expected draws."""
    counts, expected = np.ravel(counts), np.ravel(expected)
    assert counts[expected == 0].sum() == 0
    small = expected < 8
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    if freedom == 0:
        return
    chi2 = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    assert chi2 < freedom * (1 - spread + 4.75 * spread**0.5) ** 3, (counts, expected)


def names(axis):
    """DRAWS (seed, index) pairs that differ in one of the two only."""
    steps = np.arange(DRAWS)
    if axis == "index":
        return sampling.seed_words([12345] * DRAWS, DRAWS), steps.astype(np.int32)
    return sampling.seed_words(range(10**9, 10**9 + DRAWS), DRAWS), np.full(DRAWS, 41, np.int32)


def draw(logits, limits, seed, index):
    """One token per name [DRAWS] from one row of logits [11]."""
    params = dataclasses.replace(
        sampling.make_sampling(DRAWS, *limits, seeds=[0] * DRAWS), seed=seed
    )
    return np.asarray(SAMPLE(np.tile(logits, (DRAWS, 1)), params, index).token)


@pytest.mark.parametrize("axis", ["index", "seed"])
@pytest.mark.parametrize(
    "limits",
    [
        (1.0, 1.0, -1, 0.0),
        (0.6, 1.0, -1, 0.0),
        (1.8, 1.0, -1, 0.0),
        (1.0, 0.8, -1, 0.0),
        (1.0, 1.0, 4, 0.0),
        (1.0, 1.0, -1, 0.1),
        (1.3, 0.9, 6, 0.02),
    ],
    ids=["plain", "cold", "hot", "top_p", "top_k", "min_p", "all"],
)
def test_draws_fit_the_distribution(limits, axis):
    logits = np.array([0.3, 2.0, -1.0, 1.1, -4.0, 0.9, 1.9, -0.2, -2.0, 0.0, 0.6], np.float32)
    kept, share = survivors_by_sorting(logits, *limits)
    seed, index = names(axis)
    token = draw(logits, limits, seed, index)
    chance = np.zeros(11)
    chance[kept] = share[kept] / share[kept].sum()
    assert_fits(np.bincount(token, minlength=11), DRAWS * chance)
    pairs = np.bincount(token[:-1:2] * 11 + token[1::2], minlength=121)
    assert_fits(pairs, DRAWS / 2 * np.outer(chance, chance))  # neighbours are independent


def test_noise_is_gumbel_in_every_direction():
    seed, index = names("index")
    noise = np.asarray(GUMBEL(seed[:200], index[:200], np.arange(300)), np.float64)
    uniform = np.exp(-np.exp(-noise))
    for view in (uniform, uniform[:, 1:] - uniform[:, :-1], uniform[1:] - uniform[:-1]):
        cells = np.bincount((view % 1 * 64).astype(int).ravel(), minlength=64)
        assert_fits(cells, np.full(64, view.size / 64))


# Threefry is a bijection of the counter, so names with wanted words were found by inverting it:
# (seed, index, id, word 0, word 1); the second word of the last two does not matter.
CRAFTED = [
    (2189845891917963777, 1933351552, 98, 0, 933341272),
    (4776610645590262369, 137099766, 960, 3, 1311641987),
    (3502074620302280055, 2054103618, 300, 70, 990880851),
    (12789879256216653589, 1123519045, 622, 0, 0),
]
TOP = (2177046515500351968, 321092610, 310)


def crafted_names():
    seed = sampling.seed_words([c[0] for c in CRAFTED], len(CRAFTED))
    return seed, np.array([c[1] for c in CRAFTED], np.int32)


def test_very_unlikely_tokens_win_exactly_when_they_should():
    seed, index = crafted_names()
    w0, w1 = (np.asarray(w) for w in WORDS(seed, index, np.arange(1024)))
    won = []
    for chance in (1e-6, 1e-8, 1e-9, 1e-12):
        logits = np.full((len(CRAFTED), 1024), -np.inf, np.float32)
        logits[:, 0] = 0
        for row, (_, _, token, *words) in enumerate(CRAFTED):
            assert [w0[row, token], w1[row, token]] == words
            logits[row, token] = np.log(chance)
        got = CHOOSE(logits, seed, index)
        for row, (_, _, token, *_) in enumerate(CRAFTED):  # a race of exponentials, in float64
            arrival = []
            for entry in (0, token):
                uniform = Fraction(int(w0[row, entry]) * 2**32 + int(w1[row, entry]), 2**64)
                uniform = max(uniform, Fraction(1, 2**64))
                arrival.append(-np.log1p(-float(uniform)))
            expected = token if arrival[1] / chance < arrival[0] else 0
            assert got[row] == expected
            won.append((chance, expected != 0))
    assert (1e-8, True) in won
    assert (1e-12, True) in won
    assert (1e-12, False) in won


def test_noise_is_finite_at_both_ends():
    seed, index = crafted_names()
    low = GUMBEL(seed[-1:], index[-1:], np.array([CRAFTED[-1][2]]))[0, 0]
    np.testing.assert_allclose(low, 64 * np.log(2), rtol=1e-6)
    high = GUMBEL(
        sampling.seed_words([TOP[0]], 1), np.array([TOP[1]], np.int32), np.array([TOP[2]])
    )
    np.testing.assert_allclose(high[0, 0], -np.log(24 * np.log(2)), rtol=1e-6)


# -- coupled speculation --------------------------------------------------------------------------


@hypothesis.given(
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.integers(0, 7),
)
def test_accepted_counts_the_agreeing_verified_prefix(target, draft, length):
    expected = 0
    while expected < min(length, 5) and target[expected] == draft[expected]:
        expected += 1
    target, draft = np.array([target], np.int32), np.array([draft], np.int32)
    for verified in (target, target[:, :5]):
        assert ACCEPTED(verified, draft, np.array([length], np.int32))[0] == expected


def test_acceptance_probability_is_the_frequency_of_agreement():
    rng = np.random.default_rng(3)
    seed, index = names("index")
    for noise in (0.3, 1.0):
        p, q = (rng.standard_normal((1, 11)) for _ in range(2))
        logits = np.concatenate([p, p + noise * q]).astype(np.float32)
        logp = log_probabilities(logits)
        target, draft = (draw(row, (1.0, 1.0, -1, 0.0), seed, index) for row in logits)
        chance = float(ACCEPTANCE(np.exp(logp[:1]), np.exp(logp[1:]))[0])
        deviation = (chance * (1 - chance) / DRAWS) ** 0.5
        assert abs((target == draft).mean() - chance) < 5 * deviation


def test_acceptance_probability_survives_tiny_entries():
    p = np.array([[1.0, 1e-30, 0.0, 1e-38]], np.float32)
    q = np.array([[1e-30, 1.0, 1e-38, 0.0]], np.float32)
    assert 0 <= ACCEPTANCE(p, q)[0] < 1e-6


REQUESTS, V, LENGTH = 6000, 5, 3


def speculate(target, draft, seed, drafts, rng):
    """Streams [REQUESTS, LENGTH] by rounds of up to `drafts` drafts and random verify lengths.

    `target` and `draft` are [V + 1, V] log-probabilities given the previous token (V: none yet).
    """
    stream = np.full((REQUESTS, LENGTH + drafts + 1), V)
    done, rounds = np.zeros(REQUESTS, int), 0
    every = np.arange(REQUESTS)
    while done.min() < LENGTH:
        last = np.where(done > 0, stream[every, done - 1], V)
        guesses, given = [], [last]
        for i in range(drafts):
            guesses.append(np.asarray(CHOOSE(draft[given[-1]], seed, (done + i).astype(np.int32))))
            given.append(guesses[-1])
        own = [
            np.asarray(CHOOSE(target[prev], seed, (done + i).astype(np.int32)))
            for i, prev in enumerate(given)
        ]
        length = rng.integers(0, drafts + 1, REQUESTS).astype(np.int32)
        count = np.zeros(REQUESTS, int)
        if drafts:
            count = np.asarray(ACCEPTED(np.stack(own, 1), np.stack(guesses, 1), length))
        for i, token in enumerate(own):
            emitted = (i <= count) & (done < LENGTH)
            stream[every[emitted], done[emitted] + i] = token[emitted]
        done = np.where(done < LENGTH, done + count + 1, done)
        rounds += 1
    return stream[:, :LENGTH], rounds


def test_speculation_emits_the_plain_stream_and_the_target_distribution():
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((V + 1, V)).astype(np.float32)
    guess = (logits + 0.4 * rng.standard_normal((V + 1, V))).astype(np.float32)
    target = log_probabilities(logits, temperature=0.9, top_k=4)
    draft = log_probabilities(guess)
    seed = sampling.seed_words(range(REQUESTS), REQUESTS)
    alone, _ = speculate(target, draft, seed, 0, rng)
    for drafts in (1, 3):
        stream, _ = speculate(target, draft, seed, drafts, rng)
        np.testing.assert_array_equal(stream, alone)
    p = np.exp(target.astype(np.float64))
    joint = p[V][:, None, None] * p[:V, :, None] * p[None, :V]
    cells = np.ravel_multi_index(tuple(alone.T), (V,) * 3)
    assert_fits(np.bincount(cells, minlength=V**3), REQUESTS * joint / joint.sum())
