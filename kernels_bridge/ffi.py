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

Weight = jax.Array | tuple[jax.Array, Any]  # [N, K], or a stack [L, N, K] and the layer

__all__ = [
    "NoKernelsError",
    "activate",
    "attend",
    "attend_cache",
    "best",
    "expand",
    "experts",
    "index_cache",
    "index_scores",
    "load",
    "mix",
    "normed",
    "product",
    "rms_norm",
    "rotated",
    "route",
    "shared",
    "store",
]

_ROWS = handlers.Library(
    building.SOURCE,
    (
        "attend",
        "attend_cache",
        "index_scores",
        "index_cache",
        "best",
        "store",
    ),
)
_SUBLAYERS = handlers.Library(
    building.SUBLAYERS,
    (
        "product",
        "rms_norm",
        "rotated",
        "mix",
        "normed",
        "expand",
        "route",
        "experts",
        "activate",
        "shared",
    ),
)
MOST_STREAMS = 8  # of `mix` and `expand`
_OF_ONE_ROW = ("attend", "index_scores")
_ROUNDINGS = {"none": 0, "once": 1, "reference": 2}


def load() -> None:
    """Build the kernels if need be and register them, once in a process."""
    handlers.load(_ROWS)
    handlers.load(_SUBLAYERS)


def _call(name: str, shape: tuple[int, ...], dtype: Any, *operands: jax.Array, **attributes: Any):
    mapped = "broadcast_all" if name in _OF_ONE_ROW else None
    result = jax.ShapeDtypeStruct(shape, dtype)
    library = _ROWS if name in _ROWS.targets else _SUBLAYERS
    made = handlers.call(library, name, result, *operands, attributes=attributes, mapped=mapped)
    return cast(jax.Array, made)


def _stack(weight: Weight) -> tuple[jax.Array, jax.Array]:
    """A weight as a handler takes it: an array and the layer, where the array is of several."""
    w, layer = weight if isinstance(weight, tuple) else (weight, 0)
    return w, jnp.asarray(layer, jnp.int32)


def product(
    x: jax.Array, w: Weight, dtype: Any = jnp.float32, quantized: bool = False
) -> jax.Array:
    """x [T, G, K] times w [G * N, K], group by group -> `dtype` [T, G, N], rounded once.

    x and the weight bfloat16 or float32, not necessarily the same; the weight also uint16 bits of
    bfloat16. quantized: x goes through FP8 by groups of 32 first (`quant.qdq_fp8`).
    """
    (t, groups, _), (stack, layer) = x.shape, _stack(w)
    shape = t, groups, stack.shape[-2] // groups
    return _call("product", shape, dtype, x, stack, layer, quantized=np.int64(quantized))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: Any) -> jax.Array:
    """x [..., K] over its root mean square, times weight [K], rounded once to `dtype`."""
    return _call("rms_norm", x.shape, dtype, x, weight, eps=np.float32(eps))


def rotated(
    x: jax.Array, cos: jax.Array, sin: jax.Array, inverse: bool, dtype: Any
) -> jax.Array:  # fmt: skip
    """The last 2 R features of x [T, H, K], rounded to `dtype`, turned by cos, sin [T, R]."""
    return _call("rotated", x.shape, dtype, x, cos, sin, sign=np.float32(-1 if inverse else 1))


