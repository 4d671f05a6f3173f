"""Stage 1: the backbone. Next-token loss, the indexer's own loss, and balance of the routers.

The forward pass is the model's own, layer by layer (`forward.trace`), with the rows of a batch as
whole sequences (`Numerics.rows = "dense"`) and weights rounded to the release. The selection of
entries carries no gradient, so the indexer learns apart: its scores are to predict the attention of
its layer over all visible entries.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import rows as row_sets
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, compress, forward, head, index, moe, sequences
from deepinfer_jax.model.block import Call, block_params
from deepinfer_jax.model.program import ordinals
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.params import Params
from deepinfer_jax.tables import Tables
from deepinfer_jax.training import dataset, masters

PROMPT_WEIGHT = 0.2  # of tokens that a user or a template wrote


def training_numerics(cfg: ModelConfig) -> Numerics:
    """The model's own quantization points, on whole sequences."""
    return dataclasses.replace(Numerics.native(cfg.quantized), rows="dense")


def all_entries(cfg: ModelConfig, length: int) -> ModelConfig:
    """The config with a selection that keeps every entry: attention while the indexer is young."""
    blocks = -(-(length - 1) // cfg.candidate_block_size) + 1  # the newest may hold one entry
    return dataclasses.replace(cfg, index_topk=length, candidate_topk_blocks=blocks)


def target_weights(tokens: np.ndarray) -> np.ndarray:
    """Loss weight of predicting tokens [B, S] (the first of a row is never predicted): float32."""
    weight = np.where(dataset.answer_mask(tokens), 1.0, PROMPT_WEIGHT).astype(np.float32)
    return np.where(tokens == dataset.PAD, 0.0, weight)[:, 1:].astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What a step tells: mean losses in nats, and tokens per expert [L, E]."""

    loss: jax.Array
    answer: jax.Array
    indexer: jax.Array
    load: jax.Array


def batch_loss(
    values: Params, tables: Tables, tokens: jax.Array, weights: jax.Array, amount: jax.Array,
    cfg: ModelConfig, numerics: Numerics,
) -> tuple[jax.Array, Report]:  # fmt: skip
    """Loss of sequences tokens [B, S] with target weights [B, S - 1]; masters in, see `masters`."""
    params = masters.released(values, cfg, amount)
    batch, length = tokens.shape
    real = jnp.count_nonzero(tokens != dataset.PAD, axis=1)
    rows = row_sets.batch_rows(tokens, real)
    seen, _ = forward.trace(params, tables, rows, None, cfg, numerics, length=length)
    output = forward.finished(params, seen[-1][0], cfg, numerics)
    logits = head.logits(params, output, numerics).reshape(batch, length, -1)[:, :-1]
    nll = token_nll(logits, tokens[:, 1:])
    total = jnp.sum(nll * weights) / (jnp.sum(weights) + 1e-6)
    call, _ = forward.make_call(params, tables, rows, None, cfg, numerics, length)
    indexer = indexer_loss(call, [record.normed for _, record in seen])
    answers = (weights == 1).astype(jnp.float32)
    report = Report(
        loss=total,
        answer=jnp.sum(nll * answers) / (jnp.sum(answers) + 1e-6),
        indexer=indexer,
        load=moe.counted(
            jnp.stack([record.route.experts for _, record in seen]), rows.real, cfg.n_routed_experts
        ).astype(jnp.float32),
    )
    return total + indexer, report


def token_nll(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Negative log-likelihood of tokens [...] under logits [..., V], float32 nats."""
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def balanced_bias(bias: jax.Array, load: jax.Array, rate: jax.Array) -> jax.Array:
    """Selection biases [L, E] moved towards experts with less than the mean load [L, E]."""
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


# -- the indexer -----------------------------------------------------------------------------------


def indexer_loss(call: Call, normed: list[jax.Array]) -> jax.Array:
    """Mean divergence of the indexers' softmax from their layers' attention over visible entries.

    normed: the attention input [T, D] of every layer. Gradients reach the indexer's weights alone.
    """
    cfg, numerics = call.cfg, call.numerics
    frozen = dataclasses.replace(call, params=lax.stop_gradient(call.params))
    losses, latest = [], None
    for layer, kind in enumerate(cfg.kinds()):
        x = lax.stop_gradient(normed[layer])
        if kind.kv_source:
            latest = _entries(call, frozen, layer, kind.ratio, x)
        if kind.index_source and latest is not None:
            far, keys = latest
            mask = sequences.visible_mask(call.rows, far.shape[1], kind.ratio)
            query, target = _attention_target(frozen, layer, x, far, mask)
            place = int(ordinals(cfg).indexer[layer])
            p = {n: call.params["indexer"][n][place] for n in ("wq_b", "weights_proj")}
            asked = index.index_query(p, x, query.low, call.yarn, cfg, numerics)
            score = sequences.index_scores(asked, keys, call.length, numerics)
            losses.append(_divergence(target, score, mask))
    return sum(losses, jnp.float32(0)) / max(len(losses), 1)


def _entries(
    call: Call, frozen: Call, layer: int, ratio: int, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One source's compressed KV [B, N, Hd], without gradient, and index keys [B, N, I], with."""
    cfg, numerics, rows = call.cfg, call.numerics, call.rows
    source, pooled = int(ordinals(cfg).source[layer]), int(ordinals(cfg).pooled[layer])
    p: dict[str, Any] = {n: frozen.params["compressor"][n][source] for n in ("wkv", "norm")}
    if ratio > 1:
        p["wgate"] = frozen.params["compressor"]["wgate"][pooled]
    lat, _ = compress.latents(p, x, ratio, None, rows, call.spans, cfg, numerics)
    angle = compress.entry_angle(call.tables, rows, ratio)
    kv = compress.main_vector(lat, angle, numerics)
    own = {n: call.params["indexer"][n][source] for n in ("wk", "k_norm")}
    key = compress.index_key(own, lat, angle, cfg, numerics)
    return (
        sequences.entries_of(kv, call.length, ratio),
        sequences.entries_of(key, call.length, ratio),
    )


def _attention_target(
    call: Call, layer: int, x: jax.Array, far: jax.Array, mask: jax.Array
) -> tuple[attention.Query, jax.Array]:
    """The layer's query and where its heads would look among all visible entries: [T, N]."""
    cfg, numerics = call.cfg, call.numerics
    p = block_params(call.params["layers"], layer, numerics)["attn"]
    query = attention.query(p, x, call.yarn, cfg, numerics)
    new = attention.window_kv(p, x, call.yarn, cfg, numerics)
    window = cfg.sliding_window
    keys = sequences.make_keys(new, far, mask, call.floor, call.length, window)
    _, weights = sequences.attend(query.heads, keys, p["attn_sink"], cfg.head_dim**-0.5)
    far_share = jnp.sum(weights[..., 2 * window :], axis=1).reshape(x.shape[0], -1)
    return query, lax.stop_gradient(far_share)


def _divergence(target: jax.Array, score: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over rows of KL(target normalised || softmax of the visible scores); all [T, N]."""
    total = jnp.sum(target, axis=1, keepdims=True)
    share = target / (total + 1e-9)
    logp = jax.nn.log_softmax(jnp.where(mask, score, -1e9), axis=1)
    each = jnp.sum(jnp.where(mask, share * (jnp.log(share + 1e-9) - logp), 0), axis=1)
    used = (total[:, 0] > 0).astype(jnp.float32)
    return jnp.sum(each * used) / (jnp.sum(used) + 1e-6)
