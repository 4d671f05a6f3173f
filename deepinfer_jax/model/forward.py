"""`forward`: rows in, hidden states and cache out; for prefill, decode, verification, training.

docs/model.md 4, 10, 11. The head is separate (`head.logits`), so that only rows whose logits matter
pay for them.

There are two ways through the layers, with the same bits: one loop whose branches are the roles
(`looped`), where that serves, else the units of `program` in a row, which is also the way of a
replay, of shared rows and of a capture.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import numerics as nx
from deepinfer_jax import summaries
from deepinfer_jax.axes import CONTEXT
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.mirror import Split
from deepinfer_jax.model import block as blocks
from deepinfer_jax.model import capture as capturing
from deepinfer_jax.model import divided, engram, hyper, index, looped, rope, sequences
from deepinfer_jax.model.block import Call, Stream
from deepinfer_jax.model.capture import Capture, Captured
from deepinfer_jax.model.program import Unit, program
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, spans_of, take_rows
from deepinfer_jax.tables import Tables


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """How much of a prompt the decoder half sees (docs/model.md 11); part of the numerics of a run.

    off: all of it. mask: every row runs, but decoder windows start at P - keep. compact: rows
    before P - keep stop at the decoder boundary; the rows kept give the results of `mask`.
    """

    mode: Literal["off", "mask", "compact"] = "off"
    keep: int = 140


OFF = Replay()


def check_replay(replay: Replay, cfg: ModelConfig, slack: int) -> None:
    """Refuse a replay that could leave a decoder ring with unwritten positions.

    `slack` is the cache's (most rows of one slot in a verification call).
    """
    if replay.mode not in ("off", "mask", "compact"):
        raise ValueError(f"replay mode must be off, mask or compact, got {replay.mode!r}")
    if replay.mode == "off":
        return
    floor = cfg.sliding_window + slack
    if replay.keep < floor:
        raise ValueError(
            f"replay keep={replay.keep} is below the floor {floor} = sliding_window + slack: "
            f"later rows would read window positions that were never computed; use keep >= {floor}"
        )
    late = [i for i in cfg.engram_layer_ids if i >= cfg.num_encoder_layers]
    early = [i for i in cfg.dspark_target_layer_ids if i < cfg.num_encoder_layers]
    if late or early:
        raise ValueError(
            f"replay needs Engram layers in the encoder and DSpark taps in the decoder; "
            f"layers {late + early} are not"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
    """What a forward gives.

    output [T, D]: normed input of the head. taps [n, T, D]: DSpark features. routed [L, rows, k]:
    experts of every row of the call, best first (-1 where a row did not run). rows: the rows of
    `output` and `taps`; fewer than the call's after a compact replay. captured: what was asked for.
    """

    output: jax.Array
    taps: jax.Array
    routed: jax.Array
    rows: Rows
    captured: Captured | None = None

    __repr__ = summaries.of_fields


def make_call(
    params: Any, tables: Tables, rows: Rows, cache: Cache | None, cfg: ModelConfig,
    numerics: Numerics, length: int | None = None, decoder_from: jax.Array | None = None,
    split: Split | None = None,
) -> tuple[Call, Cache | None]:  # fmt: skip
    """Everything the blocks share; the cache comes back with the call's tokens in its history.

    decoder_from [T]: first window position of decoder layers (replay), or None for all. split: how
    the rows are shared by devices; None: evenly where devices share the cache, else not at all.

    Raises ValueError where a slot can hold positions beyond the rotation tables, or the rows do not
    fit `rows="dense"`.
    """
    _check_positions(tables, rows, cache, cfg, length)
    _check_dense(rows, cache, cfg, numerics, length)
    if split is None and cache is not None and cache.ranks > 1:
        split = Split(CONTEXT, cache.ranks, (rows.slots.shape[0],))
    _check_split(rows, split, cache, numerics)
    slots = rows.slots.shape[0] if cache is None else cache.slots
    spans = spans_of(rows, slots)
    compressed = engram.compress_tokens(tables, rows)
    history = None if cache is None else cache.history
    tokens = engram.lookback(compressed, history, rows, spans, cfg)
    if cache is not None:
        stored = engram.store_history(cache.history, compressed, rows, spans)
        cache = dataclasses.replace(cache, history=stored)
    whole = rows
    if split is not None:
        own = split.own()
        rows, tokens = take_rows(rows, own), tokens[jnp.maximum(own, 0)]
    everywhere = jnp.zeros_like(rows.positions)
    decoder = everywhere if decoder_from is None else decoder_from
    call = Call(
        params=params,
        tables=tables,
        rows=rows,
        spans=spans,
        base=rope.at(tables.base, rows.positions),
        yarn=rope.at(tables.yarn, rows.positions),
        lookback=tokens,
        floor=blocks.padding_floor(rows, everywhere),
        decoder_floor=blocks.padding_floor(rows, decoder),
        length=length if length is not None else whole.slots.shape[0],
        origin=None,
        whole=whole,
        split=split,
        cfg=cfg,
        numerics=numerics,
    )
    return call, cache


def _check_positions(
    tables: Tables, rows: Rows, cache: Cache | None, cfg: ModelConfig, length: int | None
) -> None:
    """Refuse sizes that reach beyond the tables: `rope.at` would clip and give wrong angles.

    A cache is asked for its entries, which round the capacity up; one without global KV tells no
    capacity. Draft rows may stand beyond the end, where nothing is accepted any more.
    """
    known = tables.positions
    if cache is None:
        most = rows.slots.shape[0] if length is None else length
        if most > known:
            raise ValueError(
                f"length (most rows of one slot; default all rows) must be at most {known}, the "
                f"positions of the tables, got {most}: make the tables for {most} positions or "
                "pass a smaller length"
            )
        return
    for ratio, kv in zip(cfg.ratios, cache.kv, strict=True):
        pages, size = cache.pages.shape[1], kv.shape[2] * cache.ranks
        count = pages * size
        spare = size if pages > 1 else cache.ranks  # capacities are rounded up to whole pages
        if count >= -(-known // ratio) + spare:
            raise ValueError(
                f"the cache's capacity must be at most {known}, the positions of the tables, got "
                f"{count} entries of {ratio} tokens: make the tables as long as the cache"
            )


def _check_dense(
    rows: Rows, cache: Cache | None, cfg: ModelConfig, numerics: Numerics, length: int | None
) -> None:
    if numerics.rows != "dense":
        return
    if cache is not None:
        raise ValueError('rows="dense" keeps no cache: use rows="tiled" or "batched" with one')
    count = rows.slots.shape[0]
    sequences.check_rows(count, length or count, cfg.sliding_window, cfg.ratios)


def _check_split(rows: Rows, split: Split | None, cache: Cache | None, numerics: Numerics) -> None:
    if split is None:
        return
    if cache is not None and cache.ranks > 1 and (split.axis, split.ranks) != (
        CONTEXT, cache.ranks,
    ):  # fmt: skip
        raise ValueError(
            f"the cache is shared by {cache.ranks} devices along {CONTEXT!r}, split shares rows "
            f"among {split.ranks} along {split.axis!r}: give both the same, or leave split out"
        )
    if numerics.rows == "dense":
        raise ValueError('rows="dense" sees whole sequences: it cannot share their rows')
    if sum(split.lengths) != rows.slots.shape[0]:
        raise ValueError(
            f"split is of {sum(split.lengths)} rows, the call has {rows.slots.shape[0]}"
        )


def first_stream(call: Call, cache: Cache | None) -> Stream:
    """The stream that enters block 0: embeddings in four equal copies."""
    cfg, rows = call.cfg, call.rows
    t = rows.slots.shape[0]
    dtype = jnp.dtype(call.numerics.dtype)
    tokens = jnp.clip(rows.tokens, 0, cfg.vocab_size - 1)
    x = nx.round_to(divided.rows(call.params["embed"], tokens), dtype)
    if rows.embeddings is not None:
        x = jnp.where(rows.image[:, None], nx.round_to(rows.embeddings, dtype), x)
    every = call.whole.slots.shape[0]
    local = (jnp.zeros((every, cfg.head_dim), dtype), jnp.zeros((every, cfg.index_head_dim), dtype))
    return Stream(
        x=jnp.repeat(x[:, None], cfg.hc_mult, axis=1),
        pre=hyper.first_pre(t, cfg.hc_mult),
        selected=jnp.full((t, cfg.index_topk), -1, jnp.int32),
        candidates=jnp.full((t, _candidate_width(call, cache)), -1, jnp.int32),
        taps=jnp.zeros((len(cfg.dspark_target_layer_ids), t, cfg.hidden_size), dtype),
        routed=jnp.full((cfg.num_hidden_layers, t, cfg.num_experts_per_tok), -1, jnp.int32),
        latest=local if cache is None else None,
        cache=cache,
    )


def _candidate_width(call: Call, cache: Cache | None) -> int:
    """Candidate blocks kept per row, 0 in a model without them."""
    source = call.cfg.candidate_source_layer_id
    if source < 0:
        return 0
    count = blocks.entry_count(call, cache, call.cfg.compress_ratios[source])
    return index.candidate_width(call.cfg, count)


def _run_unit(call: Call, unit: Unit, s: Stream, remat: bool) -> Stream:
    def one(kind, layer, s):
        def step(s):
            return blocks.block(call, kind, layer, s)[0]

        return (jax.checkpoint(step) if remat else step)(s)

    def copy(first, s):
        for kind, count in unit.runs:
            if count == 1:
                s = one(kind, first, s)
            else:
                layers = first + jnp.arange(count, dtype=jnp.int32)
                s = lax.scan(lambda s, n, kind=kind: (one(kind, n, s), None), s, layers)[0]
            first = first + count
        return s

    if unit.repeat == 1:
        return copy(unit.first, s)
    starts = unit.first + unit.size * np.arange(unit.repeat, dtype=np.int32)
    after, _ = lax.scan(lambda s, first: (copy(first, s), None), s, jnp.asarray(starts))
    return cast(Stream, after)


def _compact(call: Call, s: Stream, kept: int) -> tuple[Call, Stream]:
    """Keep the rows that the decoder must run, at most `kept`, in order."""
    wanted = call.rows.real & (call.rows.positions >= call.decoder_floor)
    t = wanted.shape[0]
    number = jnp.arange(t, dtype=jnp.int32)
    order = jnp.sort(jnp.where(wanted, number, t))[:kept]
    pick = jnp.where(order < t, order, -1)
    safe = jnp.maximum(pick, 0)
    rows = take_rows(call.rows, pick)
    shorter = dataclasses.replace(
        call,
        rows=rows,
        whole=rows,
        spans=spans_of(rows, call.spans.slots),
        base=jax.tree.map(lambda a: a[safe], call.base),
        yarn=jax.tree.map(lambda a: a[safe], call.yarn),
        lookback=call.lookback[safe],
        floor=blocks.padding_floor(rows, call.floor[safe]),
        decoder_floor=blocks.padding_floor(rows, call.decoder_floor[safe]),
        origin=jnp.where(pick >= 0, pick, t),
    )
    taken = dataclasses.replace(
        s,
        x=s.x[safe],
        pre=s.pre[safe],
        selected=s.selected[safe],
        candidates=s.candidates[safe],
        taps=s.taps[:, safe],
    )
    return shorter, taken


def forward(
    params: Any, tables: Tables, rows: Rows, cache: Cache | None, cfg: ModelConfig,
    numerics: Numerics, *, length: int | None = None, replay: Replay = OFF,
    prompt_lengths: jax.Array | None = None, remat: bool = False, capture: Capture | None = None,
    split: Split | None = None,
) -> tuple[Hidden, Cache | None]:  # fmt: skip
    """Run the backbone on `rows`.

    Args:
      params: the tree of `params.abstract(cfg)`; weights stored or plain floats.
      rows: T rows of any slots (`Rows`); rows of a slot contiguous and ascending, continuing what
        the cache holds of it.
      cache: state of the slots, or None: every slot then starts at position 0 in this call, nothing
        is kept, and the function is differentiable.
      length: without a cache, the most rows of one slot (static; default T).
      replay, prompt_lengths [B]: decoder truncation of prompts, see `Replay`; with a cache only.
      remat: recompute blocks in the backward pass instead of keeping their activations.
      capture: what of the blocks' inside to give back as `Hidden.captured` (static). It changes no
        bit of anything else, and has no slope.
      split: inside `jax.shard_map`, how devices with the same rows and cache share the work on the
        rows (context parallelism): each row is computed whole by one of them, keys and values are
        gathered, all return the same. None: every device does all of it, unless the devices share
        the cache (`Cache.ranks`), who share the rows evenly then. Without `capture`.

    Returns:
      (Hidden, cache). `cache.lengths` is left alone: which rows count is the caller's decision.

    Raises ValueError, before anything is compiled, for sizes beyond the tables (see `make_call`),
    for a replay that the config or the cache cannot keep, and for layers that have not what
    `capture` wants of them.
    """
    _check_together(replay, capture, split is not None or (cache is not None and cache.ranks > 1))
    decoder_from = _decoder_from(replay, prompt_lengths, rows, cache, cfg)
    call, cache = make_call(params, tables, rows, cache, cfg, numerics, length, decoder_from, split)
    s = first_stream(call, cache)
    if capture is not None:
        s = dataclasses.replace(s, seen=_nothing_yet(capture, call, s))
    plain = replay == OFF and call.split is None and not jax.tree.leaves(s.seen)
    if plain and looped.serves(cache, numerics):
        s = looped.run(call, s, remat)
        return _hidden(call, s), s.cache
    step = functools.partial(_run_unit, remat=remat)
    for unit in program(cfg):
        if unit.runs[0][0].boundary and replay.mode == "compact":
            call, s = _cross_boundary(call, unit, s, replay)
            rest = dataclasses.replace(unit, first=unit.first + 1, runs=unit.runs[1:])
            s = step(call, rest, s)
        else:
            s = step(call, unit, s)
    return _hidden(call, s), s.cache


def _hidden(call: Call, s: Stream) -> Hidden:
    """What leaves the last block, of all rows of the call."""
    output, taps, routed = finished(call.params, s, call.cfg, call.numerics), s.taps, s.routed
    if call.split is not None:
        output = call.split.gathered(output)
        taps, routed = call.split.gathered(taps, axis=1), call.split.gathered(routed, axis=1)
    return Hidden(output, taps, routed, call.whole, s.seen)


def _check_together(replay: Replay, capture: Capture | None, shared: bool) -> None:
    if shared and capture is not None:
        raise ValueError(
            "capture sees the rows of one device, and a split shares them: use one of the two"
        )
    if shared and replay.mode != "off":
        raise ValueError("replay drops rows that the devices of a split share: use one of the two")


def _decoder_from(
    replay: Replay, prompt_lengths: jax.Array | None, rows: Rows, cache: Cache | None,
    cfg: ModelConfig,
) -> jax.Array | None:  # fmt: skip
    """Positions [T] from which a row's decoder runs, None without a replay."""
    if replay.mode == "off":
        return None
    if cache is None or prompt_lengths is None:
        raise ValueError(f"replay mode {replay.mode!r} needs a cache and prompt_lengths [slots]")
    check_replay(replay, cfg, cache.window.shape[2] - cfg.sliding_window)
    return prompt_lengths[jnp.maximum(rows.slots, 0)] - replay.keep


