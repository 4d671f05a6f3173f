"""Medians over the newest samples."""

import pytest

from deepinfer_jax import planning
from deepinfer_jax.planning import estimators

COST = planning.make_cost([2, 5, 11], [1.0, 2.0, 4.0])


def test_recorded_sampler_times(recorded):
    series = recorded("dspark_planner/runtime_estimators.json")["sampler"]
    for end, expected in enumerate(series["expected"], 1):
        values = series["values"][:end]
        alone = planning.sampler_ms([(7, v) for v in values], 7)
        assert alone == (0.0 if expected is None else expected)
        # Another number of requests falls back to the pool.
        assert planning.sampler_ms([(7, v) for v in values], 3) == alone


def test_recorded_slopes(recorded):
    series = recorded("dspark_planner/runtime_estimators.json")["slope"]
    for end, expected in enumerate(series["expected"], 1):
        # the middle of two values is rounded once, here and there
        assert planning.slope(series["values"][:end]) == pytest.approx(expected, abs=1e-12)


def test_a_residual_is_what_the_curve_did_not_know_per_row():
    assert planning.residual(COST, 5, 3.0) == (5, 0.2)
    assert planning.residual(COST, 6, 1.8) == (11, -0.2)
    with pytest.raises(planning.CurveTooShort, match="12 rows"):
        planning.residual(COST, 12, 1.0)


def test_the_pool_serves_a_number_of_requests_until_it_has_samples_of_its_own():
    samples = [(7, 1.0)] * 6 + [(3, 2.0)] * 4
    assert planning.sampler_ms(samples, 3) == 1.0
    assert planning.sampler_ms([*samples, (3, 2.0)], 3) == 2.0


def test_old_steps_do_not_count_and_a_slope_is_never_negative():
    old = [(8, 9.0)] * 20
    new = [(16, 1.0)] * estimators.SLOPE_SAMPLES
    assert planning.slope(old + new) == 1.0
    assert planning.slope([(8, -1.0)] * 10) == 0.0
    assert planning.slope([(8, 1.0)] * 9) == 0.0
