"""The indexer: which compressed entries each row attends to (docs/model.md 7.3, 7.4).

Selection is exact and total: higher score first, then lower position; a list of entries is always
given in ascending position. A selection carries no gradient: train the indexer on its scores.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.cache import Codec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import rope, sequences
from deepinfer_jax.model.attention import Entries, read_entries
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, Spans
from deepinfer_jax.tables import Rotation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexQuery:
    """heads [T, I, K] rotated and quantized, weights [T, I] per head."""

    heads: jax.Array
    weights: jax.Array


@dataclasses.dataclass(frozen=True)
class Field:
    """What is searched: entries of ratio m, stored by `codec`."""

    ratio: int
    codec: Codec


def index_query(
    p: Any, x: jax.Array, low: jax.Array, angle: Rotation, cfg: ModelConfig, numerics: Numerics
) -> IndexQuery:
    """Index queries from the low-rank query [T, Q] and head weights from x [T, D]."""
    heads = nx.linear(low, p["wq_b"], numerics, cfg.quantized)
    heads = heads.reshape(-1, cfg.index_n_heads, cfg.index_head_dim)
    heads = rope.rotated(heads, angle, False, numerics)
    if numerics.quantize_kv:
        heads = quant.qdq_index(heads)
    weights = nx.linear(x, p["weights_proj"], numerics).astype(jnp.float32)
    scale = np.float32(cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5)
    return IndexQuery(heads, nx.round_to(weights * scale, numerics.dtype))


def visible_entries(positions: jax.Array, ratio: int) -> jax.Array:
    """Entries a row may see: groups complete at its own position (docs/model.md 7.3)."""
    return (positions + 1) // ratio


def _score_row(row: Any, shared: Any, field: Field, numerics: Numerics) -> jax.Array:
    """Scores of one row for one block of entries `ids`; -inf where not visible."""
    heads, weights, slot, visible, ids = row
    entries, spans = shared
    keys = read_entries(entries, spans, slot, ids, field.ratio, field.codec, heads.dtype)
    score = nx.index_scores(heads, weights, keys, numerics)
    return jnp.where((ids >= 0) & (ids < visible), score, -jnp.inf)


def scores(
    query: IndexQuery, entries: Entries, ids: jax.Array, rows: Rows, spans: Spans, field: Field,
    numerics: Numerics, visible: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Index scores float32 [T, n] of entries `ids` [T, n], or [n]: those from 0 to n - 1.

    visible [T]: entries that each row may see, from the first; default by its position.

    In blocks of keys (`numerics.index_width`). With a cache only up to the last one that holds
    anything visible, so that a long capacity costs a short sequence little; without one they are
    differentiable.
    """
    if visible is None:
        visible = visible_entries(rows.positions, field.ratio)
    return _scores(query, entries, ids, visible, rows, spans, field, numerics)


@nx.by_name("field")
def _scores(
    query: IndexQuery, entries: Entries, ids: jax.Array, visible: jax.Array, rows: Rows,
    spans: Spans, field: Field, numerics: Numerics,
) -> jax.Array:  # fmt: skip
    slots = jnp.maximum(rows.slots, 0)
    if entries.pages is not None and nx.reads_cache(numerics, entries.data):
        stored = (entries.data, entries.source, entries.pages)
        heads, gain = query.heads, query.weights
        return nx.index_cache(heads, gain, stored, slots, visible, ids, numerics)
    return scores_in_blocks(query, entries, ids, visible, rows, spans, field, numerics)


