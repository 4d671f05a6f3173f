"""The walk along K that all products share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton

from deepinfer_jax.numerics.pallas.schedule import Schedule

Tile = Callable[[Any], jax.Array]  # first column of K -> [rows, depth]
# What a step needs early of a weight (its scales, or nothing), and its tile [columns, depth] made
# with that. Small loads are not overlapped with work by the compiler, so they come a step ahead.
Early = Callable[[Any], Any]
Late = Callable[[Any, Any], jax.Array]


def _dot(x: jax.Array, w: jax.Array, turned: bool) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    left, right = (w, x) if turned else (x, w)
    return triton.dot(left, right, trans_b=True, precision=precision)


def _pieces(w: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
    """float32 as three bfloat16 that add up to it exactly, largest first; other weights alone.

    A product with bfloat16 rows is then as good as one in float32, on tensor cores.
    """
    if w.dtype != jnp.float32 or dtype == jnp.float32:
        return (w,)
    pieces = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(w, jnp.uint32) & np.uint32(0xFFFF0000)
        top = lax.bitcast_convert_type(bits, jnp.float32)
        pieces.append(top.astype(jnp.bfloat16))
        w = w - top
    return tuple(pieces)


def part(
    x: Tile, w: tuple[Early, Late], first: Any, length: int, pieces: int, how: Schedule
) -> jax.Array:
    """Sum over K in [first, first + length), one element after the other."""
    shape = (how.columns, how.rows) if how.turned else (how.rows, how.columns)
    steps, (early, late) = -(-length // how.depth), w

    def body(i, carry):
        totals, ready = carry
        k = first + i * how.depth
        following = early(first + jnp.minimum(i + 1, steps - 1) * how.depth)
        rows = x(k)
        weights = _pieces(late(k, ready), rows.dtype)
        totals = tuple(
            total + _dot(rows, piece, how.turned)
            for total, piece in zip(totals, weights, strict=True)
        )
        return totals, following

    totals = (jnp.zeros(shape, jnp.float32),) * pieces
    totals, _ = lax.fori_loop(0, steps, body, (totals, early(first)))
    return functools.reduce(jnp.add, reversed(totals))


def whole(
    x: Tile, w: tuple[Early, Late], length: int, parts: int, pieces: int, how: Schedule
) -> jax.Array:
    """The parts of K added in order: [rows, columns], whether turned or not."""
    each = length // parts
    total = part(x, w, 0, each, pieces, how)
    if parts > 1:
        total = lax.fori_loop(
            1, parts, lambda p, total: total + part(x, w, p * each, each, pieces, how), total
        )
    return total.T if how.turned else total
