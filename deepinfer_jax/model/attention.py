"""CSA2 attention: queries, window KV, sparse attention over window and selected entries, output.

docs/model.md 7. Every query attends over a fixed number of slots in ascending position: the window
right-aligned, then the selected compressed entries; empty slots are masked and add exact zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.cache import Codec, ring_targets
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import rope, sequences
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, Spans, row_of
from deepinfer_jax.tables import Rotation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Query:
    """low [T, Q] is also the indexer's input; heads [T, H, Hd] are rotated."""

    low: jax.Array
    heads: jax.Array


def query(p: Any, x: jax.Array, angle: Rotation, cfg: ModelConfig, numerics: Numerics) -> Query:
    """Queries of x [T, D] (docs/model.md 7.1)."""
    quantized = cfg.quantized
    low = nx.linear(x, p["wq_a"], numerics, quantized)
    low = nx.rms_norm(low, p["q_norm"], cfg.rms_norm_eps, numerics)
    heads = nx.linear(low, p["wq_b"], numerics, quantized)
    heads = heads.reshape(-1, cfg.num_attention_heads, cfg.head_dim)
    return Query(low, rope.rotated(heads, angle, False, numerics))


def window_kv(
    p: Any, x: jax.Array, angle: Rotation, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """The window vector, key and value at once, of x [T, D] -> [T, Hd] (docs/model.md 7.1)."""
    k = nx.linear(x, p["wkv"], numerics, cfg.quantized)
    k = nx.rms_norm(k, p["kv_norm"], cfg.rms_norm_eps, numerics)
    k = rope.rotated(k, angle, False, numerics)
    return quant.qdq_fp8(k) if numerics.quantize_kv else k


def output(
    p: Any, o: jax.Array, angle: Rotation, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """Attention output o [T, H, Hd] rotated back and projected by groups (docs/model.md 7.5)."""
    o = rope.rotated(nx.round_to(o, numerics.dtype), angle, True, numerics)
    low = nx.group_dot(o.reshape(o.shape[0], cfg.o_groups, -1), p["wo_a"], numerics)
    low = nx.round_to(low, numerics.dtype).reshape(o.shape[0], -1)
    return nx.linear(low, p["wo_b"], numerics, cfg.quantized)


# -- where keys come from --------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
    """The window rings of all layers [L, B, R, w] and the layer in question."""

    data: jax.Array
    layer: Any


def window_keys(
    new: jax.Array,
    ring: Ring | None,
    spans: Spans,
    slot: jax.Array,
    wanted: jax.Array,
    codec: Codec,
) -> jax.Array:
    """Window vectors of one slot at positions `wanted` [n] -> [n, Hd].

    Rows of this call come from `new` [T, Hd], older positions from the ring as it was before it.
    """
    inside, row = row_of(spans, slot, wanted)
    keys = new[row]
    if ring is None:
        return keys
    size = ring.data.shape[2]
    old = codec.load(ring.data[ring.layer, slot, wanted % size], new.dtype)
    return jnp.where(inside[:, None], keys, old)


@nx.by_name("codec")
def store_window(
    ring: Ring, new: jax.Array, rows: Rows, spans: Spans, codec: Codec, numerics: Numerics,
    before: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Write the rows' window vectors [T, Hd] into their ring places; returns the ring data.

    before: what was made of the ring as it was, so that a kernel can overwrite it in its place.
    """
    slot, place = ring_targets(rows, spans, ring.data.shape[2])
    if numerics.rows == "ffi" and before is not None:
        return nx.store_in_place(ring.data, ring.layer, codec.store(new), slot, place, before)
    return ring.data.at[ring.layer, slot, place].set(codec.store(new), mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """Compressed vectors of one kv source, stored or made by this call.

    Stored: data [sources, P, E/m, w] with `source` the index and `pages` [B, G] those of the slots.
    Of this call (no cache): data [T, width], the entry of a group standing at the row of its last
    token, `source` and `pages` None.
    """

    data: jax.Array
    source: Any
    pages: jax.Array | None


def read_entries(
    entries: Entries, spans: Spans, slot: jax.Array, ids: jax.Array, ratio: int, codec: Codec,
    dtype: Any,
) -> jax.Array:  # fmt: skip
    """Entries `ids` [n] of one slot -> [n, width]; ids out of range give arbitrary vectors."""
    if entries.pages is None:
        row = spans.first[slot] + (ids + 1) * ratio - 1 - spans.start[slot]
        return entries.data[jnp.clip(row, 0, entries.data.shape[0] - 1)]
    return codec.load(stored_entries(entries, slot, ids), dtype)


def stored_entries(entries: Entries, slot: jax.Array, ids: jax.Array) -> jax.Array:
    """Entries `ids` of a cache as it holds them: [..., w] for slots and ids that fit together; ids
    out of range give arbitrary ones.
    """
    assert entries.pages is not None
    size = entries.data.shape[2]
    safe = jnp.clip(ids, 0, entries.pages.shape[1] * size - 1)
    page = jnp.maximum(entries.pages[slot, safe // size], 0)
    return entries.data[entries.source, page, safe % size]


# -- attention -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reach:
    """Static facts of one layer's attention.

    `length`: most rows of a slot; read by `rows="dense"` only, which has no cache.
    """

    window: int
    ratio: int
    window_codec: Codec
    main_codec: Codec
    scale: float
    length: int = 0


def _keys_of_row(row: Any, shared: Any, reach: Reach) -> tuple[jax.Array, jax.Array]:
    """What one query row sees, in position order: keys [W + S, Hd] and mask [W + S],
    without entries [W].
    """
    _, slot, position, floor, selected, fetched = row
    new, ring, entries, spans, _ = shared
    wanted = position - reach.window + 1 + jnp.arange(reach.window, dtype=jnp.int32)
    mask = wanted >= jnp.maximum(floor, 0)
    keys = window_keys(new, ring, spans, slot, jnp.maximum(wanted, 0), reach.window_codec)
    if fetched is not None:
        keys = jnp.concatenate([keys, reach.main_codec.load(fetched, new.dtype)])
        mask = jnp.concatenate([mask, selected >= 0])
    elif entries is not None:
        picked = read_entries(
            entries, spans, slot, selected, reach.ratio, reach.main_codec, new.dtype
        )
        keys = jnp.concatenate([keys, picked])
        mask = jnp.concatenate([mask, selected >= 0])
    # Masked slots are zeroed: an uninitialised vector must not turn 0 x NaN into NaN.
    return jnp.where(mask[:, None], keys, 0), mask


def attend_row(row: Any, shared: Any, reach: Reach, numerics: Numerics) -> jax.Array:
    """One query row: gather its keys and attend."""
    keys, mask = _keys_of_row(row, shared, reach)
    return nx.attend(row[0], keys, mask, shared[-1], reach.scale, numerics, reach.window)


@nx.by_name("reach")
def attend(
    q: jax.Array, new: jax.Array, ring: Ring | None, entries: Entries | None, selected: jax.Array,
    floor: jax.Array, sink: jax.Array, rows: Rows, spans: Spans, reach: Reach, numerics: Numerics,
    fetched: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Sparse attention of all rows: q [T, H, Hd] -> float32 [T, H, Hd] (docs/model.md 7.5).

    selected [T, S] entry ids ascending, -1 padded; floor [T]: the first window position a row may
    see (a position beyond the row's own leaves its window empty, as padding rows need). fetched
    [T, S, w]: the selected entries as they are stored, where `entries` is None because they lie
    elsewhere.
    """
    if numerics.rows == "dense":
        return _attend_sequences(q, new, entries, selected, floor, sink, reach)
    slot = jnp.maximum(rows.slots, 0)
    data = [] if entries is None else [entries.data]
    if ring is not None and fetched is None and nx.reads_cache(numerics, ring.data, *data):
        at = (spans.first, spans.start)
        where = None if entries is None else (entries.data, entries.source, entries.pages)
        return nx.attend_cache(
            q, new, (ring.data, ring.layer), where, at, (slot, rows.positions, floor), selected,
            sink, reach.window, reach.scale, numerics,
        )  # fmt: skip
    each = (q, slot, rows.positions, floor, selected, fetched)
    f = functools.partial(attend_row, reach=reach, numerics=numerics)
    return nx.map_rows(f, each, (new, ring, entries, spans, sink), numerics)


def _probabilities_of_row(row: Any, shared: Any, reach: Reach, numerics: Numerics) -> jax.Array:
    keys, mask = _keys_of_row(row, shared, reach)
    return nx.attention_probabilities(row[0], keys, mask, shared[-1], reach.scale, numerics)


def probabilities(
    q: jax.Array, new: jax.Array, ring: Ring | None, entries: Entries | None, selected: jax.Array,
    floor: jax.Array, sink: jax.Array, rows: Rows, spans: Spans, reach: Reach, numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """What `attend` gives each slot, and the sink last: float32 [T, H, W + S + 1].

    Slots of entries are 0 in a layer without global KV. For looking on: computed row by row in
    plain operations, whatever kernel attends.
    """
    each = (q, jnp.maximum(rows.slots, 0), rows.positions, floor, selected, None)
    f = functools.partial(_probabilities_of_row, reach=reach, numerics=numerics)
    p = nx.map_rows(f, each, (new, ring, entries, spans, sink), numerics)
    if entries is not None:
        return p
    window = reach.window
    gap = jnp.zeros((*p.shape[:2], selected.shape[1]), p.dtype)
    return jnp.concatenate([p[..., :window], gap, p[..., window:]], axis=2)


def window_bounds(positions: jax.Array, floor: jax.Array, reach: Reach) -> jax.Array:
    """First and last position in the window of rows [T] -> [T, 2] int32; first > last: empty."""
    first = jnp.maximum(positions - reach.window + 1, jnp.maximum(floor, 0))
    return jnp.stack([first, positions], axis=1)


def _attend_sequences(
    q: jax.Array, new: jax.Array, entries: Entries | None, selected: jax.Array, floor: jax.Array,
    sink: jax.Array, reach: Reach,
) -> jax.Array:  # fmt: skip
    far, mask = None, None
    if entries is not None:
        far = sequences.entries_of(entries.data, reach.length, reach.ratio)
        mask = sequences.selected_mask(selected, far.shape[1])
    keys = sequences.make_keys(new, far, mask, floor, reach.length, reach.window)
    return sequences.attend(q, keys, sink, reach.scale)[0]