def scores_in_blocks(
    query: IndexQuery, entries: Entries, ids: jax.Array, visible: jax.Array, rows: Rows,
    spans: Spans, field: Field, numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """`scores` through keys that stand decoded in memory, some at a time."""
    t, n, slots = rows.slots.shape[0], ids.shape[-1], jnp.maximum(rows.slots, 0)
    width = max(1, min(nx.index_width(t, numerics), n))
    ids = jnp.broadcast_to(ids, (t, n))
    blocks = -(-n // width)
    ids = jnp.pad(ids, ((0, 0), (0, blocks * width - n)), constant_values=-1)
    one = functools.partial(_score_row, field=field, numerics=numerics)

    def score(part: jax.Array) -> jax.Array:
        each = (query.heads, query.weights, slots, visible, part)
        return cast(jax.Array, nx.map_rows(one, each, (entries, spans), numerics))

    if blocks == 1:
        return score(ids)[:, :n]
    needed: Any = blocks
    if entries.pages is not None:
        seen = ((ids >= 0) & (ids < visible[:, None])).reshape(t, blocks, width).any((0, 2))
        needed = jnp.max(jnp.where(seen, jnp.arange(1, blocks + 1, dtype=jnp.int32), 0))
    parts = ids.reshape(t, blocks, width)
    nothing = jnp.full((t, blocks, width), -jnp.inf)
    found = lax.fori_loop(0, needed, lambda b, s: s.at[:, b].set(score(parts[:, b])), nothing)
    return found.reshape(t, -1)[:, :n]


def scores_of_sequences(
    query: IndexQuery, entries: Entries, ids: jax.Array, rows: Rows, field: Field, length: int,
    numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """`scores` for rows that are whole sequences of `length` tokens (`rows="dense"`)."""
    keys = sequences.entries_of(entries.data, length, field.ratio)
    score = sequences.index_scores(query, keys, length, numerics)
    seen = sequences.visible_mask(rows, keys.shape[1], field.ratio)
    score = jnp.where(seen, score, -jnp.inf)
    if ids.ndim == 1:
        return score[:, : ids.shape[0]]
    inside = (ids >= 0) & (ids < keys.shape[1])
    picked = jnp.take_along_axis(score, jnp.where(inside, ids, 0), axis=1)
    return jnp.where(inside, picked, -jnp.inf)


@nx.by_name("k")
def select(score: jax.Array, ids: jax.Array, k: int, numerics: Numerics) -> jax.Array:
    """The k best entries of each row: score [T, n], ids as in `scores` -> [T, k], -1 padded.

    `ids` ascend along n, so that the lower column of a tie is the lower position.
    """
    width = min(k, score.shape[1])
    picked = nx.chosen(score, None if ids.ndim == 1 else ids, width, numerics)
    return jnp.pad(picked, ((0, 0), (0, k - width)), constant_values=-1)


def candidate_width(cfg: ModelConfig, count: int) -> int:
    """Candidate blocks kept per row when a slot has at most `count` entries."""
    return min(cfg.candidate_topk_blocks, -(-count // cfg.candidate_block_size))


@nx.by_name("cfg")
def candidate_blocks(
    score: jax.Array, visible: jax.Array, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """The best blocks by their best member: score [T, n] -> [T, blocks], ascending, -1 padded.

    The newest visible entry's block is always kept; blocks with nothing visible never are
    (docs/model.md 7.4).
    """
    size = cfg.candidate_block_size
    t, n = score.shape
    blocks = -(-n // size)
    padded = jnp.pad(score, ((0, 0), (0, blocks * size - n)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(t, blocks, size), axis=2)
    return best_blocks(best, visible, n, cfg, numerics)


def best_blocks(
    best: jax.Array, visible: jax.Array, count: int, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """`candidate_blocks` from the best member of each block [T, blocks] of `count` entries."""
    size, blocks = cfg.candidate_block_size, best.shape[1]
    newest = (visible - 1) // size
    number = jnp.arange(blocks, dtype=jnp.int32)
    forced = (number[None, :] == newest[:, None]) & (visible > 0)[:, None]
    best = jnp.where(forced, jnp.inf, best)
    return nx.chosen(best, None, candidate_width(cfg, count), numerics)


def members(blocks: jax.Array, size: int) -> jax.Array:
    """Entries of candidate blocks [T, b] -> [T, b * size]; -1 where the block is -1."""
    offset = jnp.arange(size, dtype=jnp.int32)[None, None, :]
    ids = jnp.where(blocks[:, :, None] >= 0, blocks[:, :, None] * size + offset, -1)
    return ids.reshape(blocks.shape[0], -1)
