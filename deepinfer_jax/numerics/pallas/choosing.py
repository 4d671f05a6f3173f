"""The k largest columns of every row by counting: no row is sorted.

Floats are compared as integers of the same order. A program holds a part of a row in registers and
finds its k-th largest value bit by bit, each by one count; of the columns that equal it the first
ones are taken. Of a row in several parts what each has chosen goes through another round.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_LEAST = np.int32(-(2**31))
_PART = 16384  # columns that a program holds


def _ordered(x: jax.Array, narrow: bool) -> jax.Array:
    """float32 -> int32 that count up in the order of the floats; narrow: of bfloat16 values, whose
    upper half says all.
    """
    bits = lax.bitcast_convert_type(jnp.where(x == 0, np.float32(0), x), jnp.int32)
    bits = bits ^ ((bits >> 31) & np.int32(2**31 - 1))
    return bits >> 16 if narrow else bits


def _threshold(key: jax.Array, k: int, digits: int, least: np.int32, needed: Any) -> jax.Array:
    """The k-th largest of the keys, of `digits` bits; `least` where `needed` is false."""

    def digit(i, found):
        more = found + (jnp.int32(1) << (digits - 1 - i))
        count = jnp.sum((key >= more).astype(jnp.int32))
        return jnp.where(count >= k, more, found)

    turns = jnp.where(needed, jnp.int32(digits), jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), turns, digit, least)


def _kernel(*refs, k, part, narrow, last):
    """The k best of a part of a row in order: columns, or what stands there in `ids`; then -1."""
    *ids_ref, score_ref, value_ref, out_ref = refs
    row, first = pl.program_id(0), pl.program_id(1) * part
    place = lax.iota(jnp.int32, part)
    inside = first + place < score_ref.shape[1]
    where = pl.ds(first, part)
    value = triton.load(score_ref.at[row, where], mask=inside, other=-jnp.inf)
    key = _ordered(value, narrow)
    low, high = (_ordered(jnp.float32(v), narrow) for v in (-jnp.inf, jnp.inf))
    above = jnp.sum((key > low).astype(jnp.int32))
    digits, least = (16, np.int32(-(2**15))) if narrow else (32, _LEAST)
    limit = _threshold(key, k, digits, least, above > k)
    more, equal = key > limit, key == limit
    spare = k - jnp.sum(more.astype(jnp.int32))
    taken = more | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= spare))
    taken = taken & (key > low)
    if last:  # until then what is no number takes a place
        taken = taken & (key <= high)
    base = pl.program_id(1) * k
    at = base + jnp.cumsum(taken.astype(jnp.int32)) - 1
    at = jnp.where(taken, at, out_ref.shape[1])
    ids = first + place
    if ids_ref:
        ids = triton.load(ids_ref[0].at[row, where], mask=inside, other=-1)
    full = jnp.full((part,), row, jnp.int32)
    triton.store(out_ref.at[full, at], ids, mask=taken)
    triton.store(value_ref.at[full, at], value, mask=taken)
    wide = lax.iota(jnp.int32, pl.next_power_of_2(k))
    left = (wide >= jnp.sum(taken.astype(jnp.int32))) & (wide < k)
    rest = pl.ds(base, wide.shape[0])
    triton.store(out_ref.at[row, rest], jnp.full(wide.shape, -1, jnp.int32), mask=left)
    triton.store(value_ref.at[row, rest], jnp.full(wide.shape, -jnp.inf, jnp.float32), mask=left)


def _round(score, ids, k, part, narrow, interpret):
    t, n = score.shape
    parts = pl.cdiv(n, part)
    kernel = functools.partial(_kernel, k=k, part=part, narrow=narrow, last=parts == 1)
    shape = (t, parts * k)
    return pl.pallas_call(
        kernel,
        grid=(t, parts),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32),
        ],
        compiler_params=triton.CompilerParams(num_warps=max(1, min(16, part // 512)), num_stages=1),
        interpret=interpret,
        name="choose",
    )(*([] if ids is None else [ids]), score)  # fmt: skip


def chosen(
    score: jax.Array, ids: jax.Array | None, k: int, narrow: bool, interpret: bool,
    part: int = _PART,
) -> jax.Array:  # fmt: skip
    """The k best of float32 [T, n] in each row by value, then lower column -> int32 [T, k].

    Their columns in ascending order, or what stands there in ids [T, n]; -1 behind those that are
    above -inf and a number. narrow: all values are bfloat16 ones.
    """
    part = max(part, pl.next_power_of_2(2 * k))
    while True:
        n = score.shape[1]
        here = min(part, max(16, pl.next_power_of_2(n)))
        score, found = _round(score, ids, k, here, narrow, interpret)
        if n <= here:
            return found
        ids = found
