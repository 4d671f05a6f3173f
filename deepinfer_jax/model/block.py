"""One backbone block: Engram, tap, compressed KV, attention, MoE (docs/model.md 4.1, 4.2).

`Call` is what all blocks of one forward share, `Stream` what flows through them. A block is `enter`
(everything that needs all rows) followed by `attention_part` and `moe_part`; between the two a
prefill may drop rows at the decoder boundary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import cache as caches
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import LayerKind, ModelConfig
from deepinfer_jax.model import attention, compress, engram, hyper, index, moe
from deepinfer_jax.model.attention import Entries, Reach, Ring
from deepinfer_jax.model.program import ordinals
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import FAR, Rows, Spans
from deepinfer_jax.tables import Rotation, Tables


@dataclasses.dataclass(frozen=True)
class Call:
    """What every block of one forward reads. Arrays here are read, never changed.

    lookback [T, max_ngram]: compressed ids for the Engram hashes. floor and decoder_floor [T]: the
    first window position a row may see in encoder and decoder layers (FAR for padding). length:
    most rows of one slot where there is no cache; nothing reads it where there is one. origin [T]:
    row numbers of the forward's own rows, or None.
    """

    params: Any
    tables: Tables
    rows: Rows
    spans: Spans
    base: Rotation
    yarn: Rotation
    lookback: jax.Array
    floor: jax.Array
    decoder_floor: jax.Array
    length: int
    origin: jax.Array | None
    cfg: ModelConfig
    numerics: Numerics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """What flows from block to block.

    x [T, C, D] residual streams; pre [T, C] collapse weights of the next sub-layer; selected [T, S]
    and candidates [T, b]: newest index lists; taps [n, T, D]; routed [L, T, k]; latest: this call's
    newest compressed KV and index keys ([T, Hd], [T, K]) where there is no cache.
    """

    x: jax.Array
    pre: jax.Array
    selected: jax.Array
    candidates: jax.Array
    taps: jax.Array
    routed: jax.Array
    latest: tuple[jax.Array, jax.Array] | None
    cache: Cache | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Record:
    """What one block did, for inspection.

    entered [T, C, D]: streams after Engram; normed [T, D]: the attention sub-layer's input;
    attention and moe [T, D]: the sub-layers' outputs before they are written back; route: the
    experts and their weights.
    """

    entered: jax.Array
    normed: jax.Array
    attention: jax.Array
    moe: jax.Array
    route: moe.Route


def at_layer(tree: Any, layer: Any) -> Any:
    """One layer of a stacked tree; `layer` may be traced."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, layer, 0, keepdims=False), tree)


def _ordinal(table: Any, layer: Any) -> Any:
    return int(table[layer]) if isinstance(layer, int) else jnp.asarray(table)[layer]


def block_params(stack: Any, layer: Any) -> Any:
    """A layer's parameters without its routed experts, which stay one stack."""
    rest = {name: value for name, value in stack.items() if name != "ffn"}
    rest["ffn"] = {name: v for name, v in stack["ffn"].items() if name != "experts"}
    return at_layer(rest, layer)


