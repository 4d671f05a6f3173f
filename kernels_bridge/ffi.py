"""Our C++ kernels as JAX functions: built, loaded and registered at their first use.

All run on a CPU and have no gradient of their own (`deepinfer_jax.numerics` gives them one). Only
`attend` and `index_scores`, kernels of one row, can be mapped over rows with `jax.vmap`. Raise
NoKernelsError where they cannot be had.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from kernels_bridge import building, handlers
from kernels_bridge.building import NoKernelsError

__all__ = [
    "NoKernelsError",
    "attend",
    "attend_cache",
    "best",
    "grouped",
    "index_cache",
    "index_scores",
    "load",
    "product",
]

_ROWS = handlers.Library(
    building.SOURCE,
    (
        "product",
        "grouped",
        "attend",
        "attend_cache",
        "index_scores",
        "index_cache",
        "best",
    ),
)
_OF_ONE_ROW = ("attend", "index_scores")
_ROUNDINGS = {"none": 0, "once": 1, "reference": 2}


def load() -> None:
    """Build the kernels if need be and register them, once in a process."""
    handlers.load(_ROWS)


def _call(name: str, shape: tuple[int, ...], dtype: Any, *operands: jax.Array, **attributes: Any):
    mapped = "broadcast_all" if name in _OF_ONE_ROW else None
    result = jax.ShapeDtypeStruct(shape, dtype)
    made = handlers.call(_ROWS, name, result, *operands, attributes=attributes, mapped=mapped)
    return cast(jax.Array, made)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [T, G, K] times w [G * N, K], group by group -> float32 [T, G, N].

    Both bfloat16 or float32, not necessarily the same; w also uint16 bits of bfloat16.
    """
    t, groups, _ = x.shape
    return _call("product", (t, groups, w.shape[0] // groups), jnp.float32, x, w)


def grouped(
    x: jax.Array, w: jax.Array, layer: jax.Array, expert: jax.Array, live: jax.Array
) -> jax.Array:
    """x [tiles * rows, K] times w [layers, E, N, K] at [layer, expert[tile]], rounded to x's dtype.

    Of every tile only the first `live` [tiles] rows are computed, the others stay undefined.
    """
    numbers = (jnp.asarray(one, jnp.int32) for one in (layer, expert, live))
    return _call("grouped", (x.shape[0], w.shape[2]), x.dtype, x, w, *numbers)


def attend(
    q: jax.Array, keys: jax.Array, mask: jax.Array, sink: jax.Array, scale: float
) -> jax.Array:
    """q [H, K], keys [S, K], mask [S] bool, sink [H] float32 -> float32 [H, K]."""
    return _call("attend", q.shape, jnp.float32, q, keys, mask, sink, scale=np.float32(scale))


def index_scores(q: jax.Array, weight: jax.Array, keys: jax.Array, rounding: str) -> jax.Array:
    """q [H, K], weight [H] float32, keys [N, K] -> float32 [N].

    rounding: "none", "once" (the sum to bfloat16) or "reference" (scores, terms and sum).
    """
    code = np.int64(_ROUNDINGS[rounding])
    return _call("index_scores", keys.shape[:1], jnp.float32, q, weight, keys, rounding=code)


def attend_cache(
    q: jax.Array, fresh: jax.Array, ring: tuple[Any, Any], entries: tuple[Any, Any, Any] | None,
    spans: tuple[Any, Any], rows: tuple[Any, Any, Any], selected: jax.Array, sink: jax.Array,
    window: int, scale: float,
) -> jax.Array:  # fmt: skip
    """`attend` of T rows over what a cache holds of their slots -> float32 [T, H, K].

    q [T, H, K]; fresh [T, K]: window vectors of this call; ring: (data [L, B, R, K], layer);
    entries: (data [sources, P, size, K], source, pages [B, G]) or None; spans: first row and first
    position of every slot's rows [B]; rows: slot, position and floor [T]; selected [T, S], -1:
    none. Data are float32 or uint16 bits of bfloat16.
    """
    data, layer = ring
    if entries is None:
        selected = jnp.zeros((q.shape[0], 0), jnp.int32)
        nothing = jnp.zeros((1, 1, 1, q.shape[2]), data.dtype)
        entries = nothing, 0, jnp.zeros((spans[0].shape[0], 1), jnp.int32)
    kv, source, pages = entries
    return _call(
        "attend_cache", q.shape, jnp.float32, q, fresh, data, jnp.asarray(layer, jnp.int32), kv,
        jnp.asarray(source, jnp.int32), pages, *spans, *rows, selected, sink,
        window=np.int64(window), scale=np.float32(scale),
    )  # fmt: skip


def index_cache(
    q: jax.Array, weight: jax.Array, entries: tuple[Any, Any, Any], slot: jax.Array,
    visible: jax.Array, ids: jax.Array, rounding: str,
) -> jax.Array:  # fmt: skip
    """`index_scores` of T rows for entries `ids` [T, N] of their slots -> float32 [T, N].

    q [T, H, K], weight [T, H] float32, entries as in `attend_cache`, slot and visible [T]. -inf
    where an id is negative or not below `visible`.
    """
    keys, source, pages = entries
    return _call(
        "index_cache", ids.shape, jnp.float32, q, weight, keys, jnp.asarray(source, jnp.int32),
        pages, slot, visible, ids, rounding=np.int64(_ROUNDINGS[rounding]),
    )  # fmt: skip


def best(x: jax.Array, k: int) -> jax.Array:
    """Columns [T, k] of the k largest of x [T, n], value and then lower column; -0 equals +0."""
    return _call("best", (x.shape[0], k), jnp.int32, x)
