"""The threshold rule and its ramp."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import planning
from deepinfer_jax.planning import TauRamp

threshold = jax.jit(planning.threshold)
RAMP = TauRamp((2, 8, 32), (0.1, 0.5, 0.6))


def test_recorded_thresholds(recorded):
    for case in recorded("dspark_planner/plan_threshold.json")["cases"]:
        got = threshold(np.float32(case["confidence"]), np.float32(case["tau"]))
        assert got == case["expected_verified_drafts"], case["name"]


@given(st.lists(st.floats(0, 1, width=32), min_size=15, max_size=15), st.floats(0, 1, width=32))
def test_a_length_ends_at_the_first_draft_below_tau(values, tau):
    p = np.array(values, np.float32).reshape(3, 5)
    tau = np.float32(tau)
    for row, length in zip(p, np.asarray(threshold(p, tau)), strict=True):
        assert (row[:length] >= tau).all()
        assert length == 5 or row[length] < tau


def test_a_ramp_is_linear_in_the_logarithm_of_the_load():
    assert planning.tau_for(RAMP, 1) == 0.1
    assert planning.tau_for(RAMP, 2) == 0.1
    assert math.isclose(planning.tau_for(RAMP, 4), 0.3)
    assert planning.tau_for(RAMP, 8) == 0.5
    assert math.isclose(planning.tau_for(RAMP, 16), 0.55)
    assert planning.tau_for(RAMP, 32) == planning.tau_for(RAMP, 999) == 0.6


@given(st.integers(1, 200))
def test_a_ramp_never_falls(running):
    low, high = planning.tau_for(RAMP, running), planning.tau_for(RAMP, running + 1)
    assert 0.1 <= low <= high <= 0.6


@pytest.mark.parametrize(
    ("running", "tau", "message"),
    [
        ((), (), "one length, at least 1, got 0 and 0"),
        ((1, 2), (0.5,), "one length, at least 1, got 2 and 1"),
        ((0, 2), (0.5, 0.6), "running must be integers of at least 1"),
        ((1.5,), (0.5,), "running must be integers of at least 1"),
        ((4, 4), (0.5, 0.6), "running must be ascending"),
        ((1, 4), (0.5, 1.1), r"tau must lie in \[0, 1\]"),
        ((1,), (math.nan,), r"tau must lie in \[0, 1\]"),
        ((1, 4), (0.6, 0.5), "tau must not fall"),
    ],
)
def test_a_ramp_that_makes_no_sense_is_refused(running, tau, message):
    with pytest.raises(ValueError, match=message):
        TauRamp(running, tau)


def test_no_request_has_no_threshold():
    with pytest.raises(ValueError, match="running must be at least 1, got 0"):
        planning.tau_for(RAMP, 0)
