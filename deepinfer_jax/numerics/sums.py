"""Sums over one axis: in a fixed order of floats, or of integers, which have none."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.numerics.elements import FLOAT_MAX, finite_max, pin, quotient, round_to
from deepinfer_jax.numerics.naming import by_name
from deepinfer_jax.numerics.pallas import rows as kernels
from deepinfer_jax.numerics.replacing import in_kernel
from deepinfer_jax.numerics.settings import Numerics
from kernels_bridge import ffi

_LANES, _WIDE_LANES, _WIDE = 16, 512, 8192
_LIMB_BITS = 14


def _pinned_add(a, b):
    return jnp.minimum(a, FLOAT_MAX) + b


def row_sum(x: jax.Array, numerics: Numerics) -> jax.Array:
    """Sum of float32 [..., K] over the last axis, in one order for all rows.

    `x` must be what an elementwise operation made (docs/determinism.md "Why it holds: rules and
    reasons"): on a CPU the compiler would move a bare reshape or concatenation into the sum.
    """
    return _row_sum(x, numerics)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _row_sum(x, numerics):
    if numerics.uses_pallas:
        return kernels.row_sum(x, squared=False, interpret=numerics.interpret)
    return _sum_of_lanes(x)


@_row_sum.defjvp
def _row_sum_jvp(numerics, primals, tangents):
    return _row_sum(primals[0], numerics), jnp.sum(tangents[0], axis=-1)


def _sum_of_lanes(x: jax.Array) -> jax.Array:
    """Lanes first, then the lanes: a form that XLA:CPU vectorises, cutting it as it likes."""
    lanes = _WIDE_LANES if x.shape[-1] >= _WIDE else _LANES
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % lanes)])
    parts = padded.reshape(*x.shape[:-1], -1, lanes)
    parts = lax.reduce(parts, np.float32(0), _pinned_add, (parts.ndim - 2,))
    return lax.reduce(parts, np.float32(0), _pinned_add, (parts.ndim - 1,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _sum_of_squares(x, interpret):
    """Sum of squares [...] float32 of any float [..., K], squared inside the kernel."""
    return kernels.row_sum(x, squared=True, interpret=interpret)


@_sum_of_squares.defjvp
def _sum_of_squares_jvp(interpret, primals, tangents):
    (x,), (t,) = primals, tangents
    slope = 2 * jnp.sum(x.astype(jnp.float32) * t.astype(jnp.float32), axis=-1)
    return _sum_of_squares(x, interpret), slope


def ordered_sum(terms: list[jax.Array]) -> jax.Array:
    """Left-to-right sum of a short list; pin inexact products before."""
    return functools.reduce(lambda a, b: a + b, terms)


def plain_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum over one axis in the compiler's order: for losses and `rows="dense"` only."""
    return jnp.sum(x, axis=axis)


def axis_sum(x: jax.Array, axis: int, numerics: Numerics) -> jax.Array:
    """Sum of float32 over one short axis, in index order; pin inexact products before."""
    if numerics.uses_pallas:
        return ordered_sum([lax.index_in_dim(x, i, axis, False) for i in range(x.shape[axis])])
    return _axis_sum(x, axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _axis_sum(x, axis):
    return lax.reduce(x, np.float32(0), _pinned_add, (axis,))


@_axis_sum.defjvp
def _axis_sum_jvp(axis, primals, tangents):
    return _axis_sum(primals[0], axis), jnp.sum(tangents[0], axis=axis)


def mean_square(x: jax.Array, numerics: Numerics) -> jax.Array:
    """Mean of squares over the last axis, float32."""
    if numerics.uses_pallas:
        total = _sum_of_squares(x, numerics.interpret)
    else:
        x = x.astype(jnp.float32)
        total = row_sum(pin(x * x), numerics)
    return quotient(total, np.float32(x.shape[-1]))


def _norm_in_kernel(x, weight, eps, numerics):
    return ffi.rms_norm(x, weight, eps, numerics.dtype)


@in_kernel(_norm_in_kernel, "eps")
@by_name("eps")
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
    """[..., K] normalised in float32 and rounded once to `numerics.dtype` (docs/model.md 1)."""
    scale = lax.rsqrt(mean_square(x, numerics) + np.float32(eps))
    y = x.astype(jnp.float32) * scale[..., None]
    gain = weight.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
    return round_to(gain * y, numerics.dtype)


@jax.custom_vjp
def logsumexp(x: jax.Array) -> jax.Array:
    """log sum exp [...] float32 over the last axis of `x` [..., V] float32; -inf adds nothing.

    The sum is over integers (`unit_sum`), so no order of summation exists: neither batch, padding,
    vocabulary shards nor the compiler can change a bit, on any back end whose `exp` is a function
    of its argument. On XLA:CPU that fails for log and exp of a bare vector of 3, 5, 6, 7, 11 or
    13 to 15 entries (other bits than in any other length), hence the column shape.
    """
    top = finite_max(x, -1)
    total = unit_sum(jnp.exp(x - top))[..., None]
    return (pin(jnp.log(total)) + top)[..., 0]


def _logsumexp_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    value = logsumexp(x)
    return value, (x, value)


def _logsumexp_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array]:
    x, value = saved
    return (jnp.exp(x - value[..., None]) * g[..., None],)


logsumexp.defvjp(_logsumexp_forward, _logsumexp_backward)


def unit_sum(weight: jax.Array) -> jax.Array:
    """Sum [...] float32 of `weight` [..., V] in [0, 1], to V * 2^-42 before its final rounding.

    Each weight is cut, without rounding, into three limbs of 14 bits; the limbs are added as
    integers. The scalings are by powers of two, so every step but the last few is exact.
    """
    if weight.shape[-1] >= 1 << (32 - _LIMB_BITS):
        raise ValueError(
            f"V must be below {1 << (32 - _LIMB_BITS)} (sums are 32-bit), got {weight.shape[-1]}"
        )
    scale = np.float32(1 << _LIMB_BITS)
    limbs = []
    for _ in range(3):
        scaled = weight * scale
        whole = jnp.floor(scaled)
        weight = scaled - whole
        limbs.append(whole.astype(jnp.uint32))
    total = jnp.zeros(weight.shape[:-1], jnp.float32)
    for limb in reversed(integer_sums(*limbs)):
        total = (total + limb.astype(jnp.float32)) / scale
    return total


def integer_sums(*terms: jax.Array) -> tuple[jax.Array, ...]:
    """Sums [...] over the last axis of uint32 `terms`, each [..., V].

    One reduction of several operands: XLA:CPU vectorises it, unlike several reductions of one.
    """
    return lax.reduce(
        terms,
        (jnp.uint32(0),) * len(terms),
        lambda left, right: tuple(a + b for a, b in zip(left, right, strict=True)),
        (terms[0].ndim - 1,),
    )


def log_softmax(x: jax.Array) -> jax.Array:
    """Log-probabilities over the last axis, float32."""
    return x.astype(jnp.float32) - logsumexp(x.astype(jnp.float32))[..., None]
