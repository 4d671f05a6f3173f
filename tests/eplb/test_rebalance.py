"""The published policies against recorded placements, and what holds for any loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from deepinfer_jax import eplb
from tests.eplb import drawn


def agrees(placement, case):
    """The recorded tables: slots exactly, the replicas of an expert in any order."""
    np.testing.assert_array_equal(placement.physical_to_logical, case["physical_to_logical"])
    np.testing.assert_array_equal(placement.count, case["replica_count"])
    recorded = np.array(case["logical_to_physical"])
    got = eplb.logical_to_physical(placement, recorded.shape[2])
    np.testing.assert_array_equal(np.sort(got), np.sort(recorded))


def test_recorded_hierarchical_and_global_placements(recorded):
    for case in recorded("eplb/public_rebalance.json")["cases"]:
        weights, sizes = case["weight"], (case["num_replicas"], case["num_gpus"])
        got = eplb.rebalance(weights, *sizes, groups=case["num_groups"], nodes=case["num_nodes"])
        agrees(got, case)
        if np.array(weights).dtype.kind == "i":
            lb = eplb.slowest_over_mean(eplb.device_loads(got, weights))
            # float32 loads and sums in another order there
            np.testing.assert_allclose(lb, case["gpu_max_over_mean"], rtol=1e-6)


def test_recorded_placements_of_a_window(recorded):
    for case in recorded("eplb/window_rebalance.json")["cases"]:
        counts = np.array(case["tokens_per_step"])
        got = eplb.rebalance_window(counts, case["num_physical"], case["num_ranks"])
        agrees(got, case)
        loads = eplb.device_loads(got, counts)
        for sums, key in ((loads.max(-1), "peak"), (loads.mean(-1), "mean")):
            expected = case[f"sum_over_steps_of_{key}_rank_load"]
            np.testing.assert_allclose(sums.sum(axis=0), expected, rtol=1e-6)


@given(drawn.SEEDS)
@settings(max_examples=25)
def test_groups_stay_in_a_node(seed):
    rng = np.random.default_rng(seed)
    got = eplb.rebalance(rng.integers(0, 99, (2, 12)), 20, 4, groups=6, nodes=2)
    node_of_slot = np.arange(20) // 10
    for row in got.physical_to_logical:
        for group in range(6):
            assert len(set(node_of_slot[row // 2 == group])) == 1


@given(drawn.SEEDS)
@settings(max_examples=25)
def test_no_expert_has_a_replica_too_many(seed):
    """The lightest replica an expert could have given up is the heaviest somewhere: greedy."""
    weights = np.random.default_rng(seed).integers(1, 999, (1, 7))
    got = eplb.rebalance(weights, 15, 3)
    heaviest = (weights / got.count).max()
    more = got.count[0] > 1
    assert (weights[0, more] / (got.count[0, more] - 1) >= heaviest).all()


def test_nothing_measured_is_a_placement_too():
    empty = eplb.rebalance_window(np.zeros((0, 2, 5), int), 9, 3)
    idle = eplb.rebalance_window(np.zeros((4, 2, 5), int), 9, 3)
    assert empty.count.min() == idle.count.min() == 1
    assert eplb.rebalance(np.zeros((2, 5)), 9, 3).count.min() == 1


@pytest.mark.parametrize(
    ("weights", "slots", "devices", "more", "message"),
    [
        (np.ones(4), 4, 2, {}, r"shape \[layers, experts\], got \[4\]"),
        ([[1.0, np.nan]], 2, 2, {}, "finite and not negative"),
        ([[1, -1]], 2, 2, {}, "loads, not logits"),
        ([[1, 1, 1]], 3, 2, {}, "the next that fits is 4"),
        ([[1, 1, 1, 1]], 4, 2, {"groups": 3}, "groups must divide experts=4, got 3"),
        ([[1, 1, 1, 1]], 4, 2, {"nodes": 3}, "nodes must divide devices=2, got 3"),
        ([[1, 1, 1, 1]], 4, 2, {"nodes": 0}, "nodes must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_placed_is_refused(weights, slots, devices, more, message):
    with pytest.raises(ValueError, match=message):
        eplb.rebalance(weights, slots, devices, **more)


def test_a_window_has_three_dimensions():
    with pytest.raises(ValueError, match=r"\[steps, layers, experts\], got \[2, 5\]"):
        eplb.rebalance_window(np.ones((2, 5), int), 6, 2)
