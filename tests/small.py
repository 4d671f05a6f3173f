"""A small configuration with every part of the architecture, and parameters of random bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from deepinfer_jax import params
from deepinfer_jax.config import ModelConfig, VisionConfig

VISION = VisionConfig(
    num_hidden_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    intermediate_size=20,
    patch_size=2,
    rope_theta=10000.0,
    downsample_ratio=2,
    max_image_tokens=9,
    min_pixels=16,
)

# Sizes differ from each other as far as the multiples of 32 allow.
CONFIG = ModelConfig(
    vocab_size=131,
    hidden_size=64,
    moe_intermediate_size=96,
    num_hidden_layers=5,
    num_nextn_predict_layers=2,
    num_attention_heads=6,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=160,
    o_lora_rank=32,
    o_groups=3,
    swiglu_limit=2.0,
    rms_norm_eps=1e-20,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_factor=16.0,
    rope_beta_fast=32.0,
    rope_beta_slow=1.0,
    rope_original_length=48,
    max_position_embeddings=200,
    n_routed_experts=7,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
    sliding_window=12,
    compress_ratios=(0, 2, 2, 1, 1, 0, 0),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    index_n_heads=2,
    index_head_dim=32,
    index_topk=5,
    candidate_source_layer_id=3,
    candidate_topk_blocks=4,
    candidate_block_size=3,
    engram_layer_ids=(0, 2),
    engram_num_embeddings=(61, 81),
    engram_max_ngram_size=3,
    engram_n_heads=2,
    engram_head_dim=32,
    engram_vocab_size=11,
    engram_compressed_vocab_size=83,
    engram_pad_token_id=2,
    dspark_block_size=3,
    dspark_noise_token_id=130,
    dspark_target_layer_ids=(3, 4),
    dspark_markov_rank=16,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=3,
    image_token_id=129,
    vision=VISION,
)
PLAIN = dataclasses.replace(CONFIG, quantized=False, vision=None, image_token_id=None)
# No global KV, no Engram, no draft: some stacks are empty, some parts absent.
WINDOW_ONLY = dataclasses.replace(
    PLAIN,
    num_nextn_predict_layers=0,
    compress_ratios=(0,) * 5,
    kv_source_layer_ids=(),
    index_source_layer_ids=(),
    candidate_source_layer_id=-1,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    dspark_target_layer_ids=(),
)


def random_bits(cfg: ModelConfig, seed: int = 0) -> params.Params:
    """The tree of `cfg` in NumPy arrays of random bytes: every code, NaN payloads, denormals."""
    rng = np.random.default_rng(seed)

    def draw(spec: params.Spec) -> np.ndarray:
        size = spec.dtype.itemsize * int(np.prod(spec.shape))
        return np.frombuffer(rng.bytes(size), spec.dtype).reshape(spec.shape)

    return jax.tree.map(draw, params.abstract(cfg))


def bits(leaf: Any) -> np.ndarray:
    """An array as bytes, for comparisons in which a NaN equals itself."""
    return np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)


def same_tree(got: Any, want: Any) -> None:
    """Equal structure, paths, dtypes, shapes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for path, leaf in params.by_path(want).items():
        other = params.by_path(got)[path]
        assert (other.shape, other.dtype) == (leaf.shape, leaf.dtype), path
        np.testing.assert_array_equal(bits(other), bits(leaf), err_msg=path)
