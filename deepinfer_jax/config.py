"""Configuration of the model: what `config.json` says, typed and validated, and its layer roles.

Three kinds of configuration are never mixed: `ModelConfig` (from the checkpoint), `Numerics` (what
fixes the bits, see `numerics`), and the sizes of caches and batches (which change no result).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax import strict_json, validity


@dataclasses.dataclass(frozen=True, slots=True)
class VisionConfig:
    """Vision tower sizes (docs/model.md 12)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKind:
    """What one backbone layer does; layers of equal kind run the same program.

    `ratio` is the compression ratio m of the global KV it reads (0: window only). `engram` is the
    ordinal of its Engram layer or None; `tap` marks a layer whose input DSpark reads; `boundary` is
    the first decoder layer, where a prefill may drop rows (docs/model.md 11).
    """

    ratio: int
    kv_source: bool
    index_source: bool
    candidate_source: bool
    uses_candidates: bool
    engram: int | None
    tap: bool
    decoder: bool
    boundary: bool

    @property
    def role(self) -> str:
        """Name of the attention mode (docs/model.md 2)."""
        if self.ratio == 0:
            return "window"
        if self.kv_source:
            return "full+candidates" if self.candidate_source else "full"
        return "reindex" if self.index_source else "reuse"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One V4.1-family model; fields are named as in the released `config.json`, see `from_json`."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_length: int
    max_position_embeddings: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_compressed_vocab_size: int
    engram_pad_token_id: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    gate_temp: float = 1.0
    norm_topk_prob: bool = True
    quantized: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        validity.check(self)

    # -- derived sizes ---------------------------------------------------------------------------

    @property
    def ratios(self) -> tuple[int, ...]:
        """Distinct compression ratios of layers with global KV, in layer order (released: 2, 1)."""
        backbone = self.compress_ratios[: self.num_hidden_layers]
        return tuple(dict.fromkeys(m for m in backbone if m > 0))

    @property
    def num_encoder_layers(self) -> int:
        """Index of the first ratio-1 layer (docs/model.md 2), or all layers when there is none."""
        backbone = self.compress_ratios[: self.num_hidden_layers]
        return backbone.index(1) if 1 in backbone else self.num_hidden_layers

    @property
    def most_drafts(self) -> int:
        """Drafts that one pass of the drafter can make; 0 without a drafter."""
        return self.dspark_block_size if self.num_nextn_predict_layers else 0

    @property
    def engram_lookback(self) -> int:
        """Tokens before the current one that an Engram row may depend on."""
        return self.engram_max_ngram_size - 1

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer: (orders) x (heads)."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def kv_sources(self, ratio: int) -> tuple[int, ...]:
        """Layers that own compressed KV of this ratio, ascending."""
        return tuple(s for s in self.kv_source_layer_ids if self.compress_ratios[s] == ratio)

    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every backbone layer (derivation rules of docs/model.md 2)."""
        return tuple(self._kind(layer) for layer in range(self.num_hidden_layers))

    def _kind(self, layer: int) -> LayerKind:
        source = self.candidate_source_layer_id
        is_index = layer in self.index_source_layer_ids
        return LayerKind(
            ratio=self.compress_ratios[layer],
            kv_source=layer in self.kv_source_layer_ids,
            index_source=is_index,
            candidate_source=layer == source,
            uses_candidates=is_index and 0 <= source < layer,
            engram=self.engram_layer_ids.index(layer) if layer in self.engram_layer_ids else None,
            tap=layer in self.dspark_target_layer_ids,
            decoder=layer >= self.num_encoder_layers,
            boundary=layer == self.num_encoder_layers,
        )

    # -- reading and writing ---------------------------------------------------------------------

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read a `config.json` in nested (Hugging Face) or flat (reference `inference/`) form.

        Raises:
          FileNotFoundError: no such file.
          ValueError: not JSON, or a field is missing, of the wrong type or inconsistent; the
            message names the field and the file.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"no config.json at {path}: give a model folder or the path of its config.json"
            )
        data = strict_json.read_object(path)
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        except RecursionError:  # from quoting a value
            raise ValueError(f"{path} is nested too deep for a configuration") from None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The same from parsed JSON, nested or flat (told apart by the key `text_config`)."""
        _mapping("config.json", data)
        return cls(**(_from_nested(data) if "text_config" in data else _from_flat(data)))

    def to_dict(self) -> dict[str, Any]:
        """The nested form, which `from_dict` reads back to an equal config."""
        return _to_nested(self)


_NESTED = {  # our field -> key of text_config, where the two differ
    "rope_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_original_length": "original_max_position_embeddings",
}
_FLAT = {  # our field -> key of the flat form, where the two differ
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_original_length": "original_seq_len",
    "max_position_embeddings": "max_seq_len",
    "num_experts_per_tok": "n_activated_experts",
    "routed_scaling_factor": "route_scale",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}
