"""Index scores of all rows over the packed keys of a cache, in one kernel.

A program scores some neighbouring entries of one row, tile by tile: it finds their pages, decodes
their keys and multiplies with all heads. A row's tiles behind its last visible entry are not read.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from deepinfer_jax.numerics.pallas import decoding, packed, scores


@dataclasses.dataclass(frozen=True)
class Walk:
    """tiles: of `scores.tile_keys` entries, how many a program takes at most; warps and stages of
    a program. None of them decides a bit.
    """

    tiles: int = 8
    warps: int = 4
    stages: int = 1


def _kernel(
    limit_ref, visible_ref, slot_ref, source_ref, q_ref, weight_ref, *refs, listed, rounding, walk,
    assembly,
):  # fmt: skip
    """Scores of `walk.tiles` tiles of entries of one row; -inf where nothing is to be seen."""
    *ids_ref, pages_ref, data_ref, out_ref = refs
    row, count = pl.program_id(0), out_ref.shape[1]
    tile = scores.tile_keys(q_ref.dtype)
    start = pl.program_id(1) * (walk.tiles * tile)
    size, per_slot = data_ref.shape[2], pages_ref.shape[1]
    q, weight = scores.load_heads(q_ref, weight_ref, row)
    keys = packed.Vectors(data_ref, "index", q_ref.shape[2], q_ref.dtype, assembly)
    source, slot, visible = source_ref[()], slot_ref[row], visible_ref[row]

    def store(first, value):
        inside = first + lax.iota(jnp.int32, tile) < count
        triton.store(out_ref.at[row, pl.ds(first, tile)], value, mask=inside)

    def score(i, carry):
        first = start + i * tile
        column = first + lax.iota(jnp.int32, tile)
        ids = column
        if listed:
            at = ids_ref[0].at[row, pl.ds(first, tile)]
            ids = triton.load(at, mask=column < count, other=-1)
        seen = (column < count) & (ids >= 0) & (ids < visible)
        safe = jnp.where(seen, jnp.minimum(ids, per_slot * size - 1), 0)
        value = keys.load((source, *packed.place(pages_ref, slot, safe, size, seen)), seen)
        store(first, jnp.where(seen, scores.head_sums(q, value, weight, rounding), -jnp.inf))
        return carry

    def skip(i, carry):
        store(start + i * tile, jnp.full((tile,), -jnp.inf, jnp.float32))
        return carry

    needed = jnp.clip(pl.cdiv(limit_ref[row] - start, tile), 0, walk.tiles)
    lax.fori_loop(0, needed, score, 0)
    lax.fori_loop(needed, walk.tiles, skip, 0)


def index_cache(
    q: jax.Array, weight: jax.Array, entries: tuple[Any, Any, Any], slot: jax.Array,
    visible: jax.Array, ids: jax.Array, rounding: str, interpret: bool, walk: Walk | None = None,
) -> jax.Array:  # fmt: skip
    """`scores.index_scores` of T rows for entries of their slots -> float32 [T, N].

    q [T, H, K]; weight [T, H]; entries: (data [sources, P, E, w], source, pages [B, G]), data
    packed (uint32 or uint8) or floats; slot and visible [T]; ids [T, N], or [N] for the entries
    from 0 to N - 1. -inf where an id is negative or not below `visible`.
    """
    data, source, pages = entries
    (t, _, _), count, listed = q.shape, ids.shape[-1], ids.ndim == 2
    limit = jnp.minimum(visible, count)
    if listed:  # the last column with anything to see, and one more
        seen, column = (ids >= 0) & (ids < visible[:, None]), jnp.arange(1, count + 1)
        limit = jnp.max(jnp.where(seen, column.astype(jnp.int32), 0), axis=1, initial=0)
    walk = Walk() if walk is None else walk
    block = walk.tiles * scores.tile_keys(q.dtype)
    kernel = functools.partial(
        _kernel, listed=listed, rounding=rounding, walk=walk, assembly=decoding.assembly(interpret)
    )
    return pl.pallas_call(
        kernel,
        grid=(t, pl.cdiv(count, block)),
        out_shape=jax.ShapeDtypeStruct((t, count), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=walk.warps, num_stages=walk.stages),
        interpret=interpret,
        name="index_cache",
    )(
        limit, visible, slot, jnp.asarray(source, jnp.int32), packed.turned(q, data),
        weight.astype(jnp.float32), *([ids] if listed else []), pages, data,
    )  # fmt: skip
