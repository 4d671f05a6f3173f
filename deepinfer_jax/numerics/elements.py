"""Elementwise pieces that the sums rely on, and the total order of a selection."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import quant
from deepinfer_jax.numerics.pallas import choosing
from deepinfer_jax.numerics.settings import Numerics
from kernels_bridge import ffi

FLOAT_MAX = np.finfo(np.float32).max
_LAST = np.int32(2**31 - 1)


@jax.custom_jvp
def pin(x: jax.Array) -> jax.Array:
    """The identity on finite float32, opaque to fusion of a product into an add."""
    return jnp.minimum(x, FLOAT_MAX)


@pin.defjvp
def _pin_jvp(primals, tangents):
    return pin(primals[0]), tangents[0]


def quotient(x: jax.Array, divisor: jax.Array | np.float32) -> jax.Array:
    """x / divisor for a result that feeds an addition.

    A compiler divides by a broadcast through the reciprocal, so this is an inexact product too.
    """
    return pin(x / divisor)


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Round once to `dtype`; survives compilers that may keep excess precision."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        x = lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def float_weight(leaf: Any, dtype: Any) -> jax.Array:
    """A weight leaf (stored or plain) as floats of `dtype`."""
    if isinstance(leaf, quant.Quantized):
        return quant.dequantize(leaf, dtype)
    return leaf.astype(dtype)


def finite_max(x: jax.Array, axis: int) -> jax.Array:
    """Largest of `x` along an axis that is kept, 0 where nothing is finite; to subtract before exp.

    The guard is needed even where all is finite: XLA:CPU hands "max, subtract, exp" of 4,096 or
    more numbers to a kernel whose exp has other bits, unless something stands between them.
    """
    top = lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    return jnp.where(jnp.isfinite(top), top, np.float32(0))


def best(x: jax.Array, k: int, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
    """`top_k` of many columns [T, n], where it is worth a kernel; no gradient."""
    if numerics.rows == "ffi":
        ids = ffi.best(lax.stop_gradient(x), k)
        return jnp.take_along_axis(x, ids, axis=1), ids
    return top_k(x, k)


def chosen(score: jax.Array, ids: jax.Array | None, k: int, numerics: Numerics) -> jax.Array:
    """Which k columns of score [T, n] are the best: int32 [T, k], in the order of columns.

    score: float32, with bfloat16 values unless the numerics are float32. The total order is that of
    `top_k`; of those k, columns at -inf or no number are left out, and -1 fills up behind. ids
    [T, n]: what to give instead of columns, ascending where a score is above -inf.
    """
    if numerics.uses_pallas:
        narrow = numerics.dtype != "float32"
        return choosing.chosen(lax.stop_gradient(score), ids, k, narrow, numerics.interpret)
    n = score.shape[1]
    if k < n:
        score, column = best(score, k, numerics)
        ids = column if ids is None else jnp.take_along_axis(ids, column, axis=1)
    elif ids is None:
        ids = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), score.shape)
    return ascending(ids, score > -jnp.inf)


def ascending(ids: jax.Array, keep: jax.Array) -> jax.Array:
    """Kept ids [T, n] ascending along n, then -1."""
    ordered = jnp.sort(jnp.where(keep, ids, _LAST), axis=-1)
    return jnp.where(ordered == _LAST, -1, ordered)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Largest k of the last axis in a total order: value, then lower index; -0 equals +0."""
    # Adding zero would turn -0 into +0 too, were it not simplified away.
    values, ids = lax.top_k(jnp.where(x == 0, np.float32(0), x), k)
    # Without barriers XLA:CPU sorts whole rows when a caller looks at a part of the result; one
    # barrier around both makes it abort inside shard_map.
    return lax.optimization_barrier(values), lax.optimization_barrier(ids)
