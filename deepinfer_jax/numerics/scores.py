"""Attention and index scores of one query row over its slots."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.numerics import stored
from deepinfer_jax.numerics.elements import finite_max, pin, round_to
from deepinfer_jax.numerics.pallas import attending, indexing
from deepinfer_jax.numerics.pallas import scores as kernels
from deepinfer_jax.numerics.products import contract, precision
from deepinfer_jax.numerics.settings import Numerics
from deepinfer_jax.numerics.sums import axis_sum, row_sum
from kernels_bridge import ffi

_KEYS_AT_ONCE, _MOST_KEYS = 1 << 19, 1 << 16


def attend(
    q: jax.Array, keys: jax.Array, mask: jax.Array, sink: jax.Array, scale: float,
    numerics: Numerics, window: int = 0,
) -> jax.Array:  # fmt: skip
    """Attention of one query row over its slots, with a sink (docs/model.md 7.5).

    window: how many slots come before those of entries: a kernel of a GPU walks them apart.

    q [H, K], keys [S, K] (keys and values are one vector), mask [S], sink [H] -> float32 [H, K].
    The slots are fixed in number and order; masked ones contribute exact zeros. Probabilities are
    rounded below the largest of all scores, on a GPU below that of a tile of a fixed size, so
    that no rounding depends on how many slots there are at once. No valid slot: zeros.
    """
    if numerics.uses_pallas or numerics.rows == "ffi":
        return cast(jax.Array, _attend_in_kernel(q, keys, mask, sink, scale, numerics, window))
    return _attend(q, keys, mask, sink, scale, numerics)


def _weights(q, keys, mask, scale):
    """exp(score - top) of every slot, zero in masked ones, [H, S], and `top` [H, 1]."""
    s = pin(contract(q, keys) * np.float32(scale))
    s = jnp.where(mask, s, -jnp.inf)
    top = finite_max(s, -1)
    return jnp.where(mask, jnp.exp(jnp.where(mask, s, 0) - top), 0), top


def _attend(q, keys, mask, sink, scale, numerics):
    p, top = _weights(q, keys, mask, scale)
    z = row_sum(p, numerics) + jnp.exp(sink - top[:, 0])
    value = lax.dot_general(
        round_to(p, keys.dtype), keys, (((1,), (0,)), ((), ())),
        precision=precision(keys), preferred_element_type=jnp.float32,
    )  # fmt: skip
    return value / z[:, None]


def attention_probabilities(
    q: jax.Array, keys: jax.Array, mask: jax.Array, sink: jax.Array, scale: float,
    numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """What `attend` gives every slot, and the sink last: float32 [H, S + 1], rows add up to 1.

    For looking on: in plain operations, whatever kernel attends.
    """
    p, top = _weights(q, keys, mask, scale)
    own = jnp.exp(sink - top[:, 0])
    z = row_sum(p, numerics) + own
    return jnp.concatenate([p / z[:, None], (own / z)[:, None]], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend_in_kernel(q, keys, mask, sink, scale, numerics, window):
    if numerics.rows == "ffi":
        return ffi.attend(q, keys, mask, sink, scale)
    return attending.attend(q, keys, mask, sink, scale, window, numerics.interpret)


def _attend_forward(q, keys, mask, sink, scale, numerics, window):
    return _attend_in_kernel(q, keys, mask, sink, scale, numerics, window), (q, keys, mask, sink)


def _attend_backward(scale, numerics, window, saved, g):
    q, keys, mask, sink = saved

    def ordinary(q, keys, sink):
        return _attend(q, keys, mask, sink, scale, numerics)

    _, pull = jax.vjp(ordinary, q, keys, sink)
    q_bar, keys_bar, sink_bar = pull(g)
    return q_bar, keys_bar, None, sink_bar


_attend_in_kernel.defvjp(_attend_forward, _attend_backward)


def attend_cache(
    q: jax.Array, fresh: jax.Array, ring: Any, entries: Any, spans: Any, rows: Any,
    selected: jax.Array, sink: jax.Array, window: int, scale: float, numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """`attend` of all rows at once over a cache, where `reads_cache`; no gradient.

    Arguments as in `kernels_bridge.ffi.attend_cache`; the bits are those of `attend` row by row.
    """
    given = q, fresh, ring, entries, spans, rows, selected, sink, window, scale
    if numerics.rows == "ffi":
        return ffi.attend_cache(*given)
    return attending.attend_cache(*given, numerics.interpret)


def index_cache(
    q: jax.Array, head_weight: jax.Array, entries: Any, slot: jax.Array, visible: jax.Array,
    ids: jax.Array, numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """`index_scores` of all rows at once over a cache, where `reads_cache`; no gradient.

    Arguments as in `kernels_bridge.ffi.index_cache`, ids [N] those from 0 to N - 1; the bits are
    those of `index_scores`.
    """
    weight, rounding = head_weight.astype(jnp.float32), _rounding(numerics)
    if numerics.rows == "ffi":
        return ffi.index_cache(q, weight, entries, slot, visible, ids, rounding)
    return indexing.index_cache(
        q, weight, entries, slot, visible, ids, rounding, numerics.interpret
    )


def reads_cache(numerics: Numerics, *data: jax.Array) -> bool:
    """Whether `index_cache` or `attend_cache` can be had for vectors that lie in `data`."""
    if numerics.uses_pallas:
        return not any(stored.out_of_reach(each.shape, each.dtype) for each in data)
    return numerics.rows == "ffi"


def store_in_place(
    rings: jax.Array, layer: Any, vectors: jax.Array, slot: jax.Array, place: jax.Array,
    before: jax.Array,
) -> jax.Array:  # fmt: skip
    """Vectors written into the rings when `before`, made of the rings as they were, is there:
    `rows="ffi"`, no gradient. Arguments as in `kernels_bridge.ffi.store`.
    """
    return ffi.store(rings, layer, vectors, slot, place, before)


def _rounding(numerics: Numerics) -> str:
    return "none" if numerics.dtype == "float32" else numerics.index_rounding


def index_width(count: int, numerics: Numerics) -> int:
    """Index keys scored at once for each of `count` rows; it decides no bit.

    Between blocks a GPU waits for the host, which asks whether there is more to do: there blocks
    are as long as their decoded keys take 128 MB, at most 65,536.
    """
    if not numerics.uses_pallas:
        return numerics.index_block
    return max(numerics.index_block, min(_MOST_KEYS, _KEYS_AT_ONCE // count))


def index_scores(
    q: jax.Array, head_weight: jax.Array, keys: jax.Array, numerics: Numerics
) -> jax.Array:
    """Index scores of one query row: sum over heads of relu(q.k) * weight (docs/model.md 7.3).

    q [H, K], head_weight [H], keys [N, K] -> float32 [N], holding bfloat16 values unless the
    numerics are float32.
    """
    weight = head_weight.astype(jnp.float32)
    if numerics.uses_pallas or numerics.rows == "ffi":
        return cast(jax.Array, _scores_in_kernel(q, weight, keys, numerics))
    return _index_scores(q, weight, keys, numerics)


def _index_scores(q, weight, keys, numerics):
    s = contract(q, keys)
    weight = weight[:, None]
    if numerics.dtype == "float32":
        return axis_sum(pin(jnp.maximum(s, 0) * weight), 0, numerics)
    if numerics.index_rounding == "reference":
        s = round_to(s, jnp.bfloat16).astype(jnp.float32)
        term = round_to(jnp.maximum(s, 0) * weight, jnp.bfloat16).astype(jnp.float32)
    else:
        term = pin(jnp.maximum(s, 0) * weight)
    return round_to(axis_sum(term, 0, numerics), jnp.bfloat16).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _scores_in_kernel(q, weight, keys, numerics):
    if numerics.rows == "ffi":
        return ffi.index_scores(q, weight, keys, _rounding(numerics))
    return kernels.index_scores(q, weight, keys, _rounding(numerics), numerics.interpret)


def _scores_forward(q, weight, keys, numerics):
    return _scores_in_kernel(q, weight, keys, numerics), (q, weight, keys)


def _scores_backward(numerics, saved, g):
    _, pull = jax.vjp(functools.partial(_index_scores, numerics=numerics), *saved)
    return pull(g)


_scores_in_kernel.defvjp(_scores_forward, _scores_backward)
