"""Rows, one by one, through one compiled body."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from deepinfer_jax.numerics.settings import Numerics

ROWS_AT_ONCE = 256  # 640 slots of 512 bfloat16 for each are 168 MB


def map_rows(f: Callable, rows: Any, shared: Any, numerics: Numerics) -> Any:
    """f(row, shared) for every leading index of the tree `rows`; f sees no other row.

    Tiled: one row after another through one compiled body. Pallas and ffi: `ROWS_AT_ONCE` through
    `vmap`, which gives every kernel in f one more axis and every row its own share of it; no more
    rows, since what f gathers for a row stands in memory. Batched: `vmap` of all. Gradients always
    take the batched form, since only the forward pass owes its bits to anyone.
    """
    if numerics.rows == "tiled":
        return _map_in_order(f, rows, shared, None)
    count = jax.tree.leaves(rows)[0].shape[0]
    if (numerics.uses_pallas or numerics.rows == "ffi") and count > ROWS_AT_ONCE:
        return _map_in_order(f, rows, shared, ROWS_AT_ONCE)
    return jax.vmap(f, in_axes=(0, None))(rows, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _map_in_order(f, rows, shared, at_once):
    return lax.map(lambda row: f(row, shared), rows, batch_size=at_once)


def _map_forward(f, rows, shared, at_once):
    return _map_in_order(f, rows, shared, at_once), (rows, shared)


def _map_backward(f, at_once, saved, g):
    _, pull = jax.vjp(jax.vmap(f, in_axes=(0, None)), *saved)
    return pull(g)


_map_in_order.defvjp(_map_forward, _map_backward)