def entry_count(call: Call, cache: Cache | None, ratio: int) -> int:
    """Most compressed entries that one slot can hold."""
    if cache is not None:
        return cache.pages.shape[1] * cache.kv[call.cfg.ratios.index(ratio)].shape[2]
    return max(call.length // ratio, 1)


def _angle(call: Call, kind: LayerKind) -> Rotation:
    return call.yarn if kind.ratio else call.base


# -- entering a block ------------------------------------------------------------------------------


def enter(call: Call, kind: LayerKind, layer: Any, s: Stream) -> Stream:
    """Engram write, DSpark tap and compressed KV: the parts that see every row of the call."""
    if kind.engram is not None:
        s = dataclasses.replace(s, x=_write_engram(call, kind.engram, s.x))
    if kind.tap:
        mean = hyper.stream_mean(s.x, call.numerics)
        place = _ordinal(ordinals(call.cfg).tap, layer)
        s = dataclasses.replace(s, taps=s.taps.at[place].set(mean))
    if kind.kv_source:
        with jax.named_scope("compress"):
            s = _publish(call, kind, layer, s)
    return s


def _write_engram(call: Call, ordinal: int, x: jax.Array) -> jax.Array:
    with jax.named_scope("engram"):
        index_rows = engram_rows(call, ordinal)
        p = call.params["engram"][ordinal]
        return engram.write(p, index_rows, x, call.rows.image, call.cfg, call.numerics)


def engram_rows(call: Call, ordinal: int) -> jax.Array:
    """Table rows [T, columns] that the ordinal-th Engram layer reads for each row."""
    pad = call.tables.token_map[call.cfg.engram_pad_token_id]
    return engram.table_rows(call.lookback, pad, engram.hash_constants(call.cfg)[ordinal])


def _publish(call: Call, kind: LayerKind, layer: Any, s: Stream) -> Stream:
    """Make this source's new entries from the block's attention input and store them."""
    cfg, numerics, rows = call.cfg, call.numerics, call.rows
    norm = at_layer(call.params["layers"]["attn_norm"], layer)
    x = hyper.normed(norm, s.pre, s.x, cfg, numerics)
    places = ordinals(cfg)
    source = _ordinal(places.source, layer)
    p = {name: at_layer(call.params["compressor"][name], source) for name in ("wkv", "norm")}
    cache, pooled, old = s.cache, None, None
    if kind.ratio > 1:
        pooled = _ordinal(places.pooled, layer)
        p["wgate"] = at_layer(call.params["compressor"]["wgate"], pooled)
        old = None if cache is None else cache.pending[pooled]
    lat, pair = compress.latents(p, x, kind.ratio, old, rows, call.spans, cfg, numerics)
    if pair is not None:
        cache = _store_pending(cache, pooled, pair, rows, call.spans)
    angle = compress.entry_angle(call.tables, rows, kind.ratio)
    keys = {n: at_layer(call.params["indexer"][n], source) for n in ("wk", "k_norm")}
    key = lax.stop_gradient(compress.index_key(keys, lat, angle, cfg, numerics))
    if cache is None:
        return dataclasses.replace(s, latest=(compress.main_vector(lat, angle, numerics), key))
    # The codec quantizes. It must see what `main_vector` sees, not its result: where a group's
    # largest element was rounded down, a second scale could come out smaller and clip the group.
    kv = compress.rotated(lat, angle)
    stored = _ordinal(places.stored, layer)
    return dataclasses.replace(s, cache=_store_entries(call, cache, kind.ratio, stored, kv, key))


def _store_pending(
    cache: Cache | None, pooled: Any, pair: jax.Array, rows: Rows, spans: Spans
) -> Cache | None:
    if cache is None:
        return None
    slot, place = caches.ring_targets(rows, spans, cache.pending.shape[2])
    pending = cache.pending.at[pooled, slot, place].set(pair, mode="drop")
    return dataclasses.replace(cache, pending=pending)


def _store_entries(
    call: Call, cache: Cache, ratio: int, stored: Any, kv: jax.Array, key: jax.Array
) -> Cache:
    """Write the entries that the rows complete; other rows, and those without page, do not."""
    rows, cfg = call.rows, call.cfg
    which = cfg.ratios.index(ratio)
    _, count, size, _ = cache.kv[which].shape
    entry = rows.positions // ratio
    page = cache.pages.at[rows.slots, entry // size].get(mode="fill", fill_value=-1)
    complete = rows.real & ((rows.positions + 1) % ratio == 0)
    page = jnp.where(complete & (page >= 0), page, count)

    def put(stacks: tuple[jax.Array, ...], value: jax.Array) -> tuple[jax.Array, ...]:
        new = stacks[which].at[stored, page, entry % size].set(value, mode="drop")
        return (*stacks[:which], new, *stacks[which + 1 :])

    main = caches.main_codec(cfg, call.numerics).store(kv)
    keys = caches.index_codec(cfg, call.numerics).store(key)
    return dataclasses.replace(cache, kv=put(cache.kv, main), keys=put(cache.keys, keys))


# -- attention -------------------------------------------------------------------------------------


def _entries(call: Call, kind: LayerKind, layer: Any, s: Stream) -> tuple[Entries, Entries]:
    """The compressed KV and index keys that this layer reads."""
    if s.cache is None:
        kv, key = s.latest  # pyright: ignore[reportGeneralTypeIssues]
        return Entries(kv, None, None), Entries(key, None, None)
    which = call.cfg.ratios.index(kind.ratio)
    stored = _ordinal(ordinals(call.cfg).stored, layer)
    pages = s.cache.pages
    return (
        Entries(s.cache.kv[which], stored, pages),
        Entries(s.cache.keys[which], stored, pages),
    )


def _select(
    call: Call, kind: LayerKind, layer: Any, s: Stream, x: jax.Array, low: jax.Array,
    keys: Entries,
) -> Stream:  # fmt: skip
    """Choose the entries that this and the following layers attend to."""
    cfg, numerics = call.cfg, call.numerics
    place = _ordinal(ordinals(cfg).indexer, layer)
    p = {n: at_layer(call.params["indexer"][n], place) for n in ("wq_b", "weights_proj")}
    query = index.index_query(p, x, low, _angle(call, kind), cfg, numerics)
    count = entry_count(call, s.cache, kind.ratio)
    field = index.Field(kind.ratio, caches.index_codec(cfg, numerics))
    if kind.uses_candidates:
        ids = index.members(s.candidates, cfg.candidate_block_size)
    else:
        ids = jnp.arange(count, dtype=jnp.int32)
    query = lax.stop_gradient(query)
    if numerics.rows == "dense":
        score = index.scores_of_sequences(query, keys, ids, call.rows, field, call.length, numerics)
    else:
        score = index.scores(query, keys, ids, call.rows, call.spans, field, numerics)
    s = dataclasses.replace(s, selected=index.select(score, ids, cfg.index_topk, numerics))
    if kind.candidate_source:
        visible = index.visible_entries(call.rows.positions, kind.ratio)
        s = dataclasses.replace(s, candidates=index.candidate_blocks(score, visible, cfg, numerics))
    return s


def attention_part(
    call: Call, kind: LayerKind, layer: Any, p: Any, s: Stream
) -> tuple[Stream, jax.Array, jax.Array]:
    """The attention sub-layer; returns the stream, the sub-layer's input and its output [T, D]."""
    cfg, numerics = call.cfg, call.numerics
    angle = _angle(call, kind)
    mixed = hyper.mix(p["hc_attn"], s.x, cfg, numerics)
    x = hyper.normed(p["attn_norm"], s.pre, s.x, cfg, numerics)
    q = attention.query(p["attn"], x, angle, cfg, numerics)
    k = attention.window_kv(p["attn"], x, angle, cfg, numerics)
    entries = None
    if kind.ratio:
        entries, keys = _entries(call, kind, layer, s)
        if kind.index_source:
            with jax.named_scope("index"):
                s = _select(call, kind, layer, s, x, q.low, keys)
    o, cache = _sparse_attention(call, kind, layer, p, q.heads, k, entries, s)
    y = attention.output(p["attn"], o, angle, cfg, numerics)
    streams = hyper.expand(y, mixed, s.x, numerics)
    return dataclasses.replace(s, x=streams, pre=mixed.pre, cache=cache), x, y


def _sparse_attention(
    call: Call, kind: LayerKind, layer: Any, p: Any, q: jax.Array, k: jax.Array,
    entries: Entries | None, s: Stream,
) -> tuple[jax.Array, Cache | None]:  # fmt: skip
    """Attend over the window as it was and this call's rows, then write the rows to the ring."""
    cfg, numerics, cache = call.cfg, call.numerics, s.cache
    window = caches.window_codec(cfg, numerics)
    reach = Reach(
        cfg.sliding_window, kind.ratio, window, caches.main_codec(cfg, numerics),
        cfg.head_dim**-0.5, call.length,
    )  # fmt: skip
    floor = call.decoder_floor if kind.decoder else call.floor
    ring = None if cache is None else Ring(cache.window, layer)
    sink = p["attn"]["attn_sink"].astype(jnp.float32)
    o = attention.attend(
        q, k, ring, entries, s.selected, floor, sink, call.rows, call.spans, reach, numerics
    )
    if cache is None:
        return o, None
    # The ring is read before it is overwritten: without the barrier a compiler would copy it.
    data, o = lax.optimization_barrier((cache.window, o))
    data = attention.store_window(Ring(data, layer), k, call.rows, call.spans, window)
    return o, dataclasses.replace(cache, window=data)


# -- mixture of experts ----------------------------------------------------------------------------


def moe_sublayer(
    p: Any, stacks: Any, layer: Any, x: jax.Array, pre: jax.Array, rows: Rows, active: int,
    cfg: ModelConfig, numerics: Numerics,
) -> tuple[jax.Array, jax.Array, jax.Array, moe.Route]:  # fmt: skip
    """The MoE sub-layer of any block, backbone or draft, on streams x [T, C, D].

    Returns (streams, collapse weights of the next sub-layer, the sub-layer's output [T, D], route).
    """
    mixed = hyper.mix(p["hc_ffn"], x, cfg, numerics)
    h = hyper.normed(p["ffn_norm"], pre, x, cfg, numerics)
    y, route = moe.moe(p["ffn"], stacks, layer, h, rows, active, cfg, numerics)
    return hyper.expand(y, mixed, x, numerics), mixed.pre, y, route


def moe_part(call: Call, layer: Any, p: Any, s: Stream) -> tuple[Stream, jax.Array, moe.Route]:
    """The MoE sub-layer; returns the stream, the sub-layer's output [T, D] and the routing."""
    stacks = call.params["layers"]["ffn"]["experts"]
    x, pre, y, route = moe_sublayer(
        p, stacks, layer, s.x, s.pre, call.rows, call.cfg.num_experts_per_tok, call.cfg,
        call.numerics,
    )  # fmt: skip
    if call.origin is None:
        routed = s.routed.at[layer].set(route.experts)
    else:
        routed = s.routed.at[layer, call.origin].set(route.experts, mode="drop")
    return dataclasses.replace(s, x=x, pre=pre, routed=routed), y, route


def block(call: Call, kind: LayerKind, layer: Any, s: Stream) -> tuple[Stream, Record]:
    """A whole block; a caller that ignores the record pays nothing for it."""
    with jax.named_scope(kind.role):
        s = enter(call, kind, layer, s)
        return after_enter(call, kind, layer, s)


def after_enter(call: Call, kind: LayerKind, layer: Any, s: Stream) -> tuple[Stream, Record]:
    """The two sub-layers of a block that has been entered."""
    p = block_params(call.params["layers"], layer)
    entered = s.x
    with jax.named_scope("attention"):
        s, normed, attention_y = attention_part(call, kind, layer, p, s)
    with jax.named_scope("moe"):
        s, moe_y, route = moe_part(call, layer, p, s)
    return s, Record(entered, normed, attention_y, moe_y, route)


def padding_floor(rows: Rows, floor: jax.Array) -> jax.Array:
    """`floor` [T], with FAR at padding rows so that they see nothing."""
    return jnp.where(rows.real, floor, FAR)
