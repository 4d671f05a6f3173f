"""Global KV that is dealt to devices: searched where it lies, read by the owners of rows.

Inside `jax.shard_map` device r of C along the axis "context" has the entries e with e mod C = r of
every slot, e at the place e // C of a cache whose pages are a C-th as long (`Cache.ranks`). So what
a device holds looks like a cache of its own, with ids of its own; rows are shared too
(`mirror.Split`). Every device scores its entries for everybody's rows, and what it found best goes
to the row's owner, who chooses among all of it by the same total order; the chosen vectors come to
the owner as they are stored, who attends to them in ascending position. Nothing is added on the
way, so that all sums are those of one device (docs/parallel.md 5).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import numerics as nx
from deepinfer_jax.axes import CONTEXT
from deepinfer_jax.config import LayerKind, ModelConfig
from deepinfer_jax.mirror import Split
from deepinfer_jax.model import attention, index
from deepinfer_jax.model.attention import Entries, Reach, Ring
from deepinfer_jax.model.index import Field, IndexQuery
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, Spans, take_rows

ROWS_AT_ONCE = 64  # of a device whose vectors travel together: 512 of 288 bytes for each are 9 MB
_LAST = np.int32(2**31 - 1)


def place_of(entry: jax.Array, ranks: int) -> tuple[jax.Array, jax.Array]:
    """(where an entry lies on the device that has it, whether that is this one)."""
    return entry // ranks, entry % ranks == lax.axis_index(CONTEXT).astype(entry.dtype)


def held_before(entry: jax.Array, ranks: int) -> jax.Array:
    """How many of the entries below `entry` this device has."""
    return (entry - lax.axis_index(CONTEXT).astype(entry.dtype) + (ranks - 1)) // ranks


def own_members(blocks: jax.Array, size: int, ranks: int) -> jax.Array:
    """This device's places of the entries of blocks [T, b] of `size` -> [T, b * most], -1 padded
    within each block.
    """
    most = -(-size // ranks)
    first, end = held_before(blocks * size, ranks), held_before((blocks + 1) * size, ranks)
    place = first[:, :, None] + jnp.arange(most, dtype=jnp.int32)[None, None, :]
    there = (blocks[:, :, None] >= 0) & (place < end[:, :, None])
    return jnp.where(there, place, -1).reshape(blocks.shape[0], -1)


def select(
    query: IndexQuery, keys: Entries, candidates: jax.Array, whole: Rows, spans: Spans,
    split: Split, field: Field, kind: LayerKind, cfg: ModelConfig, numerics: Numerics,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(selected [n, k], candidates [n, b]) of this device's n rows, as `index` finds them in a
    whole cache; the candidates are new ones where this layer makes them.

    query, candidates: of the device's rows; keys: its entries; whole, spans: of the call.
    """
    assert keys.pages is not None
    ranks = split.ranks
    held = keys.pages.shape[1] * keys.data.shape[2]
    rows = take_rows(whole, jnp.asarray(split.everybody()))
    ids = jnp.arange(held, dtype=jnp.int32)
    if kind.uses_candidates:
        ids = own_members(split.shown(candidates), cfg.candidate_block_size, ranks)
    visible = index.visible_entries(rows.positions, field.ratio)
    score = index.scores(
        split.shown(query), keys, ids, rows, spans, field, numerics, held_before(visible, ranks)
    )
    selected = _best_of_all(score, ids, cfg.index_topk, split, numerics)
    if kind.candidate_source:
        best = _block_maxima(score, held * ranks, cfg.candidate_block_size, ranks)
        best = jnp.max(split.answered(best), axis=0)
        mine = lax.dynamic_index_in_dim(
            visible.reshape(ranks, -1), lax.axis_index(CONTEXT), keepdims=False
        )
        candidates = index.best_blocks(best, mine, held * ranks, cfg, numerics)
    return selected, candidates