def _nothing_yet(capture: Capture, call: Call, s: Stream) -> Captured:
    entries = {ratio: blocks.entry_count(call, s.cache, ratio) for ratio in call.cfg.ratios}
    count, width = s.candidates.shape
    return capturing.empty(capture, call.cfg, count, entries, width, s.x.dtype)


def finished(params: Any, s: Stream, cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """The head's input [T, D]: the streams that leave the last block, collapsed and normed."""
    u = hyper.collapse(s.pre, s.x, numerics)
    return nx.rms_norm(u, params["norm"], cfg.rms_norm_eps, numerics)


def _cross_boundary(call: Call, unit: Unit, s: Stream, replay: Replay) -> tuple[Call, Stream]:
    """Run the first decoder block: all rows give compressed KV, then only the kept ones go on."""
    kind, count = unit.runs[0]
    assert (count, unit.repeat) == (1, 1), "the decoder boundary is one layer, in no loop"
    s = blocks.enter(call, kind, unit.first, s)
    kept = min(call.rows.slots.shape[0], replay.keep * call.spans.slots)
    call, s = _compact(call, s, kept)
    return call, blocks.after_enter(call, kind, unit.first, s)[0]


def trace(
    params: Any, tables: Tables, rows: Rows, cache: Cache | None, cfg: ModelConfig,
    numerics: Numerics, *, length: int | None = None,
) -> tuple[list[tuple[Stream, blocks.Record]], Cache | None]:  # fmt: skip
    """`forward` layer by layer, keeping what every block did, for looking inside.

    Returns one (stream after the block, record) per layer, and the cache. The streams' `cache`
    fields are dropped.
    """
    call, cache = make_call(params, tables, rows, cache, cfg, numerics, length)
    s = first_stream(call, cache)
    seen = []
    for layer, kind in enumerate(cfg.kinds()):
        s, record = blocks.block(call, kind, layer, s)
        seen.append((dataclasses.replace(s, cache=None), record))
    return seen, s.cache
