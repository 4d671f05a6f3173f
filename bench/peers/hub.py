"""transformers as a peer: its nearest model, DeepSeek-V4, in steps of one token on its cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import released
import torch
import transformers
from transformers import DynamicCache
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

from deepinfer_jax.config import ModelConfig

STORED = {
    "weights": "bfloat16; layers take turns with two stacks of experts, as the plain step does",
    "cache": "bfloat16",
    "activations": "bfloat16",
    "differences": "DeepSeek-V4, not V4.1: every layer with compressed KV pools four tokens, with "
    "an overlap, and has an indexer of its own (six such layers; in the slice two sources of KV "
    "and three indexers serve six layers, and tokens are pooled in twos or not at all); attention "
    "multiplies with every compressed entry and masks those not chosen; a norm of each head's "
    "queries; streams are collapsed by mixes of the same sub-layer, at the end by a head of their "
    "own; no Engram; greedy tokens",
}
SETS = 2


def config_of(cfg: ModelConfig) -> DeepseekV4Config:
    """The slice as far as that model has it."""
    window, sparse = "sliding_attention", "compressed_sparse_attention"
    return DeepseekV4Config(
        vocab_size=cfg.vocab_size, hidden_size=cfg.hidden_size,
        moe_intermediate_size=cfg.moe_intermediate_size, num_hidden_layers=cfg.num_hidden_layers,
        num_attention_heads=cfg.num_attention_heads, head_dim=cfg.head_dim,
        partial_rotary_factor=cfg.qk_rope_head_dim / cfg.head_dim, q_lora_rank=cfg.q_lora_rank,
        num_experts_per_tok=cfg.num_experts_per_tok, n_routed_experts=cfg.n_routed_experts,
        layer_types=[sparse if kind.ratio else window for kind in cfg.kinds()],
        mlp_layer_types=["moe"] * cfg.num_hidden_layers, sliding_window=cfg.sliding_window,
        o_groups=cfg.o_groups, o_lora_rank=cfg.o_lora_rank, index_n_heads=cfg.index_n_heads,
        index_head_dim=cfg.index_head_dim, index_topk=cfg.index_topk,
        attn_implementation="eager", experts_implementation="grouped_mm",
    )  # fmt: skip


@torch.no_grad()
def made(cfg: ModelConfig, device: str) -> DeepseekV4ForCausalLM:
    """Random weights, made on the device; layers share stacks of experts in turns."""
    config = config_of(cfg)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    layers = model.model.layers
    for i in range(SETS, len(layers)):
        layers[i].mlp.experts = layers[i % SETS].mlp.experts
    model = model.to_empty(device=device)
    for module in model.modules():
        model._init_weights(module)
    return model.eval()


def filled(model: DeepseekV4ForCausalLM, batch: int, held: int) -> DynamicCache:
    """Its cache after `held` tokens, a multiple of the group, of vectors no text ever made."""
    config, device = model.config, model.device
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        draw = lambda *shape: torch.randn(batch, *shape, device=device)  # noqa: E731
        first = draw(1, 1, config.head_dim)
        layer.update(first, first)
        layer.keys = layer.values = draw(1, config.sliding_window - 1, config.head_dim)
        layer.cumulative_length = held
        if not hasattr(layer, "overlap_kv"):
            continue
        rate, widths = layer.compress_rate, {
            "compressor": config.head_dim, "indexer": config.index_head_dim,
        }  # fmt: skip
        for name, width in widths.items():
            layer.compressed_kv[name] = draw(held // rate, width)
            layer.entry_count[name] = held // rate
            layer.buffer_kv[name] = layer.buffer_gate[name] = draw(0, 2 * width)
            layer.overlap_kv[name], layer.overlap_gate[name] = draw(rate, width), draw(rate, width)
    return cache


@torch.no_grad()
def measured(
    name: str, cells: list[tuple[int, int]], steps: int, repeats: int, small: bool
) -> Iterator[dict[str, Any]]:
    """Of each cell (batch, tokens held) the `samples_ms` of a step."""
    cuda = torch.cuda.is_available()
    model = made(released.slice_config(small), "cuda" if cuda else "cpu")
    for batch, context in cells:
        cache, samples = filled(model, batch, context), []
        tokens = torch.arange(batch, device=model.device)[:, None] * 7 + 11
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for _ in range(steps):
                logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
                tokens = logits[:, -1:].argmax(-1)
            tokens.tolist()
            samples.append(1e3 * (time.perf_counter() - start) / steps)
        yield {
            "samples_ms": samples[1:], "transformers": transformers.__version__,
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        }  # fmt: skip
        del cache
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
