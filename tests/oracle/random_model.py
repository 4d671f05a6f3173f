"""Small random models: configurations with every layer role, and weights in released storage.

The sizes are small and mostly different from each other, so that a swapped axis cannot pass.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies

from . import engram
from .inventory import inventory
from .storage import store
from .weights import Tensors, write_tensors

Choose = Callable[[Sequence[Any]], Any]

# Widths whose linears are quantized must be multiples of 32; the others need not be.
ALIGNED = {"hidden": (64, 96), "q_rank": (32, 128), "inner": (32, 64, 160), "o_rank": (32,)}
FREE = {"hidden": (40, 56), "q_rank": (20, 36), "inner": (12, 28), "o_rank": (10, 18)}


def chooser(source: Any) -> Choose:
    """A function that picks one of several options, from a NumPy Generator or hypothesis' draw."""
    if isinstance(source, np.random.Generator):
        return lambda options: options[int(source.integers(len(options)))]
    return lambda options: source(strategies.sampled_from(options))


def random_config(source: Any, quantized: bool | None = None, vision: bool = False) -> dict:
    """A valid nested configuration; `source` is a NumPy Generator or hypothesis' `draw`.

    quantized: released fp8 and fp4 storage or plain bf16 linears; None draws it. vision: add a
    vision tower, the image delimiters and `bias_vl`.
    """
    choose = chooser(source)
    if quantized is None:
        quantized = choose((True, False))
    vocabulary = choose((97, 131, 160))
    text = {"model_type": "deepseek_v41_text", "vocab_size": vocabulary}
    text |= _widths(choose, ALIGNED if quantized else FREE)
    text |= _roles(choose)
    text |= _engram(choose, text)
    text |= _draft(choose, text)
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": vocabulary - 2 if vision else None,
        "text_config": text,
    }
    if quantized:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    if vision:
        config["vision_config"] = _vision(choose)
    return config


def _widths(choose: Choose, sizes: dict[str, tuple[int, ...]]) -> dict:
    heads, groups = choose(((2, 1), (3, 3), (6, 2), (6, 3)))
    return {
        "hidden_size": choose(sizes["hidden"]),
        "moe_intermediate_size": choose(sizes["inner"]),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": choose((32, 64)),
        "qk_rope_head_dim": choose((8, 12, 16)),
        "q_lora_rank": choose(sizes["q_rank"]),
        "o_lora_rank": choose(sizes["o_rank"]),
        "o_groups": groups,
        "hidden_act": "silu",
        "swiglu_limit": choose((0.5, 2.0, 10.0)),
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": choose((4.0, 16.0)),
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": choose((32, 64)),
        },
        "n_routed_experts": choose((5, 7)),
        "n_shared_experts": 1,
        "num_experts_per_tok": choose((1, 2, 3)),
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": choose((1.5, 2.5)),
        "hc_mult": 4,
        "hc_sinkhorn_iters": choose((20, 6)),
        "hc_eps": 1e-6,
    }


