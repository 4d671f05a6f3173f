"""The gradient of coupled acceptance, against its defining double sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.training import coupling


def double_sum(p, q):
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), as it is written."""
    worst = jnp.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return jnp.sum(1 / jnp.sum(worst, axis=1))


def pair(seed, spread):
    rng = np.random.default_rng(seed)
    p, q = (np.exp(spread * rng.standard_normal(11)) for _ in range(2))
    return (p / p.sum()).astype(np.float32), (q / q.sum()).astype(np.float32)


@jax.jit
def both(p, q):
    """Value and gradients of the package's form and of the double sum."""
    return tuple(
        jax.value_and_grad(f, argnums=(0, 1))(p, q) for f in (coupling.acceptance, double_sum)
    )


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3.0))
def test_value_and_gradient_are_those_of_the_double_sum(seed, spread):
    (value, made), (expected, wanted) = both(*pair(seed, spread))
    np.testing.assert_allclose(value, expected, atol=1e-5)
    for got, want in zip(made, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=1e-3)


def test_ids_that_one_side_cannot_choose_cost_nothing_but_their_mass():
    p = jnp.array([0.5, 0.5, 0.0, 0.0])
    q = jnp.array([0.4, 0.0, 0.6, 0.0])
    by_p, by_q = coupling.slopes(p, q)
    # 1 / (1 / 0.5 + 0.6 / 0.4) from the one id both can choose: P = 1, Q = 0.6 before it.
    assert float(coupling.acceptance(p, q)) == pytest.approx(1 / 3.5, abs=1e-6)
    term = 1 / 3.5
    assert float(by_q[0]) == pytest.approx(term**2 * 0.6 / 0.4**2, rel=1e-5)
    assert float(by_q[2]) == pytest.approx(-(term**2) / 0.4, rel=1e-5)
    assert float(by_p[0]) == pytest.approx(term**2 * 0.5 / 0.5**2, rel=1e-5)
    assert float(by_p[1]) == pytest.approx(-(term**2) / 0.5, rel=1e-5)


def test_rows_of_a_batch_are_apart():
    pairs = [pair(seed, 1.0) for seed in range(6)]
    p, q = (np.stack(side).reshape(2, 3, -1) for side in zip(*pairs, strict=True))
    whole = coupling.slopes(p, q)
    for row, one in enumerate(pairs):
        for got, want in zip(whole, coupling.slopes(*one), strict=True):
            np.testing.assert_allclose(got.reshape(6, -1)[row], want, atol=1e-6)


def test_climbing_it_reaches_agreement():
    p, start = pair(3, 1.5)

    def lost(logits):
        return 1 - coupling.acceptance(p, jax.nn.softmax(logits))

    climb = jax.jit(lambda logits: logits - 2.0 * jax.grad(lost)(logits))
    logits = jnp.log(start)
    before = float(lost(logits))
    for _ in range(300):
        logits = climb(logits)
    assert before > 0.3
    assert float(lost(logits)) < before / 5
