"""Temperatures, calibration errors and their picture."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import planning
from deepinfer_jax.planning import calibration

ROUNDS, DRAFTS = 13, 3


def test_recorded_fits(recorded):
    for case in recorded("dspark_planner/sts_fit.json")["cases"]:
        label, expected = np.array(case["prefix_accepted"]), case["expected"]
        fit = planning.fit_temperatures(np.array(case["logits"]), label.sum(axis=1))
        np.testing.assert_array_equal(fit.temperatures, np.float32(expected["temperatures"]))
        # float64 sums of a few hundred numbers in another order
        np.testing.assert_allclose(fit.before, expected["ece_before"], rtol=0, atol=1e-14)
        np.testing.assert_allclose(fit.after, expected["ece_after"], rtol=0, atol=1e-14)


def survivals(logits, temperatures):
    heat = np.float64(temperatures)
    return np.cumprod(1 / (1 + np.exp(-logits / heat)), axis=1)


@settings(max_examples=30)
@given(st.integers(0, 999))
def test_a_fitted_temperature_is_no_worse_than_none(seed):
    """Given the temperatures before it: that is the choice which the fit has."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1, 2, (ROUNDS, DRAFTS))
    accepted = rng.integers(0, DRAFTS + 1, ROUNDS)
    fit = planning.fit_temperatures(logits, accepted)
    assert fit.after[0] <= fit.before[0]
    for draft in range(DRAFTS):
        heat = fit.temperatures.copy()
        heat[draft] = 1.0
        plain = survivals(logits, heat)[:, draft]
        error = planning.expected_calibration_error(plain, accepted > draft)
        assert fit.after[draft] <= error + 1e-15


def test_equal_errors_choose_the_lowest_temperature():
    fit = planning.fit_temperatures(np.zeros((4, 2)), np.array([0, 1, 2, 2]))
    np.testing.assert_array_equal(fit.temperatures, np.float32([0.1, 0.1]))


def test_a_calibration_error_is_zero_exactly_when_every_bin_is_right():
    p = np.array([0.5] * 4 + [1.0] * 3)
    assert planning.expected_calibration_error(p, np.array([0, 1, 0, 1, 1, 1, 1])) < 1e-7
    wrong = planning.expected_calibration_error(p, np.array([1, 1, 1, 1, 1, 1, 1]))
    assert wrong == pytest.approx(4 / 7 * 0.5)


def test_a_reliability_holds_every_prediction_in_its_bin():
    bins = planning.reliability(np.array([0.0, 0.03, 0.5, 1.0]), np.array([1, 0, 1, 1]))
    assert bins.count.tolist() == [2] + [0] * 6 + [1] + [0] * 6 + [1]
    assert bins.frequency[[0, 1, 7, 14]].tolist() == [0.5, 0.0, 1.0, 1.0]
    assert bins.probability[7] == 0.5
    assert bins.probability[1] == 0.0


@pytest.mark.parametrize(
    ("probability", "label", "message"),
    [
        ([], [], r"one shape \[N\], N at least 1"),
        ([0.5], [1, 0], r"\(1,\) and \(2,\)"),
        ([1.5], [1], "not logits"),
        ([np.nan], [1], "not logits"),
        ([0.5], [2], "label must be 0 or 1"),
    ],
)
def test_what_is_no_prediction_is_refused(probability, label, message):
    with pytest.raises(ValueError, match=message):
        planning.reliability(np.array(probability, float), np.array(label))


@pytest.mark.parametrize(
    ("logits", "accepted", "message"),
    [
        (np.zeros((0, 2)), np.zeros(0, int), "N and D at least 1"),
        (np.zeros((3, 2)), np.zeros(2, int), r"\(3, 2\) and \(2,\)"),
        (np.full((2, 2), np.inf), np.zeros(2, int), "logits must be finite"),
        (np.zeros((2, 2)), np.zeros(2), "must count accepted drafts"),
        (np.zeros((2, 2)), np.array([0, 3]), r"\[0, 2\] for 2 drafts, got values from 0 to 3"),
    ],
)
def test_what_is_no_round_is_refused(logits, accepted, message):
    with pytest.raises(ValueError, match=message):
        planning.fit_temperatures(logits, accepted)


def test_no_scaling_is_among_the_temperatures():
    assert 1.0 in calibration.TEMPERATURES
    assert calibration.TEMPERATURES.dtype == np.float32
