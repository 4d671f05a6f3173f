"""A slice of the released model at its real widths, and what a step of it must at least do.

Eight of the forty layers, one after another as in the model: two windows (the second with Engram),
a pooled source of KV and a layer that reuses its choice, the unpooled source with the candidates
and a layer that reuses it, a layer that chooses among the candidates and one that reuses that. All
384 experts, weights random in their released storage. The Engram table is small: a step reads a few
rows of it whatever its size. No drafter.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import ROOT
from jax import lax
from speculation_slice import random_weights

from deepinfer_jax import cache as caches
from deepinfer_jax import quant, resources
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import LayerKind, ModelConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.tables import Tables, make_tables

ROLES = ("attention", "indexer", "compressor", "moe", "mhc", "engram", "head", "sampling", "other")


def released_config() -> ModelConfig:
    return ModelConfig.from_json(ROOT / "configs" / "deepseek-v4.1-flash")


def slice_config(small: bool = False) -> ModelConfig:
    """The slice; `small`: the same layers with tiny widths, to try a script."""
    path = ROOT / "configs" / "deepseek-v4.1-flash" / "config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["text_config"] |= {
        "num_hidden_layers": 8,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "candidate_source_layer_id": 4,
        "engram_layer_ids": [1],
        "engram_vocab_size": 20_000,
        "engram_num_embeddings": [600_000],
        "dspark_target_layer_ids": [],
    }
    cfg = ModelConfig.from_dict(data)
    cfg = dataclasses.replace(cfg, vision=None, image_token_id=None)
    if not small:
        return cfg
    tiny = ModelConfig.from_json(resources.config_file("tiny-s"))
    names = (
        "vocab_size hidden_size moe_intermediate_size num_attention_heads head_dim "
        "qk_rope_head_dim q_lora_rank o_lora_rank o_groups n_routed_experts num_experts_per_tok "
        "index_n_heads index_head_dim index_topk sliding_window candidate_topk_blocks "
        "engram_compressed_vocab_size engram_head_dim max_position_embeddings"
    ).split()
    return dataclasses.replace(cfg, **{name: getattr(tiny, name) for name in names})


def make(cfg: ModelConfig, length: int) -> tuple[Any, Tables]:
    """Weights and tables, on the device."""
    token_map = np.arange(cfg.vocab_size, dtype=np.int32) % cfg.engram_compressed_vocab_size
    return random_weights(cfg), make_tables(cfg, token_map, length)


# -- a cache full of something ---------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _rows(like: jax.ShapeDtypeStruct, codes: int, scale: int) -> jax.Array:
    """Packed rows: `codes` bytes of pseudo-random codes without NaN, then equal scales.

    Made without a second array of that size. Where the cache is not packed: ones.
    """
    shape = like.shape
    if like.dtype != jnp.uint8:
        return jnp.ones(shape, like.dtype)
    n = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        n = n * np.uint32(2_654_435_761) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    n = (n ^ (n >> 15)) * np.uint32(2_246_822_519)
    place = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return jnp.where(place < codes, (n >> 11) & 0xBB, np.uint32(scale)).astype(jnp.uint8)


def filled_cache(cfg: ModelConfig, numerics: Numerics, slots: int, room: int, held: int) -> Cache:
    """A cache of `room` tokens a slot that holds `held`, of vectors that no text ever made."""
    shapes = caches.cache_shapes(cfg, numerics, slots, room)
    head, key = cfg.head_dim, cfg.index_head_dim
    e8m0, e4m3 = 124, 0x20
    return Cache(
        window=_rows(shapes.window, head, e8m0),
        draft=jnp.zeros(shapes.draft.shape, shapes.draft.dtype),
        kv=tuple(_rows(each, head // 2, e4m3) for each in shapes.kv),
        keys=tuple(_rows(each, key // 2, e8m0) for each in shapes.keys),
        pages=jnp.arange(slots, dtype=jnp.int32)[:, None],
        pending=jnp.zeros(shapes.pending.shape, jnp.float32),
        history=jnp.zeros(shapes.history.shape, jnp.int32),
        lengths=jnp.full((slots,), held, jnp.int32),
    )


# -- what must be moved ----------------------------------------------------------------------------


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def role_bytes(
    params: Any, cfg: ModelConfig, batch: int, length: int, touched: list[int]
) -> dict[str, float]:
    """Bytes of a decode step of `batch` slots at `length` tokens, by role.

    Every weight that is used once, of experts those that a row chose (`touched` by layer), and of
    the cache what attention and indexer must look at. Activations and what is written are left out.
    """
    layers, count = params["layers"], cfg.num_hidden_layers
    ffn, expert = layers["ffn"], nbytes(layers["ffn"]["experts"]) / count / cfg.n_routed_experts
    kinds = cfg.kinds()
    seen = [min(cfg.index_topk, length // kind.ratio) if kind.ratio else 0 for kind in kinds]
    looked = [_entries_scored(cfg, kind, length) for kind in kinds]
    cached = count * cfg.sliding_window * quant.window_bytes(cfg.head_dim)
    cached += sum(seen) * quant.main_bytes(cfg.head_dim)
    indexer = {name: params["indexer"][name] for name in ("wq_b", "weights_proj")}
    keys = sum(looked) * quant.index_bytes(cfg.index_head_dim)
    row = cfg.engram_columns * (cfg.engram_head_dim + cfg.engram_head_dim // quant.GROUP)
    engram = sum(nbytes(each["wkv"]) for each in params["engram"])
    return {
        "attention": nbytes(layers["attn"]) + batch * cached,
        "indexer": nbytes(indexer) + batch * keys,
        "compressor": nbytes(params["compressor"])
        + nbytes({n: params["indexer"][n] for n in ("wk", "k_norm")}),
        "moe": nbytes(ffn["gate"]) + nbytes(ffn["shared_experts"]) + sum(touched) * expert,
        "mhc": nbytes([layers["hc_attn"], layers["hc_ffn"]]),
        "engram": engram + batch * row * len(params["engram"]),
        "head": nbytes(params["head"]),
        "sampling": 0.0,
        "other": batch * 2 * cfg.hidden_size,
    }


def _entries_scored(cfg: ModelConfig, kind: LayerKind, length: int) -> int:
    if not kind.index_source:
        return 0
    entries = length // kind.ratio
    if kind.uses_candidates:
        entries = min(entries, cfg.candidate_topk_blocks * cfg.candidate_block_size)
    return entries


def whole_model(
    cfg: ModelConfig, whole: ModelConfig, layer_ms: list[float], once_ms: float, engram_ms: float
) -> dict[str, float]:
    """Milliseconds of a step of all layers, from those of the slice's layers without Engram.

    Layers of one role are taken to cost what the slice's layers of that role cost on average; low
    and high take the fastest and the slowest of them.
    """
    by_role: dict[str, list[float]] = {}
    for kind, ms in zip(cfg.kinds(), layer_ms, strict=True):
        by_role.setdefault(kind.role, []).append(ms)
    roles = [kind.role for kind in whole.kinds()]
    fixed = once_ms + engram_ms * len(whole.engram_layer_ids) / len(cfg.engram_layer_ids)

    def total(of: Any) -> float:
        return fixed + sum(of(by_role[role]) for role in roles)

    return {
        "ms": total(lambda each: sum(each) / len(each)), "low_ms": total(min),
        "high_ms": total(max),
    }  # fmt: skip
