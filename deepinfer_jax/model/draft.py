"""DSpark: the block drafter (docs/model.md 9).

One pass of a few window-only blocks over [anchor, noise, noise, ...] proposes the next tokens; a
Markov head chains them left to right, a confidence head estimates how likely each is to be
accepted. Drafts are drawn with the noise of the absolute position that the target itself will use,
so that target and draft agree as often as coupled sampling allows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import cache as caches
from deepinfer_jax import numerics as nx
from deepinfer_jax import rows as row_sets
from deepinfer_jax import summaries
from deepinfer_jax.cache import Cache, Codec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, divided, head, hyper, rope, sequences
from deepinfer_jax.model.attention import Ring
from deepinfer_jax.model.block import block_params, moe_sublayer
from deepinfer_jax.model.forward import Hidden
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows
from deepinfer_jax.tables import Rotation, Tables

Pick = Callable[[jax.Array, jax.Array, Sequence[jax.Array]], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """N proposals for each of B anchors.

    tokens      [B, N] int32: proposal k stands at the anchor's position + 1 + k
    logits      [B, N, V] float32, Markov bias of the preceding draft included
    base        [B, N, V] float32, without it
    confidence  [B, N] float32, raw: sigmoid estimates P(accepted | all before accepted)
    streams     [M, B * N, C, D]: streams after each draft block, for inspection
    routed      [M, B * N, k] experts
    """

    tokens: jax.Array
    logits: jax.Array
    base: jax.Array
    confidence: jax.Array
    streams: jax.Array
    routed: jax.Array

    __repr__ = summaries.of_fields


def context(params: Any, taps: jax.Array, cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """Context features [T, D] of backbone rows from their taps [n, T, D]."""
    p = params["draft"]
    joined = jnp.moveaxis(taps, 0, 1).reshape(taps.shape[1], -1)
    m = nx.linear(joined, p["main_proj"], numerics, cfg.quantized)
    return nx.rms_norm(m, p["main_norm"], cfg.rms_norm_eps, numerics)


def context_kv(
    params: Any, m: jax.Array, angle: Rotation, layer: Any, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """What draft layer `layer` reads of rows with features m [T, D] (`context`): [T, Hd]."""
    stack = params["draft"]["layers"]["attn"]
    p = nx.at_layer({name: stack[name] for name in ("wkv", "kv_norm")}, layer, numerics)
    return attention.window_kv(p, m, angle, cfg, numerics)


def store_context(
    params: Any, tables: Tables, hidden: Hidden, cache: Cache, cfg: ModelConfig, numerics: Numerics
) -> Cache:
    """Write the context KV of a forward's rows into the rings of the draft layers.

    Rows that turn out to be rejected are overwritten before any draft can read them.
    """
    rows = hidden.rows
    m = context(params, hidden.taps, cfg, numerics)
    angle = rope.at(tables.base, rows.positions)
    spans = row_sets.spans_of(rows, cache.slots)
    codec = caches.window_codec(cfg, numerics)

    def one(data, layer):
        k = context_kv(params, m, angle, layer, cfg, numerics)
        return attention.store_window(Ring(data, layer), k, rows, spans, codec, numerics), None

    layers = jnp.arange(cfg.num_nextn_predict_layers, dtype=jnp.int32)
    return dataclasses.replace(cache, draft=lax.scan(one, cache.draft, layers)[0])


def _block_rows(
    slots: jax.Array, positions: jax.Array, anchors: jax.Array, size: int, cfg: ModelConfig
) -> Rows:
    """The rows [B * N] of the draft blocks: the anchor, then noise, at consecutive positions."""
    offset = jnp.arange(size, dtype=jnp.int32)[None, :]
    tokens = jnp.where(offset == 0, anchors[:, None], cfg.dspark_noise_token_id)
    return row_sets.text_rows(
        tokens.reshape(-1),
        jnp.repeat(slots, size),
        (positions[:, None] + offset).reshape(-1),
    )


def _attend_row(
    row: Any, shared: Any, size: int, codec: Any, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """One draft row: the window before its block, then the whole block, without a causal mask."""
    q, number, slot, anchor, real = row
    new, ring, layer, sink = shared
    width = cfg.sliding_window
    wanted = anchor - width + jnp.arange(width, dtype=jnp.int32)
    safe = jnp.maximum(wanted, 0)
    old = codec.load(ring[layer, slot, safe % ring.shape[2]], new.dtype)
    block = lax.dynamic_slice_in_dim(new, number // size * size, size, axis=0)
    keys = jnp.concatenate([old, block])
    mask = jnp.concatenate([wanted >= 0, jnp.ones((size,), bool)]) & real
    keys = jnp.where(mask[:, None], keys, 0)
    return nx.attend(q, keys, mask, sink, cfg.head_dim**-0.5, numerics)


def _attend_blocks(
    q: jax.Array, new: jax.Array, sink: jax.Array, scene: _Scene, layer: Any
) -> jax.Array:
    """`_attend_row` for all rows, block by block (`rows="dense"`): q [B * N, H, Hd]."""
    cfg, size, rows = scene.cfg, scene.size, scene.rows
    anchor, slot = scene.anchors[::size], jnp.maximum(rows.slots[::size], 0)
    back = jnp.arange(-cfg.sliding_window, 0, dtype=jnp.int32)
    wanted = anchor[:, None] + back[None, :]
    place = jnp.maximum(wanted, 0) % scene.ring.shape[2]
    old = scene.codec.load(scene.ring[layer, slot[:, None], place], new.dtype)
    keys = jnp.concatenate([old, new.reshape(-1, size, new.shape[-1])], axis=1)
    inside = jnp.ones((anchor.shape[0], size), bool)
    mask = jnp.concatenate([wanted >= 0, inside], axis=1) & rows.real[::size, None]
    blocks = q.reshape(-1, size, *q.shape[1:])
    return sequences.attend_blocks(blocks, keys, mask, sink, cfg.head_dim**-0.5).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _Scene:
    """What the draft blocks of one pass share."""

    params: Any
    rows: Rows
    angle: Rotation
    anchors: jax.Array
    ring: jax.Array
    codec: Codec
    size: int
    cfg: ModelConfig
    numerics: Numerics


def _attention(scene: _Scene, p: Any, x: jax.Array, pre: jax.Array, layer: Any):
    """The attention sub-layer of a draft block: streams and the next collapse weights."""
    cfg, numerics, rows = scene.cfg, scene.numerics, scene.rows
    mixed = hyper.mix(p["hc_attn"], x, cfg, numerics)
    h = hyper.normed(p["attn_norm"], pre, x, cfg, numerics)
    q = attention.query(p["attn"], h, scene.angle, cfg, numerics).heads
    k = attention.window_kv(p["attn"], h, scene.angle, cfg, numerics)
    sink = p["attn"]["attn_sink"].astype(jnp.float32)
    if numerics.rows == "dense":
        o = _attend_blocks(q, k, sink, scene, layer)
    else:
        number = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
        each = (q, number, jnp.maximum(rows.slots, 0), scene.anchors, rows.real)
        f = functools.partial(
            _attend_row, size=scene.size, codec=scene.codec, cfg=cfg, numerics=numerics
        )
        o = nx.map_rows(f, each, (k, scene.ring, layer, sink), numerics)
    y = attention.output(p["attn"], o, scene.angle, cfg, numerics)
    return hyper.expand(y, mixed, x, numerics), mixed.pre


def _block(scene: _Scene, x: jax.Array, pre: jax.Array, layer: Any):
    stack, cfg = scene.params["draft"]["layers"], scene.cfg
    p = block_params(stack, layer, scene.numerics)
    x, pre = _attention(scene, p, x, pre, layer)
    active = cfg.dspark_num_experts_per_tok
    x, mixed, _, route = moe_sublayer(
        p, stack["ffn"]["experts"], layer, x, pre, scene.rows, active, cfg, scene.numerics
    )
    return x, mixed.pre, route.experts


def run_blocks(
    params: Any, tables: Tables, ring: jax.Array, codec: Codec, slots: jax.Array,
    positions: jax.Array, anchors: jax.Array, size: int, cfg: ModelConfig, numerics: Numerics,
    seeds: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Run the draft blocks: (collapsed outputs [B * N, D], streams after each, experts of each).

    slots [B] (-1: padding), positions [B] of the anchors, anchors [B] token ids; the context before
    each anchor stands in `ring` [M, B, R, w], read by `codec`: the cache's, or in training that of
    whole sequences as plain floats, so that it has gradients. seeds [B, 2]: of the slots' requests,
    as in `Rows`.
    """
    rows = _block_rows(slots, positions, anchors, size, cfg)
    if seeds is not None:
        rows = dataclasses.replace(rows, seeds=jnp.repeat(seeds, size, axis=0))
    scene = _Scene(
        params=params,
        rows=rows,
        angle=rope.at(tables.base, rows.positions),
        anchors=jnp.repeat(positions, size),
        ring=ring,
        codec=codec,
        size=size,
        cfg=cfg,
        numerics=numerics,
    )
    tokens = jnp.clip(rows.tokens, 0, cfg.vocab_size - 1)
    h = nx.round_to(divided.rows(params["embed"], tokens), numerics.dtype)
    x = jnp.repeat(h[:, None], cfg.hc_mult, axis=1)
    pre = hyper.first_pre(rows.slots.shape[0], cfg.hc_mult)

    def step(carry, layer):
        x, pre = carry
        x, pre, routed = _block(scene, x, pre, layer)
        return (x, pre), (x, routed)

    layers = jnp.arange(cfg.num_nextn_predict_layers, dtype=jnp.int32)
    (x, pre), (streams, routed) = lax.scan(step, (x, pre), layers)
    return hyper.collapse(pre, x, numerics), streams, routed