def mix(
    streams: jax.Array, fn: Weight, scale: jax.Array, base: jax.Array, turns: int, eps: float,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Streams [T, C, D], C <= 8, fn [C(2 + C), C * D], scale [3], base [C(2 + C)] -> float32 pre,
    post [T, C] and comb [T, C, C] of normalised streams.
    """
    (t, c, _), (stack, layer) = streams.shape, _stack(fn)
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((t, c), (t, c), (t, c, c))]
    attributes = {
        "turns": np.int64(turns), "eps": np.float32(eps), "norm_eps": np.float32(norm_eps),
    }  # fmt: skip
    return tuple(
        handlers.call(
            _SUBLAYERS, "mix", shapes, streams, stack, layer, scale, base, attributes=attributes
        )
    )


def normed(weight: jax.Array, pre: jax.Array, streams: jax.Array, eps: float) -> jax.Array:
    """The streams [T, C, D] weighted by pre [T, C], rounded, then `rms_norm` -> [T, D]."""
    t, _, d = streams.shape
    return _call("normed", (t, d), streams.dtype, weight, pre, streams, eps=np.float32(eps))


def expand(y: jax.Array, post: jax.Array, comb: jax.Array, streams: jax.Array) -> jax.Array:
    """post [T, C] * y [T, D] + comb [T, C source, C dest] applied to the streams [T, C, D]."""
    return _call("expand", streams.shape, streams.dtype, y, post, comb, streams)


def route(
    x: jax.Array, w: Weight, bias: jax.Array, other: jax.Array, choice: jax.Array, k: int,
    temperature: float, factor: float, normalised: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """x [T, D], weight [E, D]; bias [E] or, for rows where `choice` [T], other [E].

    Returns experts int32 and weights float32 [T, k], best first, and scores float32 [T, E].
    """
    (t, _), (stack, layer) = x.shape, _stack(w)
    shapes = [
        jax.ShapeDtypeStruct((t, k), jnp.int32),
        jax.ShapeDtypeStruct((t, k), jnp.float32),
        jax.ShapeDtypeStruct((t, stack.shape[-2]), jnp.float32),
    ]
    attributes = {
        "temperature": np.float32(temperature), "factor": np.float32(factor),
        "normalised": np.int64(normalised),
    }  # fmt: skip
    operands = x, stack, layer, bias, other, choice
    return tuple(handlers.call(_SUBLAYERS, "route", shapes, *operands, attributes=attributes))


def experts(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, stacks: tuple[jax.Array, ...],
    layer: jax.Array, limit: float, quantized: bool,
) -> jax.Array:  # fmt: skip
    """What the `chosen` [T, k] experts of rows x [T, D] give, times weights [T, k] before the down
    projection -> [T, k, D] of x's dtype; zeros of an expert that is none.

    stacks: gate, up [L, E, N, D] and down [L, E, D, N], of one dtype.
    """
    w1, w3, w2 = stacks
    return _call(
        "experts", (*chosen.shape, x.shape[1]), x.dtype, x, chosen, weights, w1, w3, w2,
        jnp.asarray(layer, jnp.int32), limit=np.float32(limit), quantized=np.int64(quantized),
    )  # fmt: skip


def activate(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up), both [M, N] of one dtype -> float32 [M, N]."""
    return _call("activate", gate.shape, jnp.float32, gate, up, limit=np.float32(limit))


def shared(
    x: jax.Array, weights: tuple[Weight, Weight, Weight], limit: float, quantized: bool
) -> jax.Array:
    """The expert with gate, up [N, D] and down [D, N] on every row of x [T, D] -> x's shape."""
    (w1, layer), (w3, _), (w2, _) = (_stack(each) for each in weights)
    return _call(
        "shared", x.shape, x.dtype, x, w1, w3, w2, layer,
        limit=np.float32(limit), quantized=np.int64(quantized),
    )  # fmt: skip


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

    q [T, H, K]; fresh [F, K]: window vectors of all rows of the call, of which q's may be some (of
    one of the devices that share them); ring: (data [L, B, R, K], layer);
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


def store(
    rings: jax.Array, layer: Any, vectors: jax.Array, slot: jax.Array, place: jax.Array,
    before: jax.Array,
) -> jax.Array:  # fmt: skip
    """`rings` [L, B, R, K] with vectors [T, K] at [layer, slot, place] (each [T]); a place outside
    is dropped. The memory is that of `rings`, which are overwritten only when `before` is there:
    what reads them as they were must be what makes it.
    """
    result = jax.ShapeDtypeStruct(rings.shape, rings.dtype)
    operands = rings, jnp.asarray(layer, jnp.int32), vectors, slot, place, before
    return cast(jax.Array, handlers.call(_ROWS, "store", result, *operands, aliases={0: 0}))


def index_cache(
    q: jax.Array, weight: jax.Array, entries: tuple[Any, Any, Any], slot: jax.Array,
    visible: jax.Array, ids: jax.Array, rounding: str,
) -> jax.Array:  # fmt: skip
    """`index_scores` of T rows for entries `ids` of their slots, [T, N], or [N] ascending of all
    rows -> float32 [T, N].

    q [T, H, K], weight [T, H] float32, entries as in `attend_cache`, slot and visible [T]. -inf
    where an id is negative or not below `visible`.
    """
    keys, source, pages = entries
    return _call(
        "index_cache", (q.shape[0], ids.shape[-1]), jnp.float32, q, weight, keys,
        jnp.asarray(source, jnp.int32), pages, slot, visible, ids,
        rounding=np.int64(_ROUNDINGS[rounding]),
    )  # fmt: skip


def best(x: jax.Array, k: int) -> jax.Array:
    """Columns [T, k] of the k largest of x [T, n], value and then lower column; -0 equals +0."""
    return _call("best", (x.shape[0], k), jnp.int32, x)
