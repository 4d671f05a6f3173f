"""A configuration that trains in seconds, with every part that training treats on its own."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from deepinfer_jax import tables
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Params
from deepinfer_jax.training import masters
from tests import small

LENGTH = 24

# One window layer, one pooled source, one source with re-selection; every list is shorter than
# what is visible, so that a selection is a selection.
CONFIG: ModelConfig = dataclasses.replace(
    small.PLAIN,
    quantized=True,
    vocab_size=67,
    hidden_size=32,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_nextn_predict_layers=1,
    num_attention_heads=2,
    q_lora_rank=32,
    o_groups=1,
    sliding_window=4,
    compress_ratios=(0, 2, 1, 0),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2),
    candidate_source_layer_id=2,
    index_topk=4,
    candidate_topk_blocks=2,
    engram_layer_ids=(1,),
    engram_num_embeddings=(64,),
    engram_n_heads=1,
    engram_vocab_size=20,
    engram_compressed_vocab_size=67,
    dspark_noise_token_id=66,
    dspark_target_layer_ids=(2,),
    n_routed_experts=5,
    rms_norm_eps=1e-6,
    swiglu_limit=10.0,
)


@functools.cache
def table() -> tables.Tables:
    """Its tables, with the identity as token map."""
    return tables.make_tables(CONFIG, np.arange(67, dtype=np.int32), LENGTH)


@functools.cache
def values() -> Params:
    """Fresh masters."""
    return masters.init(3, CONFIG)


def batch(rows: int = 2) -> np.ndarray:
    """Rows with a pattern to learn (every token twice), the last row padded."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(6, 60, (rows, LENGTH)).astype(np.int32)
    tokens[:, 1::2] = tokens[:, ::2]
    tokens[:, 0] = 0
    tokens[-1, LENGTH - 3 :] = 2
    return tokens
