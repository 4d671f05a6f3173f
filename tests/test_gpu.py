"""What a GPU must do: agree with the recorded numbers, repeat itself, and run the shipped model.

Run on a machine with one: `pytest -q -m gpu`. Invariance over batches is promised on CPU only.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax import checkpoint, params, rows, tables
from deepinfer_jax.cache import init_cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import forward, head
from deepinfer_jax.numerics import Numerics
from tests.golden.reader import folders

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", ["tiled", "batched"])
def test_recorded_logits(form, golden_root, tmp_path):
    folder = next(f for f in folders(golden_root) if f.name == "micro-bf16")
    where = folder.unpacked_model(tmp_path)
    cfg = dataclasses.replace(ModelConfig.from_json(where), quantized=False)
    numerics = dataclasses.replace(Numerics.fp32(), rows=form)
    weights = params.widen(checkpoint.load_params(where))
    recorded, tokens = folder.golden("fp32"), folder.inputs["tokens"]
    count, length = tokens.shape[0], recorded["prefill.argmax"].shape[1]
    made = tables.make_tables(cfg, folder.inputs["engram_token_map"], tokens.shape[1])
    cache = init_cache(cfg, numerics, count, tokens.shape[1])

    @jax.jit
    def run(weights, made, batch, cache):
        hidden, _ = forward.forward(weights, made, batch, cache, cfg, numerics)
        return head.logits(weights, hidden.output, numerics), hidden.routed

    batch = rows.batch_rows(jnp.asarray(tokens[:, :length]), jnp.full((count,), length))
    logits, routed = run(weights, made, batch, cache)
    logits = np.asarray(logits).reshape(count, length, -1)[:, recorded["prefill.logits_pos"]]
    np.testing.assert_allclose(logits, recorded["prefill.logits"], rtol=0, atol=1e-4)
    routed = np.asarray(routed).reshape(cfg.num_hidden_layers, count, length, -1)
    np.testing.assert_array_equal(routed, recorded["prefill.router_i"])


def test_the_shipped_model_repeats_itself():
    model = deepinfer_jax.load("spark-tiny")
    prompts = [[0, *model.tokenizer.encode_user(text)] for text in ("Once upon a time", "7 + 5 =")]
    first = deepinfer_jax.generate(model, prompts, max_tokens=24, seed=3)
    second = deepinfer_jax.generate(model, prompts, max_tokens=24, seed=3)
    assert [r.tokens for r in first] == [r.tokens for r in second]
    assert [r.logprobs for r in first] == [r.logprobs for r in second]
