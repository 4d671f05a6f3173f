"""Counts, windows, loads of devices, the figure of balance and its picture."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import eplb
from tests.eplb import drawn


@given(st.integers(1, 4), st.integers(0, 9))
def test_a_window_holds_the_newest_steps(size, steps):
    rng = np.random.default_rng(steps)
    counts = rng.integers(0, 7, (steps, 2, 3))
    window = eplb.make_window(size, 2, 3)
    for step in counts:
        given_step = step.copy()
        window = eplb.record(window, given_step)
        given_step[:] = -1  # the caller's own array, to be used again
    assert window.counts.dtype == np.int64
    np.testing.assert_array_equal(window.counts, counts[max(0, steps - size) :])


def test_recording_leaves_the_older_window_as_it_was():
    empty = eplb.make_window(2, 1, 2)
    one = eplb.record(empty, [[1, 2]])
    eplb.record(one, [[3, 4]])
    assert (empty.counts.shape, one.counts.tolist()) == ((0, 1, 2), [[[1, 2]]])


@given(drawn.SEEDS)
def test_counts_are_those_of_the_rows(seed):
    rng = np.random.default_rng(seed)
    routed = rng.integers(-1, 5, (2, 7, 3)).astype(np.int32)
    real = rng.random(7) < 0.7
    got = eplb.count_experts(routed, 5, real)
    for layer in range(2):
        chosen = routed[layer, real].ravel().tolist()
        assert got[layer].tolist() == [chosen.count(expert) for expert in range(5)]
    assert eplb.count_experts(routed, 5).sum() == np.count_nonzero(routed >= 0)


@given(drawn.SEEDS)
def test_counts_of_slots_are_counts_of_their_experts(seed):
    rng = np.random.default_rng(seed)
    placement = drawn.placement(rng, 2, 5, 9, 3)
    slots = rng.integers(0, 9, (4, 2, 9))
    got = eplb.to_logical(placement, slots)
    for layer, row in enumerate(placement.physical_to_logical):
        for expert in range(5):
            expected = slots[:, layer, row == expert].sum(axis=1)
            np.testing.assert_array_equal(got[:, layer, expert], expected)


@given(drawn.SEEDS)
def test_no_load_is_lost_between_experts_and_devices(seed):
    rng = np.random.default_rng(seed)
    placement = drawn.placement(rng, 2, 5, 9, 3)
    counts = rng.integers(0, 99, (4, 2, 5))
    loads = eplb.device_loads(placement, counts)
    assert loads.shape == (4, 2, 3)
    # thirds and such: float64 of numbers below 1,000
    np.testing.assert_allclose(loads.sum(axis=-1), counts.sum(axis=-1), atol=1e-10)
    np.testing.assert_allclose(loads.mean(0), eplb.device_loads(placement, counts.sum(0)) / 4)


def test_replicas_share_their_experts_tokens():
    placement = eplb.make_placement([[0, 1, 0, 2, 0, 0]], 3, 3)
    assert eplb.device_loads(placement, [[8, 3, 5]]).tolist() == [[5.0, 7.0, 4.0]]


def test_the_figure_of_balance():
    loads = np.array([[[4.0, 2.0, 0.0], [3.0, 3.0, 3.0]], [[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]]])
    assert eplb.slowest_over_mean(loads).tolist() == [[2.0, 1.0], [1.0, 3.0]]
    assert eplb.moe_lb(loads) == (4 + 3 + 0 + 9) / (2 + 3 + 0 + 3)
    assert eplb.moe_lb(np.zeros((3, 2, 4))) == eplb.moe_lb(np.zeros((0, 2, 4))) == 1.0


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ([1, 2], ValueError, r"counts must have shape \[layers, experts\], got \[2\]"),
        ([[1, 2, 3]], ValueError, r"window's shape .* = \[1, 2\], got \[1, 3\]; .* window each"),
        ([[1, -2]], ValueError, "must not be negative, got -2"),
        ([[1.0, 2.0]], TypeError, r"integers \(tokens\), got float64"),
    ],
)
def test_what_is_no_count_is_refused(counts, error, message):
    with pytest.raises(error, match=message):
        eplb.record(eplb.make_window(2, 1, 2), counts)


def test_what_does_not_fit_the_placement_is_refused():
    placement = eplb.initial_placement(2, 5, 9, 3)
    with pytest.raises(ValueError, match=r"\[layers, experts\] = \[2, 5\], got \(2, 9\)"):
        eplb.device_loads(placement, np.ones((2, 9), int))
    with pytest.raises(ValueError, match=r"\[layers, slots\] = \[2, 9\], got \(2, 5\)"):
        eplb.to_logical(placement, np.ones((2, 5), int))
    with pytest.raises(ValueError, match=r"\[layers, rows, chosen\], got int64 \(2, 3\)"):
        eplb.count_experts(np.ones((2, 3), int), 5)
    with pytest.raises(ValueError, match="names expert 5, there are experts=5"):
        eplb.count_experts(np.full((1, 1, 1), 5), 5)
    with pytest.raises(ValueError, match=r"bool of shape \[3\], got bool \(2,\)"):
        eplb.count_experts(np.ones((1, 3, 1), int), 5, np.ones(2, bool))
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        eplb.make_window(0, 1, 2)
