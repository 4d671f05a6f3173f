"""Stage 2: the DSpark heads, on a frozen backbone.

See docs/speculation.md "Heads for another checkpoint".
Each sequence gives a number of random anchors. A block of draft rows stands at every anchor and
sees the backbone's features strictly before it; the Markov head is fed the true preceding tokens.
The confidence head learns the probability of acceptance under shared noise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import rows as row_sets
from deepinfer_jax.cache import Codec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import draft, forward, head, rope
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.params import Params
from deepinfer_jax.tables import Tables
from deepinfer_jax.training import coupling, pretrain


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the drafter is trained for: weights of the losses, row k weighing exp(-k / fade).

    cross_entropy: of the true next token. distance: of sum |p - q|, twice the total variation,
    which rejection sampling loses. coupled: of the probability that target and draft differ under
    shared noise, which coupled acceptance loses. confidence: of the confidence head.
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    coupled: float = 0.0
    confidence: float = 1.0
    fade: float = 4.0


OBJECTIVES = {
    "distance": Objective(),  # the weights of the DeepSpec code
    "coupled": Objective(distance=0.0, coupled=1.8),  # as strong where p and q nearly agree
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Tokens [B, S] of lengths [B], int32; answer [B, S] bool marks what the model is to write."""

    tokens: Any
    lengths: Any
    answer: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Anchors:
    """A anchors in each of B sequences: positions [B, A], and which draft rows count [B, A, N]."""

    positions: jax.Array
    valid: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """Mean losses; per draft position [N], acceptance under shared noise and greedy matches."""

    loss: jax.Array
    cross_entropy: jax.Array
    distance: jax.Array
    confidence: jax.Array
    acceptance: jax.Array
    greedy: jax.Array


def choose_anchors(key: jax.Array, answer: jax.Array, count: int, size: int) -> Anchors:
    """Random anchors whose next token is the model's own to write: answer [B, S] bool."""
    batch, length = answer.shape
    padded = jnp.pad(answer, ((0, 0), (0, size)))
    ahead = jnp.stack([padded[:, k + 1 : k + 1 + length] for k in range(size)], axis=-1)
    prefix = jnp.cumprod(ahead.astype(jnp.int32), axis=-1) > 0
    draw = jnp.where(prefix[..., 0], jax.random.uniform(key, (batch, length)), -1.0)
    score, positions = lax.top_k(draw, count)
    valid = jnp.take_along_axis(prefix, positions[..., None], axis=1)
    return Anchors(positions, valid & (score >= 0)[..., None])


def context_ring(
    params: Params, tables: Tables, taps: jax.Array, positions: jax.Array, batch: int,
    cfg: ModelConfig, numerics: Numerics,
) -> tuple[jax.Array, Codec]:  # fmt: skip
    """Context KV of whole sequences as floats [M, B, S, Hd], and the codec that reads it."""
    m = draft.context(params, taps, cfg, numerics)
    angle = rope.at(tables.base, positions)
    layers = [
        draft.context_kv(params, m, angle, layer, cfg, numerics)
        for layer in range(cfg.num_nextn_predict_layers)
    ]
    ring = jnp.stack(layers).astype(jnp.float32)
    ring = ring.reshape(ring.shape[0], batch, -1, cfg.head_dim)
    return ring, Codec.plain(cfg.head_dim)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heads:
    """Outputs of the draft heads at anchors: logits [B * A, N, V], confidence [B * A, N]."""

    logits: jax.Array
    confidence: jax.Array


