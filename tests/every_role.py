"""A small random model with every kind of layer a model can have, and sequences for it.

Window only; full m=2 with Engram; reuse; full m=1 with candidates; reindex. Window and pool are
small, so that 48 tokens wrap every ring and leave candidate blocks out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import checkpoint, resources, tables
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.determinism import feeding
from deepinfer_jax.determinism.feeding import Text
from deepinfer_jax.loading import Model
from deepinfer_jax.model import draft
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.numerics.settings import Form
from deepinfer_jax.text import load_tokenizer
from tests.oracle import Oracle, dequantize, random_model
from tests.oracle.storage import store
from tests.oracle.weights import Tensors, widen

CONFIG_FILE = Path(__file__).with_name("every_role.json")
# Slots and capacity are those of tests/invariance, so that calls of 64 rows share its program.
SLOTS, CAPACITY, POSITIONS = 64, 96, 640


@functools.cache
def sources() -> tuple[dict, Tensors, np.ndarray]:
    """Configuration, tensors of released storage and token map of the model that is fed here.

    One group of the latents is scaled to where the FP4 quantizer of the main KV is not idempotent.
    """
    config = json.loads(CONFIG_FILE.read_text())
    rng = np.random.default_rng(7)
    tensors = random_model.random_weights(config, rng)
    for layer in config["text_config"]["kv_source_layer_ids"]:
        name = f"layers.{layer}.attn.compressor.norm.weight"
        gain = widen(*tensors[name])
        gain[:16] *= 0.0095
        tensors |= store(name, "BF", gain)
    return config, tensors, random_model.random_token_map(config, rng)


@functools.cache
def model(dtype: str, rows: Form = "tiled") -> Model:
    """The model of `sources` in the shipped numerics ("bfloat16") or in "float32".

    The numerics switch to long tiles at 16 rows, so that both tile heights are in use. Its
    tokenizer is the shipped one, which has more ids than the model.
    """
    config, tensors, token_map = sources()
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model.write_folder(Path(scratch), config, tensors)
        params = checkpoint.load_params(folder)
        cfg = ModelConfig.from_json(folder)
    start = {"float32": Numerics.fp32(), "bfloat16": Numerics.native()}[dtype]
    numerics = dataclasses.replace(start, long_rows=16, rows=rows)
    made = tables.make_tables(cfg, token_map, POSITIONS)
    tokenizer = load_tokenizer(resources.model_folder("spark-tiny"))
    return Model("every-role", cfg, numerics, params, made, tokenizer)


def oracle(replay: tuple[str, int] = ("off", 0)) -> Oracle:
    """The slow model of the same weights, in float64."""
    config, tensors, token_map = sources()
    return Oracle(config, dequantize(tensors), token_map, replay=replay)


def text(cfg: ModelConfig, length: int, seed: int, image: range = range(0)) -> Text:
    """A random sequence, with an image span at the positions `image`; some n-grams repeat."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, cfg.vocab_size, length).astype(np.int32)
    tokens[length // 2 : length // 2 + 5] = tokens[3:8]
    inside = np.isin(np.arange(length), image)
    embeddings = rng.normal(size=(length, cfg.hidden_size)).astype(np.float32)
    return Text(tokens, inside, embeddings * inside[:, None])


def _drafts(params, made, cache, slots, positions, anchors, cfg, numerics):
    def greedy(logits, *_):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return draft.draft(params, made, cache, slots, positions, anchors, greedy, cfg, numerics)


_drafted = jax.jit(_drafts, static_argnames=("cfg", "numerics"))


def draft_of(
    m: Model, cache: Cache, slots: Sequence[int], positions: Sequence[int], anchors: Sequence[int]
) -> draft.Draft:
    """Greedy drafts after `anchors` at `positions` of `slots` (three of them; -1: none)."""
    where = [np.array(v, np.int32) for v in (slots, positions, anchors)]
    made = _drafted(m.params, m.tables, cache, *where, m.cfg, m.numerics)
    return jax.tree.map(np.asarray, made)


def garbage(m: Model) -> Cache:
    """A spoiled cache of SLOTS slots."""
    return feeding.garbage(m, SLOTS, CAPACITY)
