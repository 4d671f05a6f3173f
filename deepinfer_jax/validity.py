"""Whether the fields of a `ModelConfig` make a model: ranges, widths, roles that fit together.

`config` calls this while it builds a `ModelConfig`, so the argument is one in all but type.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

_POSITIVE = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim "
    "q_lora_rank o_lora_rank o_groups swiglu_limit rope_theta compress_rope_theta rope_factor "
    "rope_original_length max_position_embeddings n_routed_experts num_experts_per_tok "
    "sliding_window hc_mult hc_sinkhorn_iters gate_temp"
).split()
_POSITIVE_IF = {  # needed by a part of the model that a config may leave out
    "index_source_layer_ids": ("index_n_heads", "index_head_dim", "index_topk"),
    "engram_layer_ids": (
        "engram_n_heads",
        "engram_head_dim",
        "engram_vocab_size",
        "engram_compressed_vocab_size",
    ),
    "num_nextn_predict_layers": (
        "dspark_block_size",
        "dspark_markov_rank",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
    ),
}


def check(cfg: Any) -> None:
    """Raise a ValueError that names the first field that does not fit, its value and the rule."""
    _check_ranges(cfg)
    _check_sizes(cfg)
    _check_roles(cfg)
    _check_candidates(cfg)
    _check_engram_and_draft(cfg)
    _check_vision(cfg)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _check_ranges(cfg: Any) -> None:
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name} must be finite, got {value}")
    needed = (name for part, names in _POSITIVE_IF.items() if getattr(cfg, part) for name in names)
    for name in (*_POSITIVE, *needed):
        _require(getattr(cfg, name) > 0, f"{name} must be positive, got {getattr(cfg, name)}")
    for name in ("rms_norm_eps", "hc_eps", "num_nextn_predict_layers"):
        _require(getattr(cfg, name) >= 0, f"{name} must not be negative, got {getattr(cfg, name)}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(cfg, name)
        _require(0 <= token < cfg.vocab_size, f"{name} must be a token id, got {token}")


def _check_sizes(cfg: Any) -> None:
    heads, groups = cfg.num_attention_heads, cfg.o_groups
    _require(heads % groups == 0, f"o_groups={groups} must divide num_attention_heads={heads}")
    rope = cfg.qk_rope_head_dim
    _require(
        rope % 2 == 0 and 0 < rope <= min(cfg.head_dim, cfg.index_head_dim),
        f"qk_rope_head_dim must be even and at most head_dim={cfg.head_dim} and "
        f"index_head_dim={cfg.index_head_dim}, got {rope}",
    )
    for name in ("head_dim", "index_head_dim", "engram_head_dim"):
        width = getattr(cfg, name)
        _require(
            width % 32 == 0, f"{name} must be a multiple of 32 (KV quantizer groups), got {width}"
        )
    if cfg.quantized:
        names = "hidden_size moe_intermediate_size q_lora_rank o_lora_rank".split()
        for name in names:
            width = getattr(cfg, name)
            _require(
                width % 32 == 0, f"{name} must be a multiple of 32 when quantized, got {width}"
            )
    _require(
        cfg.num_experts_per_tok <= cfg.n_routed_experts,
        f"num_experts_per_tok={cfg.num_experts_per_tok} exceeds "
        f"n_routed_experts={cfg.n_routed_experts}",
    )


def _check_roles(cfg: Any) -> None:
    layers, ratios = cfg.num_hidden_layers, cfg.compress_ratios
    total = layers + cfg.num_nextn_predict_layers
    _require(
        len(ratios) in (layers, total),
        f"compress_ratios must have {layers} or {total} entries, got {len(ratios)}",
    )
    _require(
        not any(ratios[layers:]), "compress_ratios of the DSpark layers must be 0 (window only)"
    )
    _require(
        all(m in (0, 1, 2) for m in ratios), f"compress_ratios must be 0, 1 or 2, got {ratios}"
    )
    sources, indexers = cfg.kv_source_layer_ids, cfg.index_source_layer_ids
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids",
                 "dspark_target_layer_ids"):  # fmt: skip
        ids = getattr(cfg, name)
        _require(
            list(ids) == sorted(set(ids)) and all(0 <= i < layers for i in ids),
            f"{name} must be ascending layer numbers below {layers}, got {ids}",
        )
    _require(set(sources) <= set(indexers), "every kv source layer must be an index source layer")
    for layer in range(layers):
        source = max((s for s in sources if s <= layer), default=None)
        if ratios[layer] == 0:
            _require(layer not in indexers, f"window-only layer {layer} cannot be an index source")
        else:
            _require(
                source is not None, f"layer {layer} has ratio {ratios[layer]} but no kv source"
            )
            _require(
                ratios[layer] == ratios[source],
                f"layer {layer} has ratio {ratios[layer]}, its kv source {source} another",
            )


def _check_candidates(cfg: Any) -> None:
    source = cfg.candidate_source_layer_id
    if source < 0:
        return
    _require(
        source in cfg.kv_source_layer_ids,
        f"candidate_source_layer_id={source} must be one of kv_source_layer_ids",
    )
    later = [s for s in cfg.kv_source_layer_ids if s > source]
    _require(not later, f"no kv source may follow the candidate source {source}, got {later}")
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        _require(getattr(cfg, name) > 0, f"{name} must be positive, got {getattr(cfg, name)}")
    # The newest block is always kept and may hold one visible entry; the others are full.
    pool = (cfg.candidate_topk_blocks - 1) * cfg.candidate_block_size + 1
    _require(
        pool >= cfg.index_topk,
        f"candidate pool {pool} ((candidate_topk_blocks - 1) x candidate_block_size + 1, the "
        f"newest block just begun) must be at least index_topk={cfg.index_topk}",
    )


def _check_engram_and_draft(cfg: Any) -> None:
    _require(
        len(cfg.engram_layer_ids) == len(cfg.engram_num_embeddings),
        "engram_layer_ids and engram_num_embeddings must have the same length",
    )
    if cfg.engram_layer_ids:
        pad, orders = cfg.engram_pad_token_id, cfg.engram_max_ngram_size
        _require(0 <= pad < cfg.vocab_size, f"engram_pad_token_id must be a token id, got {pad}")
        _require(orders >= 2, f"engram_max_ngram_size must be at least 2, got {orders}")
    taps = cfg.dspark_target_layer_ids
    if cfg.num_nextn_predict_layers:
        _require(bool(taps), "dspark_target_layer_ids must name at least one layer")
        _require(
            0 <= cfg.dspark_noise_token_id < cfg.vocab_size,
            f"dspark_noise_token_id={cfg.dspark_noise_token_id} must be a token id",
        )
        _require(
            cfg.dspark_num_experts_per_tok <= cfg.dspark_n_routed_experts,
            "dspark_num_experts_per_tok exceeds dspark_n_routed_experts",
        )


def _check_vision(cfg: Any) -> None:
    vision, token = cfg.vision, cfg.image_token_id
    if vision is None:
        return
    given = dataclasses.asdict(vision).items()
    for name, value in ((name, value) for name, value in given if value is not None):
        _require(
            math.isfinite(value) and value > 0,
            f"vision_config: {name} must be positive, got {value}",
        )
    heads, width = vision.num_attention_heads, vision.hidden_size
    _require(
        width % (4 * heads) == 0,
        f"vision_config: hidden_size={width} must be heads of a multiple of 4 (rotation by row and "
        f"column), got num_attention_heads={heads}",
    )
    _require(
        vision.max_image_tokens >= 4,
        "vision_config: max_image_tokens must be at least 4, those of one cell, got "
        f"{vision.max_image_tokens}",
    )
    _require(
        token is None or 0 <= token < cfg.vocab_size, f"image_token_id={token} must be a token id"
    )
