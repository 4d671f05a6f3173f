"""A random model in a folder of its own, for tests of how the parts are put together.

It has two layers: a window with Engram, and compressed KV with an index of its own; and a drafter.
The other kinds of layers are those of tests/every_role.py. Its tokenizer is the shipped one. Built
once per process and removed at its end.
"""

import functools
import json
import shutil
import tempfile
import weakref
from pathlib import Path

import jax

from deepinfer_jax import checkpoint, loading, params, resources
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.text import load_tokenizer, save_token_map

_SMALLER = {
    "vocab_size": 2048,
    "hidden_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "n_routed_experts": 5,
    "compress_ratios": [0, 2, 0],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1],
    "candidate_source_layer_id": -1,
    "dspark_target_layer_ids": [1],
    "engram_compressed_vocab_size": 1640,
}


@functools.cache
def folder() -> Path:
    """A checkpoint folder: config, weights, tokenizer, token map."""
    made = Path(tempfile.mkdtemp(prefix="deepinfer-jax-model-"))
    weakref.finalize(folder, shutil.rmtree, made, ignore_errors=True)
    data = json.loads(resources.config_file("tiny-s").read_text("utf-8"))
    data["text_config"].update(_SMALLER)
    cfg = ModelConfig.from_dict(data)
    checkpoint.save_params(params.init(jax.random.key(7), cfg), cfg, made, max_shard_bytes=1 << 19)
    shutil.copy(resources.PACKAGE / "assets" / "spark-tiny" / "tokenizer.json", made)
    save_token_map(made)
    return made


@functools.cache
def model() -> loading.Model:
    """The same, loaded."""
    return loading.load(folder())


@functools.cache
def tokenizer():
    """Its tokenizer."""
    return load_tokenizer(folder())
