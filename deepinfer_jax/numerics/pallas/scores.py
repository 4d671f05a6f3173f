"""Attention and index scores of one query row; its keys in blocks of a fixed size and order."""

from __future__ import annotations

import functools

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


def _scores(q_ref, keys_ref, out_ref, *, scale, heads, slots, width):
    """q . k * scale of some heads and slots."""
    head, slot = pl.program_id(0) * heads, pl.program_id(1) * slots
    q = _block(q_ref, head, heads, width)
    s = dot(q, _block(keys_ref, slot, slots, width), trans_b=True) * np.float32(scale)
    row, column = head + lax.iota(jnp.int32, heads), slot + lax.iota(jnp.int32, slots)
    inside = (row < out_ref.shape[0])[:, None] & (column < out_ref.shape[1])[None, :]
    triton.store(out_ref.at[pl.ds(head, heads), pl.ds(slot, slots)], s, mask=inside)


def _values(s_ref, keys_ref, mask_ref, sink_ref, out_ref, *, heads, slots, columns):
    """The softmax of some heads' scores times some columns of the values."""
    first, column = pl.program_id(0) * heads, pl.program_id(1) * columns
    count, size = keys_ref.shape
    row, number = first + lax.iota(jnp.int32, heads), lax.iota(jnp.int32, slots)
    real = row < out_ref.shape[0]

    def scored(b):
        at = b * slots
        seen = triton.load(mask_ref.at[pl.ds(at, slots)], mask=at + number < count, other=0) != 0
        inside = real[:, None] & seen[None, :]
        where = s_ref.at[pl.ds(first, heads), pl.ds(at, slots)]
        return triton.load(where, mask=inside, other=-jnp.inf), inside

    blocks = pl.cdiv(count, slots)
    top = lax.fori_loop(
        0, blocks, lambda b, top: jnp.maximum(top, jnp.max(scored(b)[0], axis=1)),
        jnp.full((heads,), -jnp.inf, jnp.float32),
    )  # fmt: skip
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    inner = (column + lax.iota(jnp.int32, columns) < size)[None, :]

    def add(b, carry):
        z, value = carry
        s, inside = scored(b)
        p = jnp.where(inside, jnp.exp(s - top[:, None]), 0)
        keys = triton.load(
            keys_ref.at[pl.ds(b * slots, slots), pl.ds(column, columns)],
            mask=(b * slots + number < count)[:, None] & inner,
            other=jnp.zeros((), keys_ref.dtype),
        )
        return z + jnp.sum(p, axis=1), value + dot(p.astype(keys.dtype), keys)

    zero = jnp.zeros((heads,), jnp.float32), jnp.zeros((heads, columns), jnp.float32)
    z, value = lax.fori_loop(0, blocks, add, zero)
    sink = triton.load(sink_ref.at[pl.ds(first, heads)], mask=real, other=np.float32(0))
    z = z + jnp.exp(sink - top)
    where = out_ref.at[pl.ds(first, heads), pl.ds(column, columns)]
    triton.store(where, value / z[:, None], mask=real[:, None] & inner)


def attend(
    q: jax.Array, keys: jax.Array, mask: jax.Array, sink: jax.Array, scale: float, interpret: bool
) -> jax.Array:
    """Attention of one query row: q [H, K], keys [S, K], mask [S] bool, sink [H] -> float32 [H, K].

    The global maximum over the slots first, then blocks of slots in order, then the sink.
    """
    (h, k), count = q.shape, keys.shape[0]
    wide = q.dtype == jnp.bfloat16
    heads, slots = (64, 64) if wide else (16, 16)
    heads = min(heads, power(h))
    s = pl.pallas_call(
        functools.partial(_scores, scale=scale, heads=heads, slots=slots, width=power(k)),
        grid=(pl.cdiv(h, heads), pl.cdiv(count, slots)),
        out_shape=jax.ShapeDtypeStruct((h, count), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="attention_scores",
    )(q, keys)
    heads, columns = min(64 if wide else 16, power(h)), min(128 if wide else 16, power(k))
    return pl.pallas_call(
        functools.partial(_values, heads=heads, slots=slots, columns=columns),
        grid=(pl.cdiv(h, heads), pl.cdiv(k, columns)),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention_values",
    )(s, keys, mask.astype(jnp.int32), sink)


def _index(q_ref, weight_ref, keys_ref, out_ref, *, heads, keys, width, rounding):
    first = pl.program_id(0) * keys
    head = lax.iota(jnp.int32, heads)
    q = _block(q_ref, 0, heads, width)
    weight = triton.load(
        weight_ref.at[pl.ds(0, heads)], mask=head < q_ref.shape[0], other=np.float32(0)
    )
    s = dot(q, _block(keys_ref, first, keys, width), trans_b=True)
    if rounding == "reference":
        s = s.astype(jnp.bfloat16).astype(jnp.float32)
    term = jnp.maximum(s, 0) * weight[:, None]
    if rounding == "reference":
        term = term.astype(jnp.bfloat16).astype(jnp.float32)
    total = jnp.sum(term, axis=0)
    if rounding != "none":
        total = total.astype(jnp.bfloat16).astype(jnp.float32)
    inside = first + lax.iota(jnp.int32, keys) < keys_ref.shape[0]
    triton.store(out_ref.at[pl.ds(first, keys)], total, mask=inside)


def index_scores(
    q: jax.Array, weight: jax.Array, keys: jax.Array, rounding: str, interpret: bool
) -> jax.Array:
    """Sum over heads of relu(q . k) * weight: q [H, K], weight [H], keys [N, K] -> float32 [N].

    rounding: "none", "once" or "reference" (`Numerics.index_rounding`).
    """
    block = 64 if q.dtype == jnp.bfloat16 else 16
    kernel = functools.partial(
        _index, heads=power(q.shape[0]), keys=block, width=power(q.shape[1]), rounding=rounding
    )
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(keys.shape[0], block),),
        out_shape=jax.ShapeDtypeStruct((keys.shape[0],), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="index_scores",
    )(q, weight.astype(jnp.float32), keys)