def _best_of_all(
    score: jax.Array, ids: jax.Array, k: int, split: Split, numerics: Numerics
) -> jax.Array:
    """The k best entries of own rows, by id, from everybody's scores [C * n, m] of their places.

    The k best of all are among the k best of each, since both are chosen by score, then position.
    """
    ids, width = jnp.broadcast_to(ids, score.shape), min(k, score.shape[1])
    if width < score.shape[1]:
        score, column = nx.best(score, width, numerics)
        ids = jnp.take_along_axis(ids, column, axis=1)
    rank = lax.axis_index(CONTEXT).astype(jnp.int32)
    ids = jnp.where(score > -jnp.inf, ids * split.ranks + rank, _LAST)
    score, ids = jax.tree.map(_side_by_side, split.answered((score, ids)))
    # Ascending positions, so that the lower column of a tie is the lower position.
    ids, score = lax.sort((ids, score), dimension=1, num_keys=1)
    return index.select(score, ids, k, numerics)


def _side_by_side(found: jax.Array) -> jax.Array:
    """[C, n, m] -> [n, C * m]."""
    return jnp.moveaxis(found, 0, 1).reshape(found.shape[1], -1)


def _block_maxima(score: jax.Array, count: int, size: int, ranks: int) -> jax.Array:
    """The best of this device's members of each block: score [T, m] -> [T, blocks]."""
    blocks = -(-count // size)
    place = own_members(jnp.arange(blocks, dtype=jnp.int32)[None], size, ranks)[0]
    there = (place >= 0) & (place < score.shape[1])
    found = jnp.where(there[None], score[:, jnp.where(there, place, 0)], -jnp.inf)
    return jnp.max(found.reshape(score.shape[0], blocks, -1), axis=2)


def attend(
    q: jax.Array, new: jax.Array, ring: Ring | None, entries: Entries, selected: jax.Array,
    floor: jax.Array, sink: jax.Array, rows: Rows, spans: Spans, reach: Reach, numerics: Numerics,
    whole: Rows, split: Split,
) -> jax.Array:  # fmt: skip
    """`attention.attend` of this device's rows, with `entries` of which it has its share.

    whole: the rows of the call. Some rows after others, as many at a time on every device: their
    vectors stand in memory.
    """

    def some(part: Any) -> jax.Array:
        (q, selected, floor, rows), slots = part
        fetched = _fetched(entries, selected, slots.reshape(-1), split)
        return attention.attend(
            q, new, ring, None, selected, floor, sink, rows, spans, reach, numerics, fetched
        )

    each, count = (q, selected, floor, rows), q.shape[0]
    slots = take_rows(whole, jnp.asarray(split.everybody())).slots
    slots = jnp.maximum(slots, 0).reshape(split.ranks, count)  # everybody's
    if count <= ROWS_AT_ONCE:
        return some((each, slots))
    cut = functools.partial(_in_blocks, blocks=-(-count // ROWS_AT_ONCE))
    parts = jax.tree.map(cut, each), cut(slots.T).swapaxes(1, 2)
    return lax.map(some, parts).reshape(-1, *q.shape[1:])[:count]


def _in_blocks(x: jax.Array, blocks: int) -> jax.Array:
    spare = blocks * ROWS_AT_ONCE - x.shape[0]
    padded = jnp.pad(x, [(0, spare)] + [(0, 0)] * (x.ndim - 1))  # rows nobody looks at
    return padded.reshape(blocks, ROWS_AT_ONCE, *x.shape[1:])


def _fetched(entries: Entries, selected: jax.Array, slots: jax.Array, split: Split) -> jax.Array:
    """The entries [n, S] of own rows as they are stored, each from who has it; `slots` [C * n] are
    everybody's.
    """
    ids = split.shown(selected)
    found = attention.stored_entries(entries, slots[:, None], ids // split.ranks)
    owner = jnp.maximum(selected, 0) % split.ranks
    return jnp.take_along_axis(split.answered(found), owner[None, :, :, None], axis=0)[0]
