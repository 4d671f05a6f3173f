"""`forward`: rows in, hidden states and cache out; for prefill, decode, verification, training.

docs/model.md 4, 10, 11. The head is separate (`head.logits`), so that only rows whose logits matter
pay for them.
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
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import block as blocks
from deepinfer_jax.model import engram, hyper, index, rope, sequences
from deepinfer_jax.model.block import Call, Stream
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
    `output` and `taps`; fewer than the call's after a compact replay.
    """

    output: jax.Array
    taps: jax.Array
    routed: jax.Array
    rows: Rows


def make_call(
    params: Any, tables: Tables, rows: Rows, cache: Cache | None, cfg: ModelConfig,
    numerics: Numerics, length: int | None = None, decoder_from: jax.Array | None = None,
) -> tuple[Call, Cache | None]:  # fmt: skip
    """Everything the blocks share; the cache comes back with the call's tokens in its history.

    decoder_from [T]: first window position of decoder layers (replay), or None for all.

    Raises ValueError where a slot can hold positions beyond the rotation tables, or the rows do not
    fit `rows="dense"`.
    """
    _check_positions(tables, rows, cache, cfg, length)
    _check_dense(rows, cache, cfg, numerics, length)
    slots = rows.slots.shape[0] if cache is None else cache.slots
    spans = spans_of(rows, slots)
    compressed = engram.compress_tokens(tables, rows)
    history = None if cache is None else cache.history
    tokens = engram.lookback(compressed, history, rows, spans, cfg)
    if cache is not None:
        stored = engram.store_history(cache.history, compressed, rows, spans)
        cache = dataclasses.replace(cache, history=stored)
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
        length=length if length is not None else rows.slots.shape[0],
        origin=None,
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
        pages, count = cache.pages.shape[1], cache.pages.shape[1] * kv.shape[2]
        spare = kv.shape[2] if pages > 1 else 1  # capacities are rounded up to whole pages
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


def first_stream(call: Call, cache: Cache | None) -> Stream:
    """The stream that enters block 0: embeddings in four equal copies."""
    cfg, rows = call.cfg, call.rows
    t = rows.slots.shape[0]
    dtype = jnp.dtype(call.numerics.dtype)
    table = call.params["embed"]
    x = nx.round_to(table[jnp.clip(rows.tokens, 0, table.shape[0] - 1)], dtype)
    if rows.embeddings is not None:
        x = jnp.where(rows.image[:, None], nx.round_to(rows.embeddings, dtype), x)
    local = (jnp.zeros((t, cfg.head_dim), dtype), jnp.zeros((t, cfg.index_head_dim), dtype))
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
    looped, _ = lax.scan(lambda s, first: (copy(first, s), None), s, jnp.asarray(starts))
    return cast(Stream, looped)


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
    prompt_lengths: jax.Array | None = None, remat: bool = False,
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

    Returns:
      (Hidden, cache). `cache.lengths` is left alone: which rows count is the caller's decision.

    Raises ValueError, before anything is compiled, for sizes beyond the tables (see `make_call`)
    and for a replay that the config or the cache cannot keep.
    """
    decoder_from = None
    if replay.mode != "off":
        if cache is None or prompt_lengths is None:
            raise ValueError(
                f"replay mode {replay.mode!r} needs a cache and prompt_lengths [slots]"
            )
        check_replay(replay, cfg, cache.window.shape[2] - cfg.sliding_window)
        decoder_from = prompt_lengths[jnp.maximum(rows.slots, 0)] - replay.keep
    call, cache = make_call(params, tables, rows, cache, cfg, numerics, length, decoder_from)
    s = first_stream(call, cache)
    step = functools.partial(_run_unit, remat=remat)
    for unit in program(cfg):
        if unit.runs[0][0].boundary and replay.mode == "compact":
            call, s = _cross_boundary(call, unit, s, replay)
            rest = dataclasses.replace(unit, first=unit.first + 1, runs=unit.runs[1:])
            s = step(call, rest, s)
        else:
            s = step(call, unit, s)
    return Hidden(finished(params, s, cfg, numerics), s.taps, s.routed, call.rows), s.cache


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