def heads(
    params: Params, tables: Tables, taps: jax.Array, tokens: jax.Array, anchors: Anchors,
    cfg: ModelConfig, numerics: Numerics,
) -> Heads:  # fmt: skip
    """Teacher-forced draft of sequences tokens [B, S] with taps [n, B * S, D]."""
    batch, length = tokens.shape
    size, count = cfg.dspark_block_size, anchors.positions.shape[1]
    every = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    ring, codec = context_ring(params, tables, taps, every, batch, cfg, numerics)
    slots = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), count)
    positions = anchors.positions.reshape(-1)
    before = forced_tokens(tokens, anchors, size)
    u, _, _ = draft.run_blocks(
        params, tables, ring, codec, slots, positions, before[:, 0], size, cfg, numerics
    )
    base = draft.base_logits(params, u, cfg, numerics)
    logits, confidence = draft.chained(params, u, base, before.reshape(-1), numerics)
    return Heads(logits.reshape(-1, size, cfg.vocab_size), confidence.reshape(-1, size))


def forced_tokens(tokens: jax.Array, anchors: Anchors, size: int, shift: int = 0) -> jax.Array:
    """Tokens [B * A, N] at the anchor + `shift` and after it, from tokens [B, S]."""
    offset = jnp.arange(shift, shift + size, dtype=jnp.int32)[None, None]
    place = anchors.positions[..., None] + offset
    place = jnp.minimum(place, tokens.shape[1] - 1).reshape(tokens.shape[0], -1)
    return jnp.take_along_axis(tokens, place, axis=1).reshape(-1, size)


def batch_loss(
    values: Params, backbone: Params, tables: Tables, given: Sequences, key: jax.Array,
    count: int, objective: Objective, cfg: ModelConfig, numerics: Numerics,
) -> tuple[jax.Array, Report]:  # fmt: skip
    """Loss of the rounded draft weights `values` at `count` anchors of every sequence."""
    params = {**lax.stop_gradient(backbone), "draft": values}
    tokens, (batch, length) = given.tokens, given.tokens.shape
    rows = row_sets.batch_rows(tokens, given.lengths)
    hidden, _ = forward.forward(params, tables, rows, None, cfg, numerics, length=length)
    size = cfg.dspark_block_size
    anchors = choose_anchors(key, given.answer, count, size)
    made = heads(params, tables, lax.stop_gradient(hidden.taps), tokens, anchors, cfg, numerics)
    offset = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * length
    place = offset + anchors.positions[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    output = hidden.output[jnp.minimum(place, batch * length - 1).reshape(-1)]
    target = lax.stop_gradient(head.logits(params, output, numerics)).reshape(made.logits.shape)
    following = forced_tokens(tokens, anchors, size, 1)
    return losses(made, target, following, anchors.valid, objective)


def losses(
    made: Heads, target: jax.Array, following: jax.Array, valid: jax.Array, objective: Objective
) -> tuple[jax.Array, Report]:
    """The weighted losses of drafts against target logits [A, N, V] and true tokens [A, N]."""
    size = following.shape[1]
    valid = valid.reshape(-1, size).astype(jnp.float32)
    weight = valid * np.exp(-np.arange(size) / objective.fade).astype(np.float32)[None]
    share = weight / (jnp.sum(weight) + 1e-6)
    p, q = jax.nn.softmax(target, axis=-1), jax.nn.softmax(made.logits, axis=-1)
    cross = jnp.sum(share * pretrain.token_nll(made.logits, following))
    distance = jnp.sum(share * jnp.sum(jnp.abs(p - q), axis=-1))
    together = coupling.acceptance(p, q)
    label = lax.stop_gradient(together)
    soft = jax.nn.softplus(made.confidence) - label * made.confidence
    confidence = jnp.sum(share * soft)
    total = (
        objective.cross_entropy * cross
        + objective.distance * distance
        + objective.confidence * confidence
    )
    if objective.coupled:  # its gradient sorts the vocabulary
        total = total + objective.coupled * jnp.sum(share * (1 - together))
    rows = jnp.sum(valid, axis=0) + 1e-6
    same = (jnp.argmax(target, axis=-1) == jnp.argmax(made.logits, axis=-1)).astype(jnp.float32)
    report = Report(
        loss=total,
        cross_entropy=cross,
        distance=distance,
        confidence=confidence,
        acceptance=jnp.sum(valid * label, axis=0) / rows,
        greedy=jnp.sum(valid * same, axis=0) / rows,
    )
    return total, report
