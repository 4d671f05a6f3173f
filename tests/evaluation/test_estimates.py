"""Estimates against their definitions."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.evaluation import estimates


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples):
    for right in range(samples + 1):
        replies = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(replies, k))
            share = sum(map(any, draws)) / len(draws)
            assert estimates.pass_at(samples, right, k) == pytest.approx(share, abs=1e-12)
        assert estimates.pass_at(samples, right, 1) == pytest.approx(right / samples, abs=1e-12)


@pytest.mark.parametrize("p", [0.125, 0.5])
def test_pass_at_k_is_unbiased(p):
    """Its mean over every outcome of n independent samples is 1 - (1 - p)^k."""
    n = 5
    for k in range(1, n + 1):
        mean = sum(
            math.comb(n, c) * p**c * (1 - p) ** (n - c) * estimates.pass_at(n, c, k)
            for c in range(n + 1)
        )
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize("given_", [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)])
def test_impossible_counts(given_):
    with pytest.raises(ValueError, match="needs 0 <= right <= samples"):
        estimates.pass_at(*given_)


@given(values=st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_mean_and_standard_error(values):
    found = estimates.over_items(iter(values))
    assert found.items == len(values)
    assert found.value == pytest.approx(statistics.fmean(values), abs=1e-12)
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert found.standard_error == pytest.approx(error, abs=1e-9)


def test_one_item_has_no_spread_and_none_no_mean():
    assert estimates.over_items([0.25]) == estimates.Estimate(0.25, None, 1)
    assert estimates.over_items([]) is None


def test_which_k_are_reported():
    assert list(estimates.table_of_k(0)) == []
    assert list(estimates.table_of_k(1)) == [1]
    assert list(estimates.table_of_k(5)) == [1, 2, 4, 5]
    assert list(estimates.table_of_k(32)) == [1, 2, 4, 8, 16, 32]