_VISION_FLAT = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "rope_theta": "vision_rope_theta",
    "downsample_ratio": "vision_downsample_ratio",
    "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio",
}
_FIXED = {  # keys whose other values this architecture does not define
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "score_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
}
_TOP = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_NOT_IN_JSON = frozenset(("quantized", "vision", *_TOP))


def _typed(key: str, value: Any, kind: str) -> Any:
    """`value` checked against an annotation such as `int`, `tuple[int, ...]` or `X | None`."""
    if kind.endswith("| None") and value is None:
        return None
    kind = kind.removesuffix("| None").strip()
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind == "int" and is_int:
        return value
    if kind == "float" and (is_int or isinstance(value, float)):
        return float(value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if (
        kind.startswith("tuple")
        and isinstance(value, list | tuple)
        and all(type(v) is int for v in value)
    ):
        return tuple(value)
    raise ValueError(f"field {key!r} must be {kind}, got {value!r}")


def _read(cls: type, data: Mapping[str, Any], names: Mapping[str, str], skip=frozenset()) -> dict:
    """Constructor arguments of `cls` from JSON keys `names.get(field, field)`."""
    values, missing = {}, []
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        key = names.get(field.name, field.name)
        if key in data:
            values[field.name] = _typed(key, data[key], str(field.type))
        elif field.default is dataclasses.MISSING:
            missing.append(key)
    if missing:
        raise ValueError(f"missing field(s) {', '.join(repr(m) for m in missing)}")
    return values


def _check_fixed(data: Mapping[str, Any]) -> None:
    for key, value in _FIXED.items():
        if key in data and data[key] != value:
            raise ValueError(
                f"field {key!r} must be {value!r} for this architecture, got {data[key]!r}"
            )


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key!r} must be an object, got {value!r}")
    return value


def _from_nested(data: Mapping[str, Any]) -> dict[str, Any]:
    text = dict(_mapping("text_config", data["text_config"]))
    scaling = _mapping("rope_scaling", text.get("rope_scaling"))
    if scaling.get("rope_type", "yarn") != "yarn":
        raise ValueError(f"field 'rope_type' must be 'yarn', got {scaling['rope_type']!r}")
    text.update({k: v for k, v in scaling.items() if k != "rope_type"})
    _check_fixed(text)
    values = _read(ModelConfig, text, _NESTED, _NOT_IN_JSON)
    kinds = {f.name: str(f.type) for f in dataclasses.fields(ModelConfig)}
    values.update({k: _typed(k, data[k], kinds[k]) for k in _TOP if k in data})
    quantization = data.get("quantization_config")
    values["quantized"] = quantization is not None
    if quantization is not None:
        _check_quantization(_mapping("quantization_config", quantization))
    vision = data.get("vision_config")
    if vision:
        vision = _mapping("vision_config", vision)
        values["vision"] = VisionConfig(**_read(VisionConfig, vision, {}))
    return values


def _check_quantization(quantization: Mapping[str, Any]) -> None:
    expected = {"weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    for key, value in expected.items():
        if quantization.get(key, value) != value:
            raise ValueError(
                f"quantization_config field {key!r} must be {value!r}, got {quantization[key]!r}"
            )


def _from_flat(data: Mapping[str, Any]) -> dict[str, Any]:
    _check_fixed(data)
    data = {"max_seq_len": 1 << 20, **data}  # a run-time value there, absent from the released file
    values = _read(ModelConfig, data, _FLAT, _NOT_IN_JSON)
    values["quantized"] = data.get("expert_dtype") is not None
    if data.get("vision_n_layers"):
        values["vision"] = VisionConfig(**_read(VisionConfig, data, _VISION_FLAT))
        values["image_token_id"] = data.get("image_token_id")
    return values


def _to_nested(cfg: ModelConfig) -> dict[str, Any]:
    text: dict[str, Any] = {"model_type": "deepseek_v41_text"}
    scaling: dict[str, Any] = {"rope_type": "yarn"}
    for field in dataclasses.fields(ModelConfig):
        if field.name in _NOT_IN_JSON:
            continue
        value = getattr(cfg, field.name)
        value = list(value) if isinstance(value, tuple) else value
        (scaling if field.name in _NESTED else text)[_NESTED.get(field.name, field.name)] = value
    text["rope_scaling"] = scaling
    data = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **{key: getattr(cfg, key) for key in _TOP},
        "text_config": text,
    }
    if cfg.vision is not None:
        data["vision_config"] = dataclasses.asdict(cfg.vision)
    if cfg.quantized:
        data["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    return data
