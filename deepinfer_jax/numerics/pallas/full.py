"""Attention of every row of a sequence to all of its rows, in one kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from deepinfer_jax.numerics.pallas import scores


def _kernel(count_ref, q_ref, k_ref, v_ref, out_ref, *, scale, rows, keys, width):
    """`rows` queries of one head of one sequence over blocks of `keys` keys, in order."""
    first, head, b = pl.program_id(0) * rows, pl.program_id(1), pl.program_id(2)
    count, size = count_ref[b], q_ref.shape[-1]
    inner = (lax.iota(jnp.int32, width) < size)[None, :]

    def load(ref, start, number, limit):
        inside = (start + lax.iota(jnp.int32, number) < limit)[:, None] & inner
        at = ref.at[b, pl.ds(start, number), head, pl.ds(0, width)]
        return triton.load(at, mask=inside, other=jnp.zeros((), ref.dtype))

    q = load(q_ref, first, rows, q_ref.shape[1])

    def add(i, carry):
        top, z, value = carry
        start = i * keys
        seen = (start + lax.iota(jnp.int32, keys) < count)[None, :]
        s = scores.dot(q, load(k_ref, start, keys, count), trans_b=True) * np.float32(scale)
        s = jnp.where(seen, s, -jnp.inf)
        now = jnp.maximum(top, jnp.max(s, axis=1))
        p = jnp.exp(s - now[:, None])
        fade = jnp.exp(top - now)
        part = scores.dot(p.astype(v_ref.dtype), load(v_ref, start, keys, count))
        return now, z * fade + jnp.sum(p, axis=1), value * fade[:, None] + part

    start = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )
    blocks = jnp.where(first < count, pl.cdiv(count, keys), 0)
    _, z, value = lax.fori_loop(0, blocks, add, start)
    inside = (first + lax.iota(jnp.int32, rows) < out_ref.shape[1])[:, None] & inner
    where = out_ref.at[b, pl.ds(first, rows), head, pl.ds(0, width)]
    value = value / jnp.where(z > 0, z, 1)[:, None]
    triton.store(where, value.astype(out_ref.dtype), mask=inside)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, counts: jax.Array, scale: float, interpret: bool
) -> jax.Array:
    """q, k, v [B, N, H, K], counts [B] int32 -> [B, N, H, K] of q's dtype (`attend_all`).

    The number of keys in a block fixes the order of the sums; a block behind the last real row is
    never visited.
    """
    b, n, h, size = q.shape
    rows, keys = (128, 64) if q.dtype == jnp.bfloat16 else (32, 32)
    kernel = functools.partial(_kernel, scale=scale, rows=rows, keys=keys, width=scores.power(size))
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n, rows), h, b),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="attention_all",
    )(counts, q, k, v)