def markov_bias(params: Any, previous: jax.Array, numerics: Numerics) -> tuple[jax.Array, Any]:
    """(bias float32 [B, V], embedding [B, R]) of the preceding tokens [B]."""
    p = params["draft"]
    embedding = nx.round_to(divided.rows(p["markov_embed"], previous), numerics.dtype)
    return divided.products(embedding, p["markov_head"], numerics), embedding


def base_logits(params: Any, u: jax.Array, cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """Logits [B * N, V] of the block outputs u [B * N, D], before the Markov head."""
    normed = nx.rms_norm(u, params["draft"]["norm"], cfg.rms_norm_eps, numerics)
    return head.logits(params, normed, numerics)


def chained(
    params: Any, u: jax.Array, base: jax.Array, previous: jax.Array, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """Logits [B, V] and raw confidence [B] of drafts that follow the tokens `previous` [B].

    u [B, D]: block outputs; base [B, V]: `base_logits` of them.
    """
    bias, embedding = markov_bias(params, previous, numerics)
    features = jnp.concatenate([u, embedding], axis=-1)
    return base + bias, nx.linear_f32(features, params["draft"]["confidence"], numerics)[:, 0]


def draft(
    params: Any, tables: Tables, cache: Cache, slots: jax.Array, positions: jax.Array,
    anchors: jax.Array, pick: Pick, cfg: ModelConfig, numerics: Numerics, size: int | None = None,
    seeds: jax.Array | None = None,
) -> Draft:  # fmt: skip
    """Propose `size` tokens (default: the block size) after each anchor.

    Args:
      slots [B], positions [B], anchors [B]: the newest token of each slot and where it stands; its
        own KV is not needed, the context of all positions before it is (`store_context`).
      pick: (logits [B, V], absolute position [B], the drafts before, each [B]) -> tokens [B], the
        target's own sampling rule.
      seeds [B, 2]: of the slots' requests, as in `Rows`.
    """
    size = cfg.dspark_block_size if size is None else size
    if not 1 <= size <= cfg.dspark_block_size:
        raise ValueError(
            f"size must lie in 1..{cfg.dspark_block_size} (dspark_block_size), got {size}"
        )
    codec = caches.window_codec(cfg, numerics)
    u, streams, routed = run_blocks(
        params, tables, cache.draft, codec, slots, positions, anchors, size, cfg, numerics,
        seeds,
    )  # fmt: skip
    base = base_logits(params, u, cfg, numerics).reshape(-1, size, cfg.vocab_size)
    u = u.reshape(-1, size, cfg.hidden_size)
    previous, tokens, logits, confidence = anchors, [], [], []
    for k in range(size):
        found, sure = chained(params, u[:, k], base[:, k], previous, numerics)
        logits.append(found)
        confidence.append(sure)
        previous = pick(logits[-1], positions + 1 + k, tokens)
        tokens.append(previous)
    return Draft(
        tokens=jnp.stack(tokens, axis=1),
        logits=jnp.stack(logits, axis=1),
        base=base,
        confidence=jnp.stack(confidence, axis=1),
        streams=streams,
        routed=routed,
    )