def _roles(choose: Choose) -> dict:
    """Layer roles: window-only layers, ratio-2 Full layers, then one ratio-1 Full layer.

    Reuse layers follow some sources; a ratio-2 Reindex layer is rare, ratio-1 ones are not. The
    pool of candidates is never smaller than the top-k, even if its last block has one entry.
    """
    reuse = (["reuse"], [])
    first = ["full", *choose(reuse)]
    second = choose(([], ["full", *choose(reuse)]))
    halved = [*first, *second, *choose(([], [], ["reindex"]))]
    whole = ["full", *choose(reuse), "reindex", *choose(([], ["reuse"], ["reuse", "reindex"]))]
    plain = ["window"] * choose((1, 2))
    roles = plain + halved + whole
    encoder = len(plain) + len(halved)
    topk, size = choose((3, 5, 8)), choose((2, 3, 4))
    return {
        "num_hidden_layers": len(roles),
        "sliding_window": choose((5, 9, 16)),
        "compress_ratios": [0] * len(plain) + [2] * len(halved) + [1] * len(whole),
        "kv_source_layer_ids": [i for i, role in enumerate(roles) if role == "full"],
        "index_source_layer_ids": [i for i, r in enumerate(roles) if r in ("full", "reindex")],
        "index_n_heads": choose((2, 3, 8)),
        "index_head_dim": choose((32, 64)),
        "index_topk": topk,
        "candidate_source_layer_id": encoder,
        "candidate_topk_blocks": -(-(topk - 1) // size) + 1 + choose((0, 1)),
        "candidate_block_size": size,
    }


def _engram(choose: Choose, text: dict) -> dict:
    encoder = text["compress_ratios"].index(1)
    layers = sorted({choose(range(encoder)), choose(range(encoder))})
    values = {
        "engram_layer_ids": layers,
        "engram_max_ngram_size": choose((2, 3, 4)),
        "engram_vocab_size": choose((11, 29, 61)),
        "engram_n_heads": choose((1, 2, 3)),
        "engram_head_dim": choose((32, 64)),
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": choose((61, 83)),
    }
    constants = engram.hashes(values)
    rows = [sum(sum(heads) for heads in constants[layer].primes) for layer in layers]
    return values | {"engram_num_embeddings": rows}


def _draft(choose: Choose, text: dict) -> dict:
    layers, encoder = text["num_hidden_layers"], text["compress_ratios"].index(1)
    taps = sorted({choose(range(encoder, layers)) for _ in range(3)})
    count = choose((1, 2, 3))
    return {
        "num_nextn_predict_layers": count,
        "compress_ratios": text["compress_ratios"] + [0] * count,
        "dspark_block_size": choose((2, 4, 5)),
        "dspark_noise_token_id": text["vocab_size"] - 1,
        "dspark_target_layer_ids": taps,
        "dspark_markov_rank": choose((7, 16)),
        "dspark_n_routed_experts": choose((3, 4)),
        "dspark_num_experts_per_tok": choose((1, 2)),
    }


def _vision(choose: Choose) -> dict:
    heads = choose((1, 2, 3))
    return {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": choose((1, 2)),
        "hidden_size": 16 * heads,
        "num_attention_heads": heads,
        "intermediate_size": choose((20, 44)),
        "patch_size": choose((2, 4)),
        "rope_theta": 10000.0,
        "downsample_ratio": choose((2, 3)),
        "max_image_tokens": 64,
        "min_pixels": 64,
        "max_wh_ratio": None,
    }


def random_token_map(config: dict, rng: np.random.Generator) -> np.ndarray:
    """int32 [vocab]: a many-to-one map onto all compressed ids, numbered as first seen."""
    vocabulary = config["text_config"]["vocab_size"]
    size = config["text_config"]["engram_compressed_vocab_size"]
    labels = np.concatenate([np.arange(size), rng.integers(0, size, vocabulary - size)])
    rng.shuffle(labels)
    seen: dict[int, int] = {}
    return np.array([seen.setdefault(int(label), len(seen)) for label in labels], np.int32)


def random_weights(config: dict, rng: np.random.Generator) -> Tensors:
    """name -> (storage type, raw array) for every tensor the configuration implies.

    Sinks, biases and mixing terms are far from zero, and linears keep the size of their input:
    fp4 scales come out near 2^-5, so that clamps act sometimes and not always.
    """
    tensors: Tensors = {}
    for name, storage, shape in inventory(config):
        tensors |= store(name, storage, _values(name, shape, config, rng))
    return tensors


def _values(name: str, shape: tuple[int, ...], config: dict, rng: np.random.Generator):
    noise = rng.normal(size=shape)
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "q_weight", "k_weight")):
        return 1 + 0.2 * noise
    if name.endswith("_scale"):
        return 1 + 0.3 * noise
    if name.endswith("_base"):
        copies = config["text_config"]["hc_mult"]
        return 0.5 * noise + np.append(np.zeros(2 * copies), 2 * np.eye(copies))
    if name.endswith("engram.embed.weight"):
        return noise * np.exp(rng.normal(size=(shape[0], 1)))
    if name in ("embed.weight", "image_start", "image_end", "image_newline"):
        return noise
    if name.endswith(("bias", "bias_vl")):
        return 0.3 * noise
    if name.endswith("attn_sink"):
        return noise
    gain = rng.uniform(0.7, 1.7) * (0.5 if ".experts." in name else 1.0)
    return noise * gain / np.sqrt(shape[-1])


def write_folder(path: Path, config: dict, tensors: Tensors) -> Path:
    """Write config.json and model.safetensors into `path`, made if missing; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    write_tensors(path / "model.safetensors", tensors)
    return path
