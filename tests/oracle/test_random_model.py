"""Random models obey the rules of a valid configuration and survive the trip through a folder."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import Oracle, dequantize, random_model, read_folder
from tests.oracle.layout import Layout
from tests.oracle.weights import read_tensors


@given(data=st.data(), vision=st.booleans())
@settings(max_examples=60, deadline=None)
def test_configurations_are_valid(data, vision):
    config = random_model.random_config(data.draw, vision=vision)
    text = config["text_config"]
    layout = Layout(text)
    encoder = layout.n_encoder
    ratios = text["compress_ratios"]
    assert len(ratios) == len(layout.layers) + len(layout.draft_layers)
    for layer in layout.layers:
        if ratios[layer]:
            assert ratios[layout.kv_source(layer)] == ratios[layer]
    assert set(text["kv_source_layer_ids"]) <= set(text["index_source_layer_ids"])
    assert layout.makes_kv(layout.candidate_source)
    size, blocks = text["candidate_block_size"], text["candidate_topk_blocks"]
    assert (blocks - 1) * size + 1 >= text["index_topk"]
    assert all(layer < encoder for layer in text["engram_layer_ids"])
    assert all(layer >= encoder for layer in text["dspark_target_layer_ids"])
    assert text["num_attention_heads"] % text["o_groups"] == 0
    assert text["qk_rope_head_dim"] <= min(text["head_dim"], text["index_head_dim"])
    assert text["num_experts_per_tok"] <= text["n_routed_experts"]
    assert text["dspark_num_experts_per_tok"] <= text["dspark_n_routed_experts"]


@pytest.mark.parametrize("quantized", [True, False])
def test_a_folder_holds_what_was_drawn(tmp_path, quantized):
    rng = np.random.default_rng(11)
    config = random_model.random_config(rng, quantized=quantized, vision=True)
    tensors = random_model.random_weights(config, rng)
    folder = random_model.write_folder(tmp_path / "model", config, tensors)
    stored = read_tensors(folder / "model.safetensors")
    assert list(stored) == list(tensors)
    for name, (dtype, raw) in tensors.items():
        assert stored[name][0] == dtype
        assert np.array_equal(stored[name][1], raw)
    types = {dtype for dtype, _ in tensors.values()}
    assert types == {"BF16", "F32", "F8_E4M3", "F8_E8M0"} | ({"I8"} if quantized else set())
    read_config, weights = read_folder(folder)
    assert read_config == config
    np.testing.assert_equal(weights, dequantize(tensors))


def test_storage_keeps_the_drawn_numbers_within_its_precision():
    rng = np.random.default_rng(5)
    values = rng.normal(size=(40, 96)).astype(np.float32)
    for storage, steps in (("BF", 2**-8), ("F8", 2**-4), ("TABLE", 2**-4), ("F4", 2**-2)):
        name = "engram.embed.weight" if storage == "TABLE" else "x.weight"
        back = dequantize(random_model.store(name, storage, values))[name]
        assert np.abs(back - values).max() <= steps * np.abs(values).max()


def test_expert_scales_leave_room_under_the_clamp():
    rng = np.random.default_rng(2)
    config = random_model.random_config(rng, quantized=True)
    tensors = random_model.random_weights(config, rng)
    exponents = [
        raw.astype(int) - 127
        for name, (_, raw) in tensors.items()
        if ".experts." in name and name.endswith("scale")
    ]
    assert -6 < np.mean(np.concatenate([e.ravel() for e in exponents])) < -4


@pytest.mark.parametrize("seed", range(4))
def test_the_oracle_runs_them(seed):
    rng = np.random.default_rng(seed)
    config = random_model.random_config(rng)
    tensors = random_model.random_weights(config, rng)
    token_map = random_model.random_token_map(config, rng)
    text = config["text_config"]
    assert len(set(token_map)) == text["engram_compressed_vocab_size"]
    oracle = Oracle(config, dequantize(tensors), token_map, True, True)
    state = oracle.new_state()
    records = oracle.prefill(state, rng.integers(0, text["vocab_size"], 30).tolist())
    logits = np.array([record.logits for record in records])
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 10
    draft = oracle.draft(state, 4)
    assert draft.logits.shape == (text["dspark_block_size"], text["vocab_size"])
    assert np.isfinite(draft.confidence).all()
