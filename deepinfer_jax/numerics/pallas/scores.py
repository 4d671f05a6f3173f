"""Attention and index scores of one query row; its keys in blocks of a fixed size and order."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_LEAST = 16  # smallest side of a product on tensor cores


def power(size: int) -> int:
    return max(_LEAST, pl.next_power_of_2(size))


def _block(ref, first, rows, width):
    """Rows first .. first + rows of ref [R, K] as [rows, width]; zero beyond its edges."""
    row, column = first + lax.iota(jnp.int32, rows), lax.iota(jnp.int32, width)
    mask = (row < ref.shape[0])[:, None] & (column < ref.shape[1])[None, :]
    return triton.load(
        ref.at[pl.ds(first, rows), pl.ds(0, width)], mask=mask, other=jnp.zeros((), ref.dtype)
    )


def dot(a, b, trans_b=False):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return triton.dot(a, b, trans_b=trans_b, precision=precision)


def tile_keys(dtype: Any) -> int:
    """Index keys of a tile, whose shape fixes the order of the sum over heads."""
    return 64 if dtype == jnp.bfloat16 else 16


def load_heads(q_ref: Any, weight_ref: Any, row: Any) -> tuple[jax.Array, jax.Array]:
    """q [heads, width] and weight [heads] of one row of [T, H, K] and [T, H], filled with zeros."""
    h, k = q_ref.shape[1:]
    head, column = lax.iota(jnp.int32, power(h)), lax.iota(jnp.int32, power(k))
    mask = (head < h)[:, None] & (column < k)[None, :]
    q = triton.load(
        q_ref.at[row, pl.ds(0, power(h)), pl.ds(0, power(k))], mask=mask,
        other=jnp.zeros((), q_ref.dtype),
    )  # fmt: skip
    weight = weight_ref.at[row, pl.ds(0, power(h))]
    return q, triton.load(weight, mask=head < h, other=np.float32(0))


def head_sums(q: jax.Array, keys: jax.Array, weight: jax.Array, rounding: str) -> jax.Array:
    """Sum over heads of relu(q . k) * weight: q [H, K], keys [N, K], weight [H] -> float32 [N]."""
    s = dot(keys, q, trans_b=True)  # keys are the operand that stays in registers
    if rounding == "reference":
        s = s.astype(jnp.bfloat16).astype(jnp.float32)
    term = jnp.maximum(s, 0) * weight[None, :]
    if rounding == "reference":
        term = term.astype(jnp.bfloat16).astype(jnp.float32)
    total = jnp.sum(term, axis=1)
    return total if rounding == "none" else total.astype(jnp.bfloat16).astype(jnp.float32)


def _index(q_ref, weight_ref, keys_ref, out_ref, *, rounding):
    keys, width = tile_keys(q_ref.dtype), power(q_ref.shape[2])
    first = pl.program_id(0) * keys
    q, weight = load_heads(q_ref, weight_ref, jnp.int32(0))
    total = head_sums(q, _block(keys_ref, first, keys, width), weight, rounding)
    inside = first + lax.iota(jnp.int32, keys) < keys_ref.shape[0]
    triton.store(out_ref.at[pl.ds(first, keys)], total, mask=inside)


def index_scores(
    q: jax.Array, weight: jax.Array, keys: jax.Array, rounding: str, interpret: bool
) -> jax.Array:
    """Sum over heads of relu(q . k) * weight: q [H, K], weight [H], keys [N, K] -> float32 [N].

    rounding: "none", "once" or "reference" (`Numerics.index_rounding`).
    """
    return pl.pallas_call(
        functools.partial(_index, rounding=rounding),
        grid=(pl.cdiv(keys.shape[0], tile_keys(q.dtype)),),
        out_shape=jax.ShapeDtypeStruct((keys.shape[0],), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="index_scores",
    )(q[None], weight.astype(jnp.float32)[None], keys)
