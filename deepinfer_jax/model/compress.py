"""The compressor: pools m tokens into one KV entry and its index key (docs/model.md 7.2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import rope
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, Spans, row_of
from deepinfer_jax.tables import Rotation, Tables


def raw_pair(p: Any, x: jax.Array, numerics: Numerics) -> jax.Array:
    """Projection and gate of x [T, D] before pooling: float32 [T, 2, Hd]."""
    a = nx.linear_f32(x, p["wkv"], numerics)
    g = nx.linear_f32(x, p["wgate"], numerics)
    return jnp.stack([a, g], axis=1)


def group_pairs(
    pair: jax.Array, pending: jax.Array | None, rows: Rows, spans: Spans, ratio: int
) -> jax.Array:
    """The pairs of each row and the m-1 tokens before it: [T, m, 2, Hd], oldest first.

    Tokens of earlier calls come from `pending` [B, P, 2, Hd], a ring over positions.
    """
    slot = jnp.maximum(rows.slots, 0)
    members = []
    for back in range(ratio - 1, 0, -1):
        wanted = rows.positions - back
        inside, row = row_of(spans, slot, wanted)
        member = pair[row]
        if pending is not None:
            old = pending[slot, wanted % pending.shape[1]]
            member = jnp.where(inside[:, None, None], member, old)
        members.append(member)
    return jnp.stack([*members, pair], axis=1)


def pool(pairs: jax.Array) -> jax.Array:
    """Per-feature softmax of the gates over the group: [T, m, 2, Hd] -> float32 [T, Hd]."""
    count = pairs.shape[1]
    a, g = pairs[:, :, 0], pairs[:, :, 1]
    top = nx.finite_max(g, 1)[:, 0]
    e = [jnp.exp(g[:, i] - top) for i in range(count)]
    total = nx.ordered_sum(e)
    return nx.ordered_sum([nx.pin((e[i] / total) * a[:, i]) for i in range(count)])


def latent(raw: jax.Array, p: Any, cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """Pooled or projected rows [T, Hd] rounded and normalised: the latent before rotation."""
    raw = nx.round_to(raw, numerics.dtype)
    return nx.rms_norm(raw, p["norm"], cfg.rms_norm_eps, numerics)


def latents(
    p: Any, x: jax.Array, ratio: int, pending: jax.Array | None, rows: Rows, spans: Spans,
    cfg: ModelConfig, numerics: Numerics,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Latents [T, Hd] of x [T, D], each row's that of the group it ends, before rotation.

    Also the pairs [T, 2, Hd] that later calls will find in `pending`; None where nothing is pooled.
    """
    if ratio == 1:
        return latent(nx.linear_f32(x, p["wkv"], numerics), p, cfg, numerics), None
    pair = raw_pair(p, x, numerics)
    raw = pool(group_pairs(pair, pending, rows, spans, ratio))
    return latent(raw, p, cfg, numerics), pair


def entry_angle(tables: Tables, rows: Rows, ratio: int) -> Rotation:
    """Entries rotate at the first token of their group."""
    return rope.at(tables.yarn, rows.positions - (ratio - 1))


def rotated(lat: jax.Array, angle: Rotation) -> jax.Array:
    """Compressed KV of latents [T, Hd] before its quantizer: what a cache stores."""
    return rope.rotate(lat, angle)


def main_vector(lat: jax.Array, angle: Rotation, numerics: Numerics) -> jax.Array:
    """Compressed KV, key and value at once, of latents [T, Hd]: what attention reads."""
    kv = rotated(lat, angle)
    return quant.qdq_main(kv) if numerics.quantize_kv else kv


def index_key(
    p: Any, lat: jax.Array, angle: Rotation, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """Index key of the un-rotated, un-quantized latents [T, Hd] -> [T, index_head_dim]."""
    key = nx.linear(lat, p["wk"], numerics)
    key = nx.rms_norm(key, p["k_norm"], cfg.rms_norm_eps, numerics)
    key = rope.rotated(key, angle, False, numerics)
    return quant.qdq_index(key) if numerics.quantize_kv else key
