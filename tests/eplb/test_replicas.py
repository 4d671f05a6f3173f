"""The choice of a replica: one of the expert's, by request and position, evenly."""

from __future__ import annotations

import jax
import numpy as np

from deepinfer_jax import eplb
from tests.eplb import drawn

choose = jax.jit(eplb.choose_replicas)  # one program: the sizes are the same in all tests
LAYERS, EXPERTS, SLOTS, DEVICES = 2, 5, 12, 4
ROWS, K = 1 << 12, 3
NUMBER = np.arange(ROWS, dtype=np.uint32)
NONE = np.zeros_like(NUMBER)


def slots_of(placement, experts, low=NONE, high=NONE, position=NUMBER, layer=0):
    """[ROWS, K] slots for experts, which may be fewer than K of a row."""
    experts = np.broadcast_to(experts, (ROWS, K)).astype(np.int32)
    seeds = np.stack([low, high], axis=1)
    got = choose(placement, np.int32(layer), experts, seeds, position.astype(np.int32))
    assert (got.dtype, choose._cache_size()) == (np.int32, 1)
    return np.asarray(got)


def chi_square(seen, expected):
    return ((seen - expected) ** 2 / expected).sum()


def test_a_replica_of_the_expert_is_chosen_whatever_else_runs():
    rng = np.random.default_rng(0)
    experts = rng.integers(0, EXPERTS, (ROWS, K))
    low, high = rng.integers(0, 2**32, (2, ROWS), dtype=np.uint32)
    order = rng.permutation(ROWS)
    for seed in range(4):
        placement = drawn.placement(np.random.default_rng(seed), LAYERS, EXPERTS, SLOTS, DEVICES)
        for layer in range(LAYERS):
            slots = slots_of(placement, experts, low, high, layer=layer)
            np.testing.assert_array_equal(placement.physical_to_logical[layer][slots], experts)
            turned = slots_of(
                placement, experts[order], low[order], high[order], NUMBER[order], layer
            )
            np.testing.assert_array_equal(turned, slots[order])


def test_an_id_that_is_no_expert_has_no_slot():
    placement = drawn.placement(np.random.default_rng(0), LAYERS, EXPERTS, SLOTS, DEVICES)
    slots = slots_of(placement, [-1, EXPERTS, EXPERTS - 1])
    np.testing.assert_array_equal(slots < 0, np.broadcast_to([True, True, False], (ROWS, K)))


def test_replicas_are_chosen_evenly():
    """Many requests at one position, one request at many, and near seeds, among 8 replicas.

    Chi-square with 7 degrees of freedom exceeds 24.3 once in 1,000 times; the draws are fixed.
    """
    placement = eplb.make_placement([[0, 1, 2, 3, 4] + [0] * 7] * LAYERS, EXPERTS, DEVICES)
    keys = [
        (NUMBER, NONE, NONE),
        (NONE, NUMBER, NONE),
        (NONE, NONE, NUMBER),
        (NUMBER << 16, NONE, NONE),
        (NUMBER, NUMBER, NUMBER),
    ]
    for key in keys:
        seen = np.bincount(slots_of(placement, 0, *key)[:, 0], minlength=SLOTS)
        assert chi_square(seen[seen > 0], ROWS / 8) < 24.3


def test_the_experts_of_a_token_choose_by_themselves():
    """Of two experts with four replicas each, all pairs come up equally often; 15 degrees, 37.7."""
    row = [0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 4, 4]
    placement = eplb.make_placement([row] * LAYERS, EXPERTS, DEVICES)
    slots = slots_of(placement, [0, 1, 2])
    seen = np.bincount(slots[:, 0] * 4 + slots[:, 1] - 4, minlength=16)
    assert chi_square(seen, ROWS / 16) < 37.7


def test_devices_get_the_loads_that_the_plan_counts_on():
    rng = np.random.default_rng(0)
    counts = drawn.zipf_counts(rng, 4, LAYERS, EXPERTS, ROWS * K)
    old = eplb.initial_placement(LAYERS, EXPERTS, SLOTS, DEVICES)
    placement = eplb.rearrange(old, counts).placement
    experts = rng.permutation(np.repeat(np.arange(EXPERTS), counts[0, 0])).reshape(ROWS, K)
    seen = np.bincount(slots_of(placement, experts).ravel(), minlength=SLOTS)
    np.testing.assert_array_equal(eplb.to_logical(placement, [seen] * LAYERS)[0], counts[0, 0])
    measured = eplb.device_sums(seen, DEVICES)
    planned = eplb.device_loads(placement, counts[0])[0]
    # 3,072 tokens to a device, drawn: a standard deviation below 56
    np.testing.assert_allclose(measured, planned, atol=4 * 56)
