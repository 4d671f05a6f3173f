"""The configuration: both JSON forms, every refusal, the roles of the released layers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from deepinfer_jax.config import ModelConfig
from tests.images.files import VISION
from tests.small import CONFIG, PLAIN, WINDOW_ONLY

RECORDED = Path(__file__).parent / "golden"
FOLDERS = sorted(path.parent.name for path in RECORDED.glob("*/inference_config.json"))


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return ModelConfig.from_json(RECORDED / "released-config")


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_nested_and_flat_forms_agree(name: str) -> None:
    nested = ModelConfig.from_json(RECORDED / name)
    assert ModelConfig.from_json(RECORDED / name / "inference_config.json") == nested


@pytest.mark.parametrize("name", FOLDERS)
def test_a_config_survives_writing_and_reading(name: str) -> None:
    cfg = ModelConfig.from_json(RECORDED / name / "config.json")
    assert ModelConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg


@pytest.mark.parametrize("cfg", [CONFIG, PLAIN, WINDOW_ONLY])
def test_built_configs_survive_too(cfg: ModelConfig) -> None:
    assert ModelConfig.from_dict(cfg.to_dict()) == cfg


def test_released_values(released: ModelConfig) -> None:
    assert (released.hidden_size, released.num_hidden_layers, released.vocab_size) == (
        5120,
        40,
        129280,
    )
    assert released.rms_norm_eps == 1e-20
    assert isinstance(released.rope_theta, float)
    assert released.compress_ratios == (0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0)
    assert released.quantized
    assert released.vision is not None
    assert released.vision.min_pixels == 544**2
    assert released.vision.max_wh_ratio is None


def test_configs_are_hashable(released: ModelConfig) -> None:
    assert len({released, dataclasses.replace(released), CONFIG}) == 2


# -- roles -----------------------------------------------------------------------------------------

# (layers, role, ratio, uses candidates, Engram ordinal, tap), the table of docs/model.md 2
ROLES = [
    ([0], "window", 0, False, None, False),
    ([1], "window", 0, False, 0, False),
    ([2, 8], "full", 2, False, None, False),
    ([14], "full", 2, False, 1, False),
    ([*range(3, 8), *range(9, 14), *range(15, 20)], "reuse", 2, False, None, False),
    ([20], "full+candidates", 1, False, None, False),
    ([24, 28, 32, 36], "reindex", 1, True, None, False),
    ([21, 22, 23, 25, 26, 27, 29, 30, 31, 33, 34, 35], "reuse", 1, False, None, False),
    ([37, 38, 39], "reuse", 1, False, None, True),
]


def test_released_roles(released: ModelConfig) -> None:
    kinds = released.kinds()
    assert sorted(layer for layers, *_ in ROLES for layer in layers) == list(range(40))
    for layers, role, ratio, candidates, engram, tap in ROLES:
        for layer in layers:
            kind = kinds[layer]
            got = (kind.role, kind.ratio, kind.uses_candidates, kind.engram, kind.tap)
            assert got == (role, ratio, candidates, engram, tap), layer
            assert kind.decoder == (layer >= 20)
            assert kind.boundary == (layer == 20)
            assert kind.kv_source == (layer in (2, 8, 14, 20))
            assert kind.index_source == (kind.kv_source or layer in (24, 28, 32, 36))
            assert kind.candidate_source == (layer == 20)


def test_released_derived_sizes(released: ModelConfig) -> None:
    assert released.ratios == (2, 1)
    assert released.num_encoder_layers == 20
    assert released.kv_sources(2) == (2, 8, 14)
    assert released.kv_sources(1) == (20,)
    assert released.engram_columns == 24
    assert released.engram_lookback == 3


def test_a_model_without_decoder_has_only_encoder_layers() -> None:
    assert WINDOW_ONLY.num_encoder_layers == 5
    assert WINDOW_ONLY.ratios == ()
    assert {kind.role for kind in WINDOW_ONLY.kinds()} == {"window"}


# -- refusals --------------------------------------------------------------------------------------

INVALID = [
    ({"rope_theta": float("nan")}, "rope_theta must be finite"),
    ({"hidden_size": 0}, "hidden_size must be positive, got 0"),
    ({"swiglu_limit": -1.0}, "swiglu_limit must be positive"),
    ({"index_topk": 0}, "index_topk must be positive"),
    ({"engram_n_heads": 0}, "engram_n_heads must be positive"),
    ({"dspark_block_size": 0}, "dspark_block_size must be positive"),
    ({"hc_eps": -1.0}, "hc_eps must not be negative"),
    ({"eos_token_id": 131}, "eos_token_id must be a token id, got 131"),
    ({"o_groups": 4}, "o_groups=4 must divide num_attention_heads=6"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
    ({"qk_rope_head_dim": 64}, "at most head_dim=32"),
    ({"head_dim": 48}, "head_dim must be a multiple of 32"),
    ({"index_head_dim": 40}, "index_head_dim must be a multiple of 32"),
    ({"engram_head_dim": 16}, "engram_head_dim must be a multiple of 32"),
    ({"moe_intermediate_size": 100}, "moe_intermediate_size must be a multiple of 32 when quant"),
    ({"num_experts_per_tok": 8}, "num_experts_per_tok=8 exceeds n_routed_experts=7"),
    ({"compress_ratios": (0, 2, 2, 1)}, "compress_ratios must have 5 or 7 entries, got 4"),
    ({"compress_ratios": (0, 2, 2, 1, 1, 0, 1)}, "DSpark layers must be 0"),
    ({"compress_ratios": (0, 3, 3, 1, 1)}, "compress_ratios must be 0, 1 or 2"),
    ({"kv_source_layer_ids": (3, 1)}, "kv_source_layer_ids must be ascending layer numbers"),
    ({"engram_layer_ids": (0, 5)}, "engram_layer_ids must be ascending layer numbers below 5"),
    ({"dspark_target_layer_ids": (3, 3)}, "dspark_target_layer_ids must be ascending"),
    ({"index_source_layer_ids": (1, 4)}, "every kv source layer must be an index source"),
    ({"index_source_layer_ids": (0, 1, 3, 4)}, "window-only layer 0 cannot be an index source"),
    ({"compress_ratios": (1, 2, 2, 1, 1)}, "layer 0 has ratio 1 but no kv source"),
    ({"compress_ratios": (0, 2, 1, 1, 1)}, "layer 2 has ratio 1, its kv source 1 another"),
    ({"candidate_source_layer_id": 4}, "candidate_source_layer_id=4 must be one of"),
    ({"candidate_source_layer_id": 1}, "no kv source may follow the candidate source 1"),
    ({"candidate_block_size": 0}, "candidate_block_size must be positive"),
    ({"candidate_topk_blocks": 1}, "candidate pool 1 .* at least index_topk=5"),
    ({"candidate_topk_blocks": 2}, "candidate pool 4 .* at least index_topk=5"),
    ({"engram_num_embeddings": (61,)}, "must have the same length"),
    ({"engram_pad_token_id": 131}, "engram_pad_token_id must be a token id, got 131"),
    ({"engram_max_ngram_size": 1}, "engram_max_ngram_size must be at least 2"),
    ({"dspark_target_layer_ids": ()}, "dspark_target_layer_ids must name at least one layer"),
    ({"dspark_noise_token_id": 131}, "dspark_noise_token_id=131 must be a token id"),
    ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok exceeds"),
    (
        {"vision": dataclasses.replace(VISION, patch_size=0)},
        "vision_config: patch_size must be positive, got 0",
    ),
    (
        {"vision": dataclasses.replace(VISION, max_wh_ratio=0.0)},
        "max_wh_ratio must be positive, got 0",
    ),
    (
        {"vision": dataclasses.replace(VISION, max_image_tokens=3)},
        "max_image_tokens must be at least 4",
    ),
    (
        {"vision": dataclasses.replace(VISION, num_attention_heads=3)},
        "hidden_size=32 must be heads of a multip",
    ),
    ({"vision": VISION, "image_token_id": 131}, "image_token_id=131 must be a token id"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID, ids=[m[:40] for _, m in INVALID])
def test_inconsistent_fields_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_an_unquantized_model_may_have_any_width() -> None:
    assert dataclasses.replace(PLAIN, moe_intermediate_size=100).moe_intermediate_size == 100


def _edit(path: tuple[str, ...], value) -> dict:
    """The nested form with one entry replaced, or removed when `value` is Ellipsis."""
    data = json.loads(json.dumps(CONFIG.to_dict()))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if value is ...:
        del inner[path[-1]]
    return data


TEXT = "text_config"
UNREADABLE = [
    ((TEXT, "vocab_size"), ..., "missing field.* 'vocab_size'"),
    ((TEXT, "vocab_size"), "131", "'vocab_size' must be int, got '131'"),
    ((TEXT, "vocab_size"), True, "'vocab_size' must be int, got True"),
    ((TEXT, "vocab_size"), 131.0, "'vocab_size' must be int, got 131.0"),
    ((TEXT, "rope_theta"), None, "'rope_theta' must be float"),
    ((TEXT, "norm_topk_prob"), 1, "'norm_topk_prob' must be bool"),
    ((TEXT, "engram_layer_ids"), [0, 1.5], "'engram_layer_ids' must be tuple"),
    ((TEXT, "engram_layer_ids"), 3, "'engram_layer_ids' must be tuple"),
    ((TEXT, "rope_scaling"), None, "'rope_scaling' must be an object"),
    ((TEXT, "rope_scaling", "factor"), ..., "missing field.* 'factor'"),
    ((TEXT, "rope_scaling", "rope_type"), "linear", "'rope_type' must be 'yarn', got 'linear'"),
    ((TEXT, "hidden_act"), "gelu", "'hidden_act' must be 'silu' for this architecture"),
    ((TEXT, "tie_word_embeddings"), True, "'tie_word_embeddings' must be False"),
    ((TEXT, "n_shared_experts"), 2, "'n_shared_experts' must be 1"),
    ((TEXT,), 3, "'text_config' must be an object, got 3"),
    (("eos_token_id",), "1", "'eos_token_id' must be int"),
    (("vision_config",), [1], "'vision_config' must be an object"),
    (("vision_config", "patch_size"), ..., "missing field.* 'patch_size'"),
    (("quantization_config",), "fp8", "'quantization_config' must be an object"),
    (("quantization_config", "weight_block_size"), [128, 128], "'weight_block_size' must be"),
    (("quantization_config", "scale_fmt"), "float", "'scale_fmt' must be 'ue8m0'"),
]


@pytest.mark.parametrize(("path", "value", "message"), UNREADABLE)
def test_unreadable_fields_are_refused(path, value, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(_edit(path, value)))
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_json(tmp_path)
    assert str(file) in str(caught.value)


def test_a_missing_flat_field_is_named() -> None:
    data = json.loads((RECORDED / "released-config" / "inference_config.json").read_text())
    del data["moe_inter_dim"], data["window_size"]
    with pytest.raises(ValueError, match=r"missing field.* 'moe_inter_dim', 'window_size'"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize("content", [b"{", b"[]", b"3", b"\xff"])
def test_what_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    said = r"config.json (is not JSON|must hold a JSON object|is not UTF-8).*; get it again"
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_json(tmp_path)


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("text", ["DEEP", '{"text_config": DEEP}', '{"text_config": {"a": DEEP}}'])
def test_deep_nesting_is_refused(text: str, depth: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text.replace("DEEP", "[" * depth + "]" * depth))
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_json(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json at .*give a model folder"):
        ModelConfig.from_json(tmp_path)
