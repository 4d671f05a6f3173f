"""Probabilities and survivals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import planning

survival = jax.jit(planning.survival)
SHAPE = (3, 5)
units = st.lists(st.floats(0, 1, width=32), min_size=15, max_size=15)


@given(units)
def test_survival_is_a_product_from_left_to_right_and_falls(values):
    p = np.array(values, np.float32).reshape(SHAPE)
    expected = p.copy()
    for draft in range(1, SHAPE[1]):
        expected[:, draft] *= expected[:, draft - 1]
    tiny = np.finfo(np.float32).tiny
    expected[np.abs(expected) < tiny] = 0  # XLA:CPU flushes subnormal numbers
    got = np.asarray(survival(p))
    np.testing.assert_array_equal(np.where(got < tiny, 0, got), expected)
    assert (got[:, 1:] <= got[:, :-1]).all()


def test_survival_of_no_draft_and_of_one():
    assert survival(np.ones((3, 0), np.float32)).shape == (3, 0)
    np.testing.assert_array_equal(survival(np.float32([[0.3]])), np.float32([[0.3]]))


def test_probabilities_divide_by_the_drafts_temperature_and_saturate():
    logits = jnp.array([[0.0, 3.0, -1e4], [1.5, -2.0, 1e4]], jnp.bfloat16)
    got = planning.probabilities(logits, np.float32([2.0, 0.5, 0.0]))
    z = np.array([[0.0, 6.0, -60.0], [0.75, -4.0, 60.0]])
    assert got.dtype == jnp.float32
    # float32 exp
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-z)), rtol=1e-6)


def test_temperatures_need_one_entry_per_draft():
    with pytest.raises(ValueError, match=r"temperatures needs one entry per draft.*\(5,\).*\(3,\)"):
        planning.probabilities(np.zeros(SHAPE), np.ones(3))
