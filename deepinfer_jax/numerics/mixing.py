"""The mixes of hyper-connections from their raw sums (docs/model.md 4)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.numerics.elements import finite_max, pin, quotient
from deepinfer_jax.numerics.naming import by_name
from deepinfer_jax.numerics.pallas import mixing as kernels
from deepinfer_jax.numerics.settings import Numerics
from deepinfer_jax.numerics.sums import axis_sum

Mixes = tuple[jax.Array, jax.Array, jax.Array]


@by_name("streams", "iterations", "eps")
def mixes(
    raw: jax.Array, scale: jax.Array, base: jax.Array, streams: int, iterations: int, eps: float,
    numerics: Numerics,
) -> Mixes:  # fmt: skip
    """raw float32 [T, C(2 + C)], scale [3] and base [C(2 + C)] float32 -> pre [T, C], post [T, C]
    and comb [T, C source, C dest], normalised over both by `iterations` turns.
    """
    form = _in_kernel if numerics.uses_pallas else _mixes
    return form(raw, scale, base, streams, iterations, eps, numerics)


def _mixes(raw, scale, base, streams, iterations, eps, numerics):
    c = streams
    cuts = (slice(0, c), slice(c, 2 * c), slice(2 * c, None))
    pre, post, comb = (
        pin(raw[:, cut] * scale[i]) + base[cut][None, :] for i, cut in enumerate(cuts)
    )
    comb = _normalised(comb.reshape(-1, c, c), iterations, np.float32(eps), numerics)
    return jax.nn.sigmoid(pre) + np.float32(eps), 2 * jax.nn.sigmoid(post), comb


def _normalised(m, iterations, eps, numerics):
    """Rows [source, dest]: softmax over dest, then alternate normalisations, ending over source."""

    def total(m, axis):
        return jnp.expand_dims(axis_sum(m, axis, numerics), axis)

    m = jnp.exp(m - finite_max(m, 2))
    m = quotient(m, total(m, 2)) + eps
    m = quotient(m, total(m, 1) + eps)

    def step(_, m):
        m = quotient(m, total(m, 2) + eps)
        return quotient(m, total(m, 1) + eps)

    return lax.fori_loop(0, iterations - 1, step, m)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _in_kernel(raw, scale, base, streams, iterations, eps, numerics):
    return kernels.split(raw, scale, base, streams, iterations, eps, numerics.interpret)


def _forward(raw, scale, base, streams, iterations, eps, numerics):
    made = _in_kernel(raw, scale, base, streams, iterations, eps, numerics)
    return made, (raw, scale, base)


def _backward(streams, iterations, eps, numerics, saved, g):
    def mixes(raw, scale, base):
        return _mixes(raw, scale, base, streams, iterations, eps, numerics)

    return jax.vjp(mixes, *saved)[1](g)


_in_kernel.defvjp(_forward, _backward)
