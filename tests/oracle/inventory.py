"""The tensor list a configuration implies: names, storage and shapes (docs/model.md 13).

Storage classes: F8 is fp8 with one scale per 32 x 32 tile, F4 packed fp4 with one scale per row
and 32 columns, TABLE fp8 with one scale per row and 32 columns, BF bfloat16 and F32 float32.
Without a `quantization_config` the F8 and F4 linears are BF; Engram tables stay TABLE.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .layout import Layout, Text

Entry = tuple[str, str, tuple[int, ...]]


def inventory(config: Mapping[str, Any]) -> Iterator[Entry]:
    """(name, storage class, unpacked shape) of every tensor but the scales."""
    low = bool(config.get("quantization_config"))
    for name, storage, shape in _released(config):
        yield name, storage if low or storage not in ("F8", "F4") else "BF", shape


def _released(config: Mapping[str, Any]) -> Iterator[Entry]:
    text = config["text_config"]
    layout, width, vocabulary = Layout(text), text["hidden_size"], text["vocab_size"]
    images = "vision_config" in config
    yield "embed.weight", "BF", (vocabulary, width)
    yield "head.weight", "BF", (vocabulary, width)
    yield "norm.weight", "BF", (width,)
    for layer in layout.layers:
        prefix = f"layers.{layer}"
        yield from _block(prefix, text, text["n_routed_experts"], images)
        yield from _long_range(f"{prefix}.attn", layer, layout)
    for layer, rows in zip(text["engram_layer_ids"], text["engram_num_embeddings"], strict=True):
        yield from _engram(f"layers.{layer}.engram", rows, text)
    for layer in layout.draft_layers:
        yield from _block(f"mtp.{layer}", text, text["dspark_n_routed_experts"], images)
    if layout.draft_layers:
        yield from _draft_heads(f"mtp.{layout.draft_layers[-1]}", text)
    if images:
        yield from _vision(config["vision_config"], width)


def _block(prefix: str, text: Text, experts: int, images: bool) -> Iterator[Entry]:
    width, copies, inner = text["hidden_size"], text["hc_mult"], text["moe_intermediate_size"]
    for kind in ("attn", "ffn"):
        yield f"{prefix}.{kind}_norm.weight", "BF", (width,)
        yield f"{prefix}.hc_{kind}_fn", "F32", ((2 + copies) * copies, copies * width)
        yield f"{prefix}.hc_{kind}_base", "F32", ((2 + copies) * copies,)
        yield f"{prefix}.hc_{kind}_scale", "F32", (3,)
    yield from _attention(f"{prefix}.attn", text)
    yield f"{prefix}.ffn.gate.weight", "BF", (experts, width)
    yield f"{prefix}.ffn.gate.bias", "F32", (experts,)
    if images:
        yield f"{prefix}.ffn.gate.bias_vl", "F32", (experts,)
    routed = [(f"experts.{e}", "F4") for e in range(experts)]
    for name, storage in [*routed, ("shared_experts", "F8")]:
        yield f"{prefix}.ffn.{name}.w1.weight", storage, (inner, width)
        yield f"{prefix}.ffn.{name}.w2.weight", storage, (width, inner)
        yield f"{prefix}.ffn.{name}.w3.weight", storage, (inner, width)


def _attention(prefix: str, text: Text) -> Iterator[Entry]:
    width, rank, head = text["hidden_size"], text["q_lora_rank"], text["head_dim"]
    heads, groups, low = text["num_attention_heads"], text["o_groups"], text["o_lora_rank"]
    yield f"{prefix}.wq_a.weight", "F8", (rank, width)
    yield f"{prefix}.wq_b.weight", "F8", (heads * head, rank)
    yield f"{prefix}.wkv.weight", "F8", (head, width)
    yield f"{prefix}.wo_a.weight", "F8", (groups * low, heads // groups * head)
    yield f"{prefix}.wo_b.weight", "F8", (width, groups * low)
    yield f"{prefix}.q_norm.weight", "BF", (rank,)
    yield f"{prefix}.kv_norm.weight", "BF", (head,)
    yield f"{prefix}.attn_sink", "F32", (heads,)


def _long_range(prefix: str, layer: int, layout: Layout) -> Iterator[Entry]:
    text = layout.text
    width, head, index = text["hidden_size"], text["head_dim"], text["index_head_dim"]
    if layout.makes_kv(layer):
        yield f"{prefix}.compressor.wkv.weight", "BF", (head, width)
        yield f"{prefix}.compressor.norm.weight", "BF", (head,)
        if layout.ratio(layer) > 1:
            yield f"{prefix}.compressor.wgate.weight", "BF", (head, width)
        yield f"{prefix}.indexer.wk.weight", "BF", (index, head)
        yield f"{prefix}.indexer.k_norm.weight", "BF", (index,)
    if layout.makes_index(layer):
        heads = text["index_n_heads"]
        yield f"{prefix}.indexer.wq_b.weight", "F8", (heads * index, text["q_lora_rank"])
        yield f"{prefix}.indexer.weights_proj.weight", "BF", (heads, width)


def _engram(prefix: str, rows: int, text: Text) -> Iterator[Entry]:
    width, copies, row = text["hidden_size"], text["hc_mult"], text["engram_head_dim"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"] * row
    yield f"{prefix}.embed.weight", "TABLE", (rows, row)
    yield f"{prefix}.wkv.weight", "F8", ((copies + 1) * width, columns)
    yield f"{prefix}.q_weight", "BF", (copies, width)
    yield f"{prefix}.k_weight", "BF", (copies, width)


def _draft_heads(last: str, text: Text) -> Iterator[Entry]:
    width, rank, vocabulary = text["hidden_size"], text["dspark_markov_rank"], text["vocab_size"]
    taps = len(text["dspark_target_layer_ids"])
    yield "mtp.0.main_proj.weight", "F8", (width, taps * width)
    yield "mtp.0.main_norm.weight", "BF", (width,)
    yield f"{last}.norm.weight", "BF", (width,)
    yield f"{last}.markov_head.embed.weight", "BF", (vocabulary, rank)
    yield f"{last}.markov_head.head.weight", "BF", (vocabulary, rank)
    yield f"{last}.confidence_head.proj.weight", "BF", (1, width + rank)


def _vision(vision: Mapping[str, Any], width: int) -> Iterator[Entry]:
    dim, inner = vision["hidden_size"], vision["intermediate_size"]
    for name in ("image_start", "image_end", "image_newline"):
        yield name, "BF", (width,)
    yield "vision.patch_embed.proj.weight", "BF", (dim, 3 * vision["patch_size"] ** 2)
    yield "vision.patch_embed.proj.bias", "BF", (dim,)
    for i in range(vision["num_hidden_layers"]):
        block = f"vision.blocks.{i}"
        for name, shape in (("attn.wqkv", (3 * dim, dim)), ("attn.wo", (dim, dim))):
            yield f"{block}.{name}.weight", "BF", shape
            yield f"{block}.{name}.bias", "BF", shape[:1]
        yield f"{block}.mlp.w1.weight", "BF", (2 * inner, dim)
        yield f"{block}.mlp.w2.weight", "BF", (dim, inner)
        yield f"{block}.norm1.weight", "BF", (dim,)
        yield f"{block}.norm2.weight", "BF", (dim,)
    yield "vision.norm.weight", "BF", (dim,)
    for name, inputs in (("w1", dim * vision["downsample_ratio"] ** 2), ("w2", width)):
        yield f"aligner.{name}.weight", "BF", (width, inputs)
        yield f"aligner.{name}.bias", "BF", (width,)
