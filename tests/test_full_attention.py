"""Attention of all rows to all, and products with a bias: values, bits, gradients."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import numerics as nx
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.numerics import Numerics
from tests.test_numerics import as_dtype, normal, numerics_of

SCALE = 0.3
COUNTS = np.array([75, 20, 0], np.int32)  # two blocks of keys, a part of one, an absent picture
FORMS = ("tiled", "pallas", "batched")
FLOAT32 = pytest.param("float32", marks=pytest.mark.exhaustive)


def form(dtype: str, rows: str) -> Numerics:
    return dataclasses.replace(numerics_of(dtype), rows=rows, interpret=True)


@functools.cache
def operands(dtype: str) -> tuple[np.ndarray, ...]:
    return tuple(as_dtype(normal(seed, 3, 75, 2, 24), dtype) for seed in range(3))


@functools.partial(jax.jit, static_argnames="numerics")
def attended(q, k, v, counts, numerics):
    return nx.attend_all(q, k, v, counts, SCALE, numerics)


def plainly(q, k, v) -> np.ndarray:
    """One picture in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = np.einsum("qhk,shk->hqs", q, k) * SCALE
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return np.einsum("hqs,shk->qhk", p / p.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("rows", FORMS)
@pytest.mark.parametrize("dtype", [FLOAT32, "bfloat16"])
def test_values_against_float64(dtype, rows):
    """bfloat16 rounds probabilities and results."""
    q, k, v = operands(dtype)
    bound = 2e-6 if dtype == "float32" else 2e-2
    got = np.asarray(attended(q, k, v, COUNTS, form(dtype, rows))).astype(np.float64)
    for b, count in enumerate(COUNTS[:2]):
        own = (x[b, :count] for x in (q, k, v))
        np.testing.assert_allclose(got[b, :count], plainly(*own), atol=bound)
    assert np.isfinite(got[2]).all()


@pytest.mark.parametrize("rows", ["tiled", "pallas"])
@pytest.mark.parametrize("dtype", [FLOAT32, "bfloat16"])
def test_a_picture_depends_on_its_rows_only(dtype, rows):
    """Alone, in more places, with NaN behind its last row."""
    q, k, v = operands(dtype)
    together = np.asarray(attended(q, k, v, COUNTS, form(dtype, rows)))[1, :20]
    alone = [np.full((1, 130, *x.shape[2:]), np.nan, x.dtype) for x in (q, k, v)]
    for made, x in zip(alone, (q, k, v), strict=True):
        made[0, :20] = x[1, :20]
    got = attended(*alone, COUNTS[1:2], form(dtype, rows))
    np.testing.assert_array_equal(bits(np.asarray(got)[0, :20]), bits(together))


@pytest.mark.parametrize("rows", ["tiled", pytest.param("pallas", marks=pytest.mark.exhaustive)])
def test_gradients_are_those_of_plain_products(rows):
    q, k, v = operands("float32")

    def loss(q, k, v, numerics):
        y = attended(q, k, v, COUNTS, numerics)
        return sum(jnp.sum(jnp.sin(y[b, :count])) for b, count in enumerate(COUNTS))

    slope = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnames="numerics")
    got, want = (slope(q, k, v, form("float32", r)) for r in (rows, "batched"))
    for left, right in zip(got, want, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


# -- bias ------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="numerics")
def biased(x, w, b, numerics):
    return nx.linear(x, w, numerics, bias=b)


@pytest.mark.parametrize("rows", FORMS)
@pytest.mark.parametrize("shape", [(40, 96), (16, 4096)], ids=["one part of K", "two parts"])
def test_a_bias_is_added_before_the_rounding(rows, shape):
    n, k = shape
    x, w = (as_dtype(normal(i, m, k), "bfloat16") for i, m in ((4, 19), (5, n)))
    bias = as_dtype(normal(6, n), "bfloat16")
    got = np.asarray(biased(x, w, bias, form("bfloat16", rows)))
    wide = x.astype(np.float64) @ w.astype(np.float64).T + bias.astype(np.float64)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got.astype(np.float64), wide, rtol=2**-8, atol=1e-4)
    once = (got == wide.astype(np.float32).astype(x.dtype)).mean()
    assert once > 0.99


def test_gradients_of_a_bias():
    """Of the kernel, which adds it; elsewhere it is an ordinary addition."""
    x, w, bias = normal(4, 19, 96), normal(5, 40, 96), normal(6, 40)

    def loss(x, w, b):
        return jnp.sum(jnp.sin(biased(x, w, b, form("float32", "pallas"))))

    def plain(x, w, b):
        return jnp.sum(jnp.sin(x @ w.T + b[None, :]))

    got, want = (jax.grad(f, argnums=(0, 1, 2))(x, w, bias) for f in (loss, plain))
    for left, right in zip(got, want, strict=True):
        np.testing.assert_allclose(left, right, atol=2e-4)
