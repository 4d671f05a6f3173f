"""Rows, alone or grouped by expert, through one compiled body each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.numerics.settings import Numerics


def map_rows(f: Callable, rows: Any, shared: Any, numerics: Numerics) -> Any:
    """f(row, shared) for every leading index of the tree `rows`; f sees no other row.

    Tiled: one row after another through one compiled body. Batched: `vmap`. Gradients always take
    the batched form, since only the forward pass owes its bits to anyone.
    """
    if numerics.rows != "tiled":
        return jax.vmap(f, in_axes=(0, None))(rows, shared)
    return _map_in_order(f, rows, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_in_order(f, rows, shared):
    return lax.map(lambda row: f(row, shared), rows)


def _map_forward(f, rows, shared):
    return _map_in_order(f, rows, shared), (rows, shared)


def _map_backward(f, saved, g):
    _, pull = jax.vjp(jax.vmap(f, in_axes=(0, None)), *saved)
    return pull(g)


_map_in_order.defvjp(_map_forward, _map_backward)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Rows sorted by expert and padded to whole tiles: where each row went, whose tile each is."""

    slot: jax.Array  # [M] position of a row among the padded rows
    expert: jax.Array  # [tiles]
    used: jax.Array  # scalar: tiles that hold rows; they come first
    tile: int


def _assign_tiles(ids: jax.Array, experts: int, tile: int) -> _Tiles:
    m = ids.shape[0]
    tiles = min(m, -(-m // tile) + min(experts, m))
    count = jnp.zeros((experts,), jnp.int32).at[ids].add(1, mode="drop")
    each = (count + tile - 1) // tile
    ends = jnp.cumsum(each, dtype=jnp.int32)
    order = jnp.argsort(ids, stable=True)
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    rank = jnp.arange(m, dtype=jnp.int32) - first[ids[order]]
    rank = jnp.zeros((m,), jnp.int32).at[order].set(rank)
    slot = (ends - each)[ids] * tile + rank
    owner = jnp.searchsorted(ends, jnp.arange(tiles, dtype=jnp.int32), side="right")
    return _Tiles(slot, jnp.minimum(owner, experts - 1).astype(jnp.int32), ends[-1], tile)


def map_experts(
    f: Callable, rows: Any, ids: jax.Array, shared: Any, experts: int, numerics: Numerics
) -> jax.Array:
    """f(rows of one expert [tile, ...], expert id, shared) for rows grouped by `ids` [M].

    Rows are sorted by expert (stable), each expert's rows padded to whole tiles; a row sees neither
    how many rows its expert has nor which. No capacity, nothing is dropped. Returns [M, ...] in row
    order.
    """
    m = ids.shape[0]
    if numerics.rows != "tiled":
        tile = 128 if m >= 4096 else 16
    else:
        tile = numerics.row_tile if m < 4 * numerics.long_rows else numerics.long_row_tile
    tiles = _assign_tiles(ids, experts, tile)
    n = tiles.expert.shape[0]

    def spread(x):
        out = jnp.zeros((n * tile, *x.shape[1:]), x.dtype).at[tiles.slot].set(x)
        return out.reshape(n, tile, *x.shape[1:])

    parts = jax.tree.map(spread, rows)
    if numerics.rows != "tiled":
        y = jax.vmap(f, in_axes=(0, 0, None))(parts, tiles.expert, shared)
    else:
        y = cast(jax.Array, _map_tiles(f, parts, tiles.expert, tiles.used, shared))
    return y.reshape(n * tile, *y.shape[2:])[tiles.slot]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_tiles(f, parts, expert, used, shared):
    out = jax.eval_shape(lambda p: f(jax.tree.map(lambda a: a[0], p), expert[0], shared), parts)

    def body(t, acc):
        return acc.at[t].set(f(jax.tree.map(lambda a: a[t], parts), expert[t], shared))

    empty = jnp.zeros((expert.shape[0], *out.shape), out.dtype)
    return lax.fori_loop(0, used, body, empty)


def _map_tiles_forward(f, parts, expert, used, shared):
    return _map_tiles(f, parts, expert, used, shared), (parts, expert, used, shared)


def _map_tiles_backward(f, saved, g):
    parts, expert, used, shared = saved
    live = (jnp.arange(expert.shape[0]) < used).reshape(-1, *([1] * (g.ndim - 1)))
    _, pull = jax.vjp(lambda p, s: jax.vmap(f, in_axes=(0, 0, None))(p, expert, s), parts, shared)
    parts_bar, shared_bar = pull(jnp.where(live, g, 0).astype(g.dtype))
    return parts_bar, None, None, shared_bar


_map_tiles.defvjp(_map_tiles_forward, _map_tiles_backward)
