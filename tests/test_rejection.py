"""Rejection sampling: the recorded decisions, and the distribution of what comes out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import rejection, sampling
from tests.test_sampling_draws import assert_fits

V, MANY, ROWS = 7, 20_000, 6


@jax.jit
def decisions(targets, proposals, drafts, uniforms, options):
    target, proposal = (sampling.transform(x, options) for x in (targets, proposals))
    accepted = rejection.accepts(target, proposal, drafts, uniforms)
    return accepted, jnp.exp(rejection.residual(target, proposal))


def padded(rows) -> np.ndarray:
    """ROWS rows, so that all cases share a program."""
    rows = np.asarray(rows, np.float32)
    return np.resize(rows, (ROWS, *rows.shape[1:]))


def test_recorded_decisions_and_residuals(recorded):
    """The recorded residual shrinks q by 5e-5, ours does not: 1e-4 apart at most."""
    for case in recorded("engine_misc/accept_rule.json")["cases"]:
        drafts = np.array(case["draft_tokens"], np.int32)
        n = len(drafts)
        if not n:
            continue  # a lone draw from the target: nothing is decided
        options = sampling.make_sampling(
            ROWS, case["temperature"], case["top_p"], case["top_k"], seeds=[0] * ROWS
        )
        accepted, left = decisions(
            *(padded(case[name][:n]) for name in ("target_logits", "draft_logits")),
            padded(np.maximum(drafts, 0)).astype(np.int32), padded(case["accept_uniforms"]),
            options,
        )  # fmt: skip
        for row, want in enumerate(case["rows"][:n]):
            if drafts[row] < 0:
                continue  # an id outside of a shortened vocabulary, which we do not have
            assert bool(accepted[row]) == want["accepted"]
            if np.sum(want["residual"]) > 1e-3:
                np.testing.assert_allclose(left[row], want["residual"], atol=1e-4)


def logits_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, V)).astype(np.float32) * 1.3


def options_of(first: int, **more) -> sampling.Sampling:
    seeds = [first * MANY + i for i in range(MANY)]
    return jax.device_put(sampling.make_sampling(MANY, seeds=seeds, **more))


def whole(row: np.ndarray) -> jax.Array:
    return jnp.broadcast_to(row, (MANY, V))


@jax.jit
def two_tokens(targets, proposals, options):
    """MANY replies of two tokens: a round of two drafts, and another where the first was wrong."""
    p, q = [whole(each) for each in targets], [whole(each) for each in proposals]
    at = [jnp.full((MANY,), index, jnp.int32) for index in (5, 6)]
    yes, no = jnp.ones((MANY,), bool), jnp.zeros((MANY,), bool)
    made = [rejection.draft(q[i], options, at[i], at[0]) for i in (0, 1)]
    first = rejection.sample(p[0], q[0], made[0], yes, options, at[0])
    second = rejection.sample(p[1], q[1], made[1], yes, options, at[1])
    again = rejection.draft(q[1], options, at[1], at[1])
    later = rejection.sample(p[1], q[1], again, yes, options, at[1])
    fresh = rejection.sample(p[1], q[1], again, no, options, at[1])
    right = first.token == made[0]
    return right, first, jnp.where(right, second.token, later.token), fresh.token


@pytest.mark.parametrize("more", [{}, {"temperature": 0.6, "top_k": 4}, {"top_p": 0.8}])
def test_tokens_have_the_target_distribution(more):
    """Accepted, replaced, drafted again after a rejection or drawn without a draft."""
    targets, proposals = logits_of(1, 2), logits_of(2, 2)
    options = options_of(3, **more)
    right, first, second, fresh = two_tokens(targets, proposals, options)
    assert 0.3 < np.mean(right) < 0.95
    one = sampling.make_sampling(2, seeds=[0, 0], **more)
    want = np.exp(sampling.transform(targets, one))
    observed = [(first.token, 0), (second, 1), (fresh, 1)]
    observed += [(second[np.asarray(right)], 1), (second[~np.asarray(right)], 1)]
    for tokens, index in observed:
        seen = np.bincount(np.asarray(tokens), minlength=V)
        assert_fits(seen, want[index] * len(tokens))


def test_numbers_are_those_of_the_chosen_token():
    targets, proposals = logits_of(4, 2), logits_of(5, 2)
    options = options_of(6, temperature=0.7)
    _, first, _, _ = two_tokens(targets, proposals, options)
    want = sampling.judge(whole(targets[0]), first.token, options)
    np.testing.assert_array_equal(first.logprob_raw, want.logprob_raw)
    np.testing.assert_array_equal(first.logprob_processed, want.logprob_processed)


def test_greedy_rows_take_the_largest_whatever_the_draft():
    targets, proposals = logits_of(7, 2), logits_of(8, 2)
    right, first, second, fresh = two_tokens(targets, proposals, options_of(9, temperature=0))
    assert (np.asarray(first.token) == targets[0].argmax()).all()
    assert (np.asarray(second) == targets[1].argmax()).all()
    assert (np.asarray(fresh) == targets[1].argmax()).all()
    assert right.all() == (targets[0].argmax() == proposals[0].argmax())


def test_equal_distributions_always_accept():
    """Where rounding leaves no residual, nothing else is drawn either."""
    targets = logits_of(10, 2)
    right, *_ = two_tokens(targets, targets, options_of(11))
    assert right.all()
