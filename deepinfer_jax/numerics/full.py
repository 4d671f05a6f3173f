"""Attention of every row of a sequence to all of its rows: inside one image."""

from __future__ import annotations

import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.numerics.elements import finite_max, pin, round_to
from deepinfer_jax.numerics.pallas import full as kernels
from deepinfer_jax.numerics.products import contract, einsum, precision
from deepinfer_jax.numerics.settings import Numerics
from deepinfer_jax.numerics.sums import plain_sum, row_sum

_QUERIES, _KEYS = 32, 64  # of one step on a CPU; the keys fix the order of the sums


def attend_all(
    q: jax.Array, k: jax.Array, v: jax.Array, counts: jax.Array, scale: float, numerics: Numerics
) -> jax.Array:
    """Attention of all rows of B sequences, each to all rows of its own (docs/model.md 12).

    q, k, v [B, N, H, K] of one dtype; counts [B] int32: the first counts[b] rows are real, the
    others are seen by nobody and get arbitrary numbers. Returns [B, N, H, K], rounded once to that
    dtype.

    Keys come in blocks of one size in the order of rows, with a running maximum, up to the last
    real row: neither N nor B changes a bit. On a CPU one tile of rows after the other goes through
    one compiled body. Gradients take plain products, as everywhere.
    """
    return cast(jax.Array, _attend_all(q, k, v, counts, scale, numerics))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend_all(q, k, v, counts, scale, numerics):
    if numerics.uses_pallas:
        return kernels.attend(q, k, v, counts, scale, numerics.interpret)
    if numerics.rows in ("batched", "dense"):
        return _plain(q, k, v, counts, scale)
    return _in_tiles(q, k, v, counts, scale, numerics)


def _forward(q, k, v, counts, scale, numerics):
    return _attend_all(q, k, v, counts, scale, numerics), (q, k, v, counts)


def _backward(scale, numerics, saved, g):
    def one(own):
        *operands, count, slope = jax.tree.map(lambda a: a[None], own)
        _, pull = jax.vjp(lambda q, k, v: _plain(q, k, v, count, scale), *operands)
        return tuple(part[0] for part in pull(slope))

    return *lax.map(one, (*saved, g)), None


_attend_all.defvjp(_forward, _backward)


def _plain(q, k, v, counts, scale):
    real = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :] < counts[:, None]
    k, v = (jnp.where(real[:, :, None, None], x, 0) for x in (k, v))
    s = einsum("bqhk,bshk->bhqs", q, k) * np.float32(scale)
    seen = jnp.broadcast_to(real[:, None, None, :], s.shape)
    s = jnp.where(seen, s, -jnp.inf)
    p = jnp.exp(s - finite_max(s, -1))
    z = plain_sum(p, -1).transpose(0, 2, 1)[..., None]
    value = einsum("bhqs,bshk->bqhk", round_to(p, v.dtype), v)
    return round_to(value / jnp.where(z > 0, z, 1), q.dtype)


def _in_tiles(q, k, v, counts, scale, numerics):
    b, n, h, width = q.shape
    padding = -n % max(_QUERIES, _KEYS)

    def cut(x, rows):  # [B * H, tiles, rows, K]
        x = jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)]).transpose(0, 2, 1, 3)
        return x.reshape(b * h, (n + padding) // rows, rows, width)

    def one_head(own):
        tiles, keys, values, count = own
        blocks = (count + _KEYS - 1) // _KEYS

        def tile(part):
            number, rows = part
            last = jnp.where(number * _QUERIES < count, blocks, 0)
            return _tile(rows, keys, values, count, last, scale, numerics)

        return lax.map(tile, (jnp.arange(tiles.shape[0], dtype=jnp.int32), tiles))

    heads = cut(q, _QUERIES), cut(k, _KEYS), cut(v, _KEYS), jnp.repeat(counts, h)
    y = lax.map(one_head, heads).reshape(b, h, n + padding, width)
    return y.transpose(0, 2, 1, 3)[:, :n]


def _tile(q, keys, values, count, blocks, scale, numerics):
    """[queries, K] over `blocks` blocks of keys and values [number, block, K]."""
    rows = q.shape[0]

    def add(i, carry):
        top, z, value = carry
        key, content = (lax.dynamic_index_in_dim(x, i, keepdims=False) for x in (keys, values))
        seen = i * _KEYS + jnp.arange(_KEYS, dtype=jnp.int32)[None, :] < count
        content = jnp.where(seen.T, content, 0)  # 0 x NaN is NaN
        s = jnp.where(seen, pin(contract(q, key) * np.float32(scale)), -jnp.inf)
        now = jnp.maximum(top, jnp.max(s, axis=1, keepdims=True))
        p = jnp.where(seen, jnp.exp(s - now), 0)
        fade = jnp.exp(top - now)
        part = lax.dot_general(
            round_to(p, content.dtype), content, (((1,), (0,)), ((), ())),
            precision=precision(content), preferred_element_type=jnp.float32,
        )  # fmt: skip
        z = pin(z * fade) + row_sum(p, numerics)[:, None]
        return now, z, pin(value * fade) + part

    start = (
        jnp.full((rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    _, z, value = lax.fori_loop(0, blocks, add, start)
    return round_to(value / jnp.where(z > 0, z, 1), q.dtype)
