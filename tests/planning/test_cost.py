"""The staircase of step times."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import planning

SIZES, MS = [2, 3, 7, 11], [4.0, 9.0, 5.0, 6.0]
COST = planning.make_cost(SIZES, MS, slope=0.5, constant=0.25)
step_ms = jax.jit(planning.step_ms)


def test_a_step_takes_the_time_of_the_smallest_size_that_holds_it():
    got = np.asarray(step_ms(COST, np.arange(13)))
    on = [2, 2, 2, 3, 7, 7, 7, 7, 11, 11, 11, 11]
    expected = [MS[SIZES.index(g)] + 0.5 * g + 0.25 for g in on]
    np.testing.assert_array_equal(got, np.float32([*expected, math.inf]))
    assert float(planning.step_ms(COST, 4)) == got[4]


def test_the_running_maximum_is_the_least_monotone_curve_above():
    np.testing.assert_array_equal(planning.monotone(COST).ms, np.float32([4, 9, 9, 9]))
    again = planning.monotone(planning.monotone(COST))
    np.testing.assert_array_equal(again.ms, planning.monotone(COST).ms)


@given(st.integers(0, 13), st.integers(0, 4))
def test_repeating_the_last_point_changes_nothing(rows, more):
    padded = dataclasses.replace(
        COST, sizes=np.pad(COST.sizes, (0, more), "edge"), ms=np.pad(COST.ms, (0, more), "edge")
    )
    assert planning.step_ms(padded, rows) == planning.step_ms(COST, rows)


@pytest.mark.parametrize(
    ("sizes", "ms", "message"),
    [
        ([], [], "one length, at least 1"),
        ([1, 2], [1.0], r"one length.*\(2,\) and \(1,\)"),
        ([[1]], [[1.0]], "must be lists"),
        ([1.0, 2.0], [1.0, 2.0], "sizes must be integers"),
        ([1, 2], ["a", "b"], "ms numbers"),
        ([2, 1], [1.0, 2.0], r"ascending.*\[2, 1\]; sort"),
        ([1, 1], [1.0, 2.0], "ascending"),
        ([0, 1], [1.0, 2.0], "from 1 on"),
        ([1, 2], [1.0, 0.0], "positive and finite milliseconds, got 0.0 for 2 rows"),
        ([1, 2], [math.nan, 1.0], "got nan for 1 rows; measure"),
        ([1, 2], [1.0, math.inf], "got inf"),
    ],
)
def test_what_is_no_curve_is_refused(sizes, ms, message):
    with pytest.raises(ValueError, match=message):
        planning.make_cost(sizes, ms)


@pytest.mark.parametrize("name", ["slope", "constant"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_negative_slope_or_constant_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be finite and >= 0"):
        planning.make_cost(SIZES, MS, **{name: value})


def test_more_requests_than_rows_are_refused():
    planning.check_requests(COST, 11)
    with pytest.raises(planning.CurveTooShort, match=r"12 requests.*largest measured size is 11"):
        planning.check_requests(COST, 12)
