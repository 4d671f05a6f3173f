"""One backbone block: Engram, tap, compressed KV, attention, MoE (docs/model.md 4.1, 4.2).

`Call` is what all blocks of one forward share, `Stream` what flows through them. A block is `enter`
(everything that needs all rows) followed by `attention_part` and `moe_part`; behind `enter` a
prefill may drop rows at the decoder boundary. `looped` runs the parts of these itself:
`write_engram` and `publish`, then `ask`, `look` and `answer`, then `moe_part`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import cache as caches
from deepinfer_jax import numerics as nx
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import LayerKind, ModelConfig
from deepinfer_jax.mirror import Split
from deepinfer_jax.model import attention, capture, compress, dealt, engram, hyper, index, moe
from deepinfer_jax.model.attention import Entries, Reach, Ring
from deepinfer_jax.model.capture import Captured
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
    row numbers of the forward's own rows, or None. split: how the rows of a call are shared by
    devices, or None; then `rows`, and all that has an entry for each of them, are this device's,
    `whole` are those of all devices in order, which `spans` tells of.
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
    whole: Rows
    split: Split | None
    cfg: ModelConfig
    numerics: Numerics

    def gathered(self, x: jax.Array) -> jax.Array:
        """x of this device's rows, of all rows."""
        return x if self.split is None else self.split.gathered(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """What flows from block to block.

    x [T, C, D] residual streams; pre [T, C] collapse weights of the next sub-layer; selected [T, S]
    and candidates [T, b]: newest index lists; taps [n, T, D]; routed [L, T, k]; latest: this call's
    newest compressed KV and index keys ([T, Hd], [T, K]) where there is no cache. seen: what has
    been captured so far, where something is.
    """

    x: jax.Array
    pre: jax.Array
    selected: jax.Array
    candidates: jax.Array
    taps: jax.Array
    routed: jax.Array
    latest: tuple[jax.Array, jax.Array] | None
    cache: Cache | None
    seen: Captured | None = None


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


def _ordinal(table: Any, layer: Any) -> Any:
    return int(table[layer]) if isinstance(layer, int) else jnp.asarray(table)[layer]


def block_params(stack: Any, layer: Any, numerics: Numerics) -> Any:
    """A layer's parameters without its routed experts, which stay one stack."""
    rest = {name: value for name, value in stack.items() if name != "ffn"}
    rest["ffn"] = {name: v for name, v in stack["ffn"].items() if name != "experts"}
    return nx.at_layer(rest, layer, numerics)


def entry_count(call: Call, cache: Cache | None, ratio: int) -> int:
    """Most compressed entries that one slot can hold."""
    if cache is not None:
        size = cache.kv[call.cfg.ratios.index(ratio)].shape[2]
        return cache.pages.shape[1] * size * cache.ranks
    return max(call.length // ratio, 1)


def _angle(call: Call, kind: LayerKind) -> Rotation:
    return call.yarn if kind.ratio else call.base


def _keep(call: Call, layer: Any, s: Stream, **values: Callable[[], Any]) -> Stream:
    """Offer values of this layer by name; those that were asked for stay in `s.seen`."""
    if s.seen is None:
        return s
    count = call.cfg.num_hidden_layers
    return dataclasses.replace(s, seen=capture.keep(s.seen, layer, count, call.origin, values))


# -- entering a block ------------------------------------------------------------------------------


def enter(call: Call, kind: LayerKind, layer: Any, s: Stream) -> Stream:
    """Engram write, DSpark tap and compressed KV: the parts that see every row of the call."""
    if kind.engram is not None:
        s = write_engram(call, kind.engram, layer, s)
    if kind.tap:
        mean = hyper.stream_mean(s.x, call.numerics)
        place = _ordinal(ordinals(call.cfg).tap, layer)
        s = dataclasses.replace(s, taps=s.taps.at[place].set(mean))
    if kind.kv_source:
        with jax.named_scope("compress"):
            s = _stored(call, kind, layer, s, publish(call, kind, layer, s))
    return s


def write_engram(call: Call, ordinal: int, layer: Any, s: Stream) -> Stream:
    """Add to the streams what the ordinal-th Engram layer remembers of each row's last tokens."""
    with jax.named_scope("engram"):
        index_rows = engram_rows(call, ordinal)
        p = call.params["engram"][ordinal]
        x, gates = engram.write(p, index_rows, s.x, call.rows.image, call.cfg, call.numerics)
    s = _keep(call, layer, s, engram_rows=lambda: index_rows, engram_gates=lambda: gates)
    return dataclasses.replace(s, x=x)


def engram_rows(call: Call, ordinal: int) -> jax.Array:
    """Table rows [T, columns] that the ordinal-th Engram layer reads for each row."""
    pad = call.tables.token_map[call.cfg.engram_pad_token_id]
    constants = engram.hash_constants(call.cfg)[ordinal]
    return _hashed(call.lookback, pad, ordinal, constants, call.numerics)


@nx.by_name("constants")
def _hashed(
    tokens: jax.Array, pad: jax.Array, ordinal: Any, constants: engram.HashConstants,
    numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """`engram.table_rows` by name in the plain form; `ordinal` tells an executor the constants."""
    return engram.table_rows(tokens, pad, constants)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Published:
    """A source's new entries, of all rows of the call, as the cache holds them or, where there is
    none, as attention reads them: main [T, w], key [T, k]; pair [T, ...]: what waits in `pending`
    for the rest of its group, None where entries are of single tokens.
    """

    main: jax.Array
    key: jax.Array
    pair: jax.Array | None


def publish(call: Call, kind: LayerKind, layer: Any, s: Stream) -> Published:
    """Make this source's new entries from the block's attention input."""
    cfg, numerics, rows = call.cfg, call.numerics, call.whole
    norm = nx.at_layer(call.params["layers"]["attn_norm"], layer, numerics)
    x = call.gathered(hyper.normed(norm, s.pre, s.x, cfg, numerics))
    places = ordinals(cfg)
    source = _ordinal(places.source, layer)
    at = functools.partial(nx.at_layer, numerics=numerics)
    p = {name: at(call.params["compressor"][name], source) for name in ("wkv", "norm")}
    old = None
    if kind.ratio > 1:
        pooled = _ordinal(places.pooled, layer)
        p["wgate"] = at(call.params["compressor"]["wgate"], pooled)
        old = None if s.cache is None else s.cache.pending[pooled]
    lat, pair = compress.latents(p, x, kind.ratio, old, rows, call.spans, cfg, numerics)
    angle = compress.entry_angle(call.tables, rows, kind.ratio)
    keys = {n: at(call.params["indexer"][n], source) for n in ("wk", "k_norm")}
    key = lax.stop_gradient(compress.index_key(keys, lat, angle, cfg, numerics))
    if s.cache is None:
        return Published(compress.main_vector(lat, angle, numerics), key, None)
    # The codec quantizes. It must see what `main_vector` sees, not its result: where a group's
    # largest element was rounded down, a second scale could come out smaller and clip the group.
    main = caches.main_codec(cfg, numerics).store(compress.rotated(lat, angle))
    return Published(main, caches.index_codec(cfg, numerics).store(key), pair)


def _stored(call: Call, kind: LayerKind, layer: Any, s: Stream, made: Published) -> Stream:
    if s.cache is None:
        return dataclasses.replace(s, latest=(made.main, made.key))
    places, cache = ordinals(call.cfg), s.cache
    if made.pair is not None:
        pooled = _ordinal(places.pooled, layer)
        cache = store_pending(cache, pooled, made.pair, call.whole, call.spans)
    stored = _ordinal(places.stored, layer)
    cache = store_entries(call, cache, kind.ratio, stored, made.main, made.key)
    return dataclasses.replace(s, cache=cache)


def store_pending(cache: Cache, pooled: Any, pair: jax.Array, rows: Rows, spans: Spans) -> Cache:
    """Write pairs [T, ...] of the source `pooled`; of one beyond all nothing is written."""
    slot, place = caches.ring_targets(rows, spans, cache.pending.shape[2])
    pending = cache.pending.at[pooled, slot, place].set(pair, mode="drop")
    return dataclasses.replace(cache, pending=pending)


def store_entries(
    call: Call, cache: Cache, ratio: int, stored: Any, main: jax.Array, key: jax.Array
) -> Cache:
    """Write the entries that the rows complete; other rows, and those without page, do not, nor do
    entries of other devices, nor a source `stored` beyond all.
    """
    rows, cfg = call.whole, call.cfg
    which = cfg.ratios.index(ratio)
    _, count, size, _ = cache.kv[which].shape
    entry, own = rows.positions // ratio, None
    if cache.ranks > 1:
        entry, own = dealt.place_of(entry, cache.ranks)
    page = cache.pages.at[rows.slots, entry // size].get(mode="fill", fill_value=-1)
    complete = rows.real & ((rows.positions + 1) % ratio == 0)
    complete = complete if own is None else complete & own
    page = jnp.where(complete & (page >= 0), page, count)

    def put(stacks: tuple[jax.Array, ...], value: jax.Array) -> tuple[jax.Array, ...]:
        new = stacks[which].at[stored, page, entry % size].set(value, mode="drop")
        return (*stacks[:which], new, *stacks[which + 1 :])

    return dataclasses.replace(cache, kv=put(cache.kv, main), keys=put(cache.keys, key))


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
    names = ("wq_b", "weights_proj")
    p = {n: nx.at_layer(call.params["indexer"][n], place, numerics) for n in names}
    query = index.index_query(p, x, low, _angle(call, kind), cfg, numerics)
    count = entry_count(call, s.cache, kind.ratio)
    field = index.Field(kind.ratio, caches.index_codec(cfg, numerics))
    if kind.uses_candidates:
        ids = index.members(s.candidates, cfg.candidate_block_size)
    else:
        ids = jnp.arange(count, dtype=jnp.int32)
    query = lax.stop_gradient(query)
    if s.cache is not None and s.cache.ranks > 1:
        assert call.split is not None
        picked, candidates = dealt.select(
            query, keys, s.candidates, call.whole, call.spans, call.split, field, kind, cfg,
            numerics,
        )  # fmt: skip
        return dataclasses.replace(s, selected=picked, candidates=candidates)
    if numerics.rows == "dense":
        score = index.scores_of_sequences(query, keys, ids, call.rows, field, call.length, numerics)
    else:
        score = index.scores(query, keys, ids, call.rows, call.spans, field, numerics)
    s = dataclasses.replace(s, selected=index.select(score, ids, cfg.index_topk, numerics))
    if kind.candidate_source:
        visible = index.visible_entries(call.rows.positions, kind.ratio)
        s = dataclasses.replace(s, candidates=index.candidate_blocks(score, visible, cfg, numerics))
        s = _keep(call, layer, s, candidates=lambda: s.candidates)
    width = 0 if s.seen is None or s.seen.index_scores is None else s.seen.index_scores.shape[-1]
    return _keep(call, layer, s, index_scores=lambda: capture.score_columns(score, ids, width))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asked:
    """An attention sub-layer before it looks anywhere: its mixes, its input [T, D], its queries and
    the window vectors of all rows of the call.
    """

    mixed: hyper.Mix
    x: jax.Array
    query: attention.Query
    k: jax.Array


def ask(call: Call, angle: Rotation, layer: Any, p: Any, s: Stream) -> tuple[Stream, Asked]:
    """The part before `look`, the same for every kind of layer but for the angle."""
    cfg, numerics = call.cfg, call.numerics
    mixed = hyper.mix(p["hc_attn"], s.x, cfg, numerics)
    x = hyper.normed(p["attn_norm"], s.pre, s.x, cfg, numerics)
    q = attention.query(p["attn"], x, angle, cfg, numerics)
    k = attention.window_kv(p["attn"], x, angle, cfg, numerics)
    s = _keep(call, layer, s, attention_mix=lambda: mixed)
    return s, Asked(mixed, x, q, call.gathered(k))


def look(
    call: Call, kind: LayerKind, layer: Any, p: Any, asked: Asked, s: Stream
) -> tuple[Stream, jax.Array]:
    """Select entries and attend over them and the window as it was, and this call's rows.

    Returns the stream, with the newest selection, and the heads' outputs [T, H, Hd].
    """
    cfg, numerics, cache = call.cfg, call.numerics, s.cache
    entries = None
    if kind.ratio:
        entries, keys = _entries(call, kind, layer, s)
        if kind.index_source:
            with jax.named_scope("index"):
                s = _select(call, kind, layer, s, asked.x, asked.query.low, keys)
        s = _keep(call, layer, s, selected=lambda: s.selected)
    reach = Reach(
        cfg.sliding_window, kind.ratio, caches.window_codec(cfg, numerics),
        caches.main_codec(cfg, numerics), cfg.head_dim**-0.5, call.length,
    )  # fmt: skip
    floor = call.decoder_floor if kind.decoder else call.floor
    ring = None if cache is None else Ring(cache.window, layer)
    sink = p["attn"]["attn_sink"].astype(jnp.float32)
    about: Any = (floor, sink, call.rows, call.spans, reach, numerics)
    q, k = asked.query.heads, asked.k
    if cache is not None and cache.ranks > 1 and entries is not None:
        assert call.split is not None
        o = dealt.attend(
            q, k, ring, entries, s.selected, *about, whole=call.whole, split=call.split
        )
    else:
        o = attention.attend(q, k, ring, entries, s.selected, *about)
    s = _keep(
        call, layer, s,
        windows=lambda: attention.window_bounds(call.rows.positions, floor, reach),
        probabilities=lambda: attention.probabilities(q, k, ring, entries, s.selected, *about),
    )  # fmt: skip
    return s, o


def answer(
    call: Call, angle: Rotation, layer: Any, p: Any, asked: Asked, o: jax.Array, s: Stream
) -> tuple[Stream, jax.Array]:
    """The part after `look`: the rows enter the ring, the output [T, D] the streams."""
    cfg, numerics, cache = call.cfg, call.numerics, s.cache
    if cache is not None:
        # The ring is read before it is overwritten: without the barrier a compiler would copy it.
        codec = caches.window_codec(cfg, numerics)
        to, seen = (call.whole, call.spans, codec, numerics), s.seen
        if numerics.rows == "ffi":  # the barrier is gone there before XLA decides what to copy
            data = attention.store_window(Ring(cache.window, layer), asked.k, *to, before=o)
        else:
            data, o, seen = lax.optimization_barrier((cache.window, o, seen))
            data = attention.store_window(Ring(data, layer), asked.k, *to)
        s = dataclasses.replace(s, cache=dataclasses.replace(cache, window=data), seen=seen)
    y = attention.output(p["attn"], o, angle, cfg, numerics)
    streams = hyper.expand(y, asked.mixed, s.x, numerics)
    return dataclasses.replace(s, x=streams, pre=asked.mixed.pre), y


def attention_part(
    call: Call, kind: LayerKind, layer: Any, p: Any, s: Stream
) -> tuple[Stream, jax.Array, jax.Array]:
    """The attention sub-layer; returns the stream, the sub-layer's input and its output [T, D]."""
    angle = _angle(call, kind)
    s, asked = ask(call, angle, layer, p, s)
    s, o = look(call, kind, layer, p, asked, s)
    s, y = answer(call, angle, layer, p, asked, o, s)
    return s, asked.x, y


# -- mixture of experts ----------------------------------------------------------------------------


def moe_sublayer(
    p: Any, stacks: Any, layer: Any, x: jax.Array, pre: jax.Array, rows: Rows, active: int,
    cfg: ModelConfig, numerics: Numerics,
) -> tuple[jax.Array, hyper.Mix, jax.Array, moe.Route]:  # fmt: skip
    """The MoE sub-layer of any block, backbone or draft, on streams x [T, C, D].

    Returns (streams, the sub-layer's mixes, its output [T, D], route).
    """
    mixed = hyper.mix(p["hc_ffn"], x, cfg, numerics)
    h = hyper.normed(p["ffn_norm"], pre, x, cfg, numerics)
    y, route = moe.moe(p["ffn"], stacks, layer, h, rows, active, cfg, numerics)
    return hyper.expand(y, mixed, x, numerics), mixed, y, route


def moe_part(call: Call, layer: Any, p: Any, s: Stream) -> tuple[Stream, jax.Array, moe.Route]:
    """The MoE sub-layer; returns the stream, the sub-layer's output [T, D] and the routing."""
    stacks = call.params["layers"]["ffn"]["experts"]
    x, mixed, y, route = moe_sublayer(
        p, stacks, layer, s.x, s.pre, call.rows, call.cfg.num_experts_per_tok, call.cfg,
        call.numerics,
    )  # fmt: skip
    if call.origin is None:
        routed = s.routed.at[layer].set(route.experts)
    else:
        routed = s.routed.at[layer, call.origin].set(route.experts, mode="drop")
    real, total = call.rows.real, call.cfg.n_routed_experts
    s = _keep(
        call, layer, s,
        router_scores=lambda: route.scores,
        router_weights=lambda: route.weights,
        router_load=lambda: moe.counted(route.experts[None], real, total)[0],
        expert_mix=lambda: mixed,
        streams=lambda: x,
        stream_norms=lambda: jnp.sqrt(nx.mean_square(x, call.numerics)),
    )  # fmt: skip
    return dataclasses.replace(s, x=x, pre=mixed.pre, routed=routed), y, route


def block(call: Call, kind: LayerKind, layer: Any, s: Stream) -> tuple[Stream, Record]:
    """A whole block; a caller that ignores the record pays nothing for it."""
    number = f"layer_{layer}" if isinstance(layer, int) else "layers"
    with jax.named_scope(number), jax.named_scope(kind.role):
        s = enter(call, kind, layer, s)
        return after_enter(call, kind, layer, s)


def after_enter(call: Call, kind: LayerKind, layer: Any, s: Stream) -> tuple[Stream, Record]:
    """The two sub-layers of a block that has been entered."""
    p = block_params(call.params["layers"], layer, call.numerics)
    entered = s.x
    with jax.named_scope("attention"):
        s, normed, attention_y = attention_part(call, kind, layer, p, s)
    with jax.named_scope("moe"):
        s, moe_y, route = moe_part(call, layer, p, s)
    return s, Record(entered, normed, attention_y, moe_y, route)


def padding_floor(rows: Rows, floor: jax.Array) -> jax.Array:
    """`floor` [T], with FAR at padding rows so that they see nothing."""
    return jnp.where(rows.real, floor, FAR)
