"""Placements as values: their tables, the number of their slots, what is none."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import eplb
from tests.eplb import drawn


def test_recorded_numbers_of_slots(recorded):
    for case in recorded("eplb/redundancy_rounding.json")["cases"]:
        got = eplb.redundancy(case["num_routed"], case["ep_size"], case["min_extra"])
        expected = ("expected_extra", "expected_physical", "slots_per_rank")
        assert dataclasses.astuple(got) == tuple(case[key] for key in expected)


@given(st.integers(1, 500), st.integers(1, 80), st.integers(0, 200))
def test_no_fewer_extra_replicas_would_do(experts, devices, least):
    got = eplb.redundancy(experts, devices, least)
    fitting = [extra for extra in range(least, least + devices) if (experts + extra) % devices == 0]
    assert [got.extra] == fitting
    assert got.slots_per_device * devices == got.slots == experts + got.extra


def test_an_initial_placement_has_the_experts_in_order():
    got = eplb.initial_placement(2, 5, 9, 3)
    assert got.physical_to_logical.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]] * 2
    assert (got.layers, got.slots, got.experts, got.slots_per_device) == (2, 9, 5, 3)


@given(drawn.SEEDS)
def test_the_tables_say_the_same(seed):
    got = drawn.placement(np.random.default_rng(seed), 2, 5, 9, 3)
    padded = eplb.logical_to_physical(got)
    assert padded.shape == (2, 5, 5)
    for layer, row in enumerate(got.physical_to_logical):
        for expert in range(5):
            slots = np.flatnonzero(row == expert)
            count, first = got.count[layer, expert], got.first[layer, expert]
            assert got.order[layer, first : first + count].tolist() == slots.tolist()
            assert padded[layer, expert].tolist() == slots.tolist() + [-1] * (5 - len(slots))


def test_a_placement_is_an_argument_that_needs_no_new_program():
    program = jax.jit(lambda placement: placement.count.max())
    for seed in range(3):
        assert program(drawn.placement(np.random.default_rng(seed), 2, 5, 9, 3)) >= 1
    assert program._cache_size() == 1


@pytest.mark.parametrize(
    ("table", "experts", "devices", "message"),
    [
        ([0, 1], 2, 1, r"shape \[layers, slots\].*got \(2,\); give one layer as \[1, slots\]"),
        (np.zeros((0, 2), int), 2, 1, "both at least 1"),
        ([[0, 1, 1]], 2, 2, "multiple of devices=2 and at least experts=2, got 3; .* is 4"),
        ([[0, 1]], 3, 2, "at least experts=3, got 2; the next that fits is 4"),
        ([[0, 1, 2, 0], [0, 1, 3, 0]], 3, 2, r"\[0, 3\), got 3 in slot 2 of layer 1"),
        ([[0, 1, 2, -1]], 3, 2, "got -1 in slot 3 of layer 0; .* there are no empty ones"),
        ([[0, 1, 2, 0], [0, 1, 1, 0]], 3, 2, "expert 2 has none in layer 1; 4 slots hold 2 of 3"),
        ([[0, 1]], 2, 0, "devices must be at least 1, got 0"),
    ],
)
def test_what_is_no_placement_is_refused(table, experts, devices, message):
    with pytest.raises(ValueError, match=message):
        eplb.make_placement(table, experts, devices)


def test_ids_are_integers_and_so_are_sizes():
    with pytest.raises(TypeError, match=r"integers \(expert ids\), got float64"):
        eplb.make_placement([[0.0, 1.0]], 2, 1)
    with pytest.raises(TypeError, match=r"devices must be an integer, got 2\.0"):
        eplb.redundancy(5, 2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="least must be at least 0, got -1"):
        eplb.redundancy(5, 2, -1)
    with pytest.raises(ValueError, match="width must be at least 2, got 1"):
        eplb.logical_to_physical(eplb.initial_placement(1, 3, 4, 2), 1)
