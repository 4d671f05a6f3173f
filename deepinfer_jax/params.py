"""The parameter tree, written once: shapes, storage, logical axes, released names, initialisers.

`abstract(cfg)` is a tree of `Spec`; random weights, shardings (`axes.shardings`), checkpoint
reading and writing are all derived from it. Layers are stacked: a leaf under `layers` has a leading
axis over backbone layers, routed experts one more over experts, so that a loop indexes one stack
without copying it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import quant, summaries
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.quant import Quantized

Params = dict[str, Any]
TABLE_ROWS = "engram_rows"  # the logical axis of what a token reads a few rows of
Storage = Literal["F8_E4M3", "F8_E8M0", "I8", "BF16", "F32"]
ARRAY_DTYPE = {
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype(np.float32),
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One leaf: an array of `shape` kept in `storage`, one logical axis name per dimension.

    `template` with the numbers of `stack` gives the released tensor names, in the order of the
    leading axes: shape[:len(stack)] counts tensors, shape[len(stack):] is the shape of each. `init`
    is the standard deviation of a normal draw, or a constant when `constant` is set.
    """

    shape: tuple[int, ...]
    storage: Storage
    axes: tuple[str | None, ...]
    template: str
    stack: tuple[tuple[int, ...], ...] = ()
    init: float = 0.02
    constant: bool = False

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array in memory (codes and scales are bytes)."""
        return ARRAY_DTYPE[self.storage]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one released tensor."""
        return self.shape[len(self.stack) :]

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """(leading index, released name) of every tensor that this leaf is made of."""
        for index in itertools.product(*(range(len(s)) for s in self.stack)):
            numbers = [s[i] for s, i in zip(self.stack, index, strict=True)]
            yield index, self.template.format(*numbers)


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Where a group of tensors sits: a name prefix with holes, the numbers that fill them."""

    prefix: str
    numbers: tuple[tuple[int, ...], ...] = ()
    axes: tuple[str, ...] = ()

    def deeper(self, suffix: str, numbers: tuple[int, ...], axis: str) -> _Stack:
        return _Stack(self.prefix + suffix, (*self.numbers, numbers), (*self.axes, axis))

    def leaf(self, name, shape, storage, axes, init=0.02, constant=False) -> Spec:
        counts = tuple(len(n) for n in self.numbers)
        return Spec(
            counts + tuple(shape), storage, self.axes + tuple(axes), self.prefix + name,
            self.numbers, init, constant,
        )  # fmt: skip

    def bf16(self, name: str, shape, axes, **kw) -> Spec:
        return self.leaf(name, shape, "BF16", axes, **kw)

    def f32(self, name: str, shape, axes, **kw) -> Spec:
        return self.leaf(name, shape, "F32", axes, **kw)

    def gain(self, name: str, width: int, axis: str) -> Spec:
        """An RMSNorm weight: ones."""
        return self.bf16(name + ".weight", (width,), (axis,), init=1.0, constant=True)

    def linear(self, name: str, n: int, k: int, axes, format=None, gain=1.0) -> Any:
        """A matrix [N, K] as BF16, or in a quantized format with its scale beside it."""
        std = gain / math.sqrt(k)
        if format is None:
            return self.bf16(name + ".weight", (n, k), axes, init=std)
        groups = math.ceil(k / quant.GROUP)
        rows = math.ceil(n / quant.GROUP) if format == "fp8_block" else n
        packed = format == "fp4_group"
        codes = self.leaf(
            name + ".weight", (n, k // 2 if packed else k), "I8" if packed else "F8_E4M3", axes, std
        )
        scale = self.leaf(name + ".scale", (rows, groups), "F8_E8M0", axes)
        return Quantized(codes, scale, format)


def abstract(cfg: ModelConfig) -> Params:
    """The tree of `Spec` for a configuration; a quantized weight is a `Quantized` of two specs."""
    d, v = cfg.hidden_size, cfg.vocab_size
    root = _Stack("")
    layers = tuple(range(cfg.num_hidden_layers))
    tree: Params = {
        "embed": root.bf16("embed.weight", (v, d), ("vocab", "embed"), init=1.0),
        "head": root.linear("head", v, d, ("vocab", "embed")),
        "norm": root.gain("norm", d, "embed"),
        "layers": _block(cfg, _Stack("layers.{}.", (layers,), ("layer",)), cfg.n_routed_experts),
        "compressor": _compressor(cfg),
        "indexer": _indexer(cfg),
        "engram": tuple(_engram(cfg, i) for i in range(len(cfg.engram_layer_ids))),
    }
    if cfg.num_nextn_predict_layers:
        tree["draft"] = _draft(cfg)
    if cfg.vision is not None:
        tree["vision"] = _vision(cfg)
    return tree


def _formats(cfg: ModelConfig) -> tuple[str | None, str | None]:
    return ("fp8_block", "fp4_group") if cfg.quantized else (None, None)


def _block(cfg: ModelConfig, at: _Stack, experts: int) -> Params:
    d, rank = cfg.hidden_size, cfg.q_lora_rank
    return {
        "attn_norm": at.gain("attn_norm", d, "embed"),
        "ffn_norm": at.gain("ffn_norm", d, "embed"),
        "hc_attn": _hyper(cfg, at, "hc_attn_"),
        "hc_ffn": _hyper(cfg, at, "hc_ffn_"),
        "attn": _attention(cfg, at, d, rank),
        "ffn": _moe(cfg, at, experts),
    }


def _attention(cfg: ModelConfig, at: _Stack, d: int, rank: int) -> Params:
    fp8, _ = _formats(cfg)
    heads, width = cfg.num_attention_heads, cfg.head_dim
    out = cfg.o_groups * cfg.o_lora_rank
    return {
        "wq_a": at.linear("attn.wq_a", rank, d, ("q_rank", "embed"), fp8),
        "q_norm": at.gain("attn.q_norm", rank, "q_rank"),
        "wq_b": at.linear("attn.wq_b", heads * width, rank, ("heads", "q_rank"), fp8),
        "wkv": at.linear("attn.wkv", width, d, ("kv", "embed"), fp8),
        "kv_norm": at.gain("attn.kv_norm", width, "kv"),
        "wo_a": at.linear(
            "attn.wo_a", out, heads * width // cfg.o_groups, ("o_rank", "group_in"), fp8
        ),
        "wo_b": at.linear("attn.wo_b", d, out, ("embed", "o_rank"), fp8),
        "attn_sink": at.f32("attn.attn_sink", (heads,), ("heads",), init=0.5),
    }


def _hyper(cfg: ModelConfig, at: _Stack, name: str) -> Params:
    c = cfg.hc_mult
    mixes, width = c * (2 + c), c * cfg.hidden_size
    return {
        "fn": at.f32(name + "fn", (mixes, width), ("mix", "stream_embed"), init=width**-0.5),
        "base": at.f32(name + "base", (mixes,), ("mix",), init=0.5),
        "scale": at.f32(name + "scale", (3,), (None,), init=1.0, constant=True),
    }


def _moe(cfg: ModelConfig, at: _Stack, experts: int) -> Params:
    fp8, fp4 = _formats(cfg)
    d, width = cfg.hidden_size, cfg.moe_intermediate_size
    # Every device routes its own rows to all experts: routers have an axis of their own.
    each = at.deeper("ffn.experts.{}.", tuple(range(experts)), "expert")
    shared = dataclasses.replace(at, prefix=at.prefix + "ffn.shared_experts.")
    gate: Params = {
        "weight": at.bf16("ffn.gate.weight", (experts, d), ("router", "embed"), init=d**-0.5),
        "bias": at.f32("ffn.gate.bias", (experts,), ("router",), init=0.1),
    }
    if cfg.vision is not None:
        gate["bias_vl"] = at.f32("ffn.gate.bias_vl", (experts,), ("router",), init=0.1)

    def matrices(where: _Stack, fmt: str | None) -> Params:
        up, down = ("expert_mlp", "embed"), ("embed", "expert_mlp")
        return {
            "w1": where.linear("w1", width, d, up, fmt),
            "w2": where.linear("w2", d, width, down, fmt),
            "w3": where.linear("w3", width, d, up, fmt),
        }

    return {"gate": gate, "experts": matrices(each, fp4), "shared_experts": matrices(shared, fp8)}


def _compressor(cfg: ModelConfig) -> Params:
    sources = cfg.kv_source_layer_ids
    at = _Stack("layers.{}.attn.compressor.", (sources,), ("kv_source",))
    pooled = tuple(s for s in sources if cfg.compress_ratios[s] > 1)
    gated = dataclasses.replace(at, numbers=(pooled,))
    shape, axes = (cfg.head_dim, cfg.hidden_size), ("kv", "embed")
    return {
        "wkv": at.linear("wkv", *shape, axes),
        "norm": at.gain("norm", cfg.head_dim, "kv"),
        "wgate": gated.linear("wgate", *shape, axes),
    }


def _indexer(cfg: ModelConfig) -> Params:
    fp8, _ = _formats(cfg)
    keys = _Stack("layers.{}.attn.indexer.", (cfg.kv_source_layer_ids,), ("kv_source",))
    queries = _Stack("layers.{}.attn.indexer.", (cfg.index_source_layer_ids,), ("index_source",))
    heads, width = cfg.index_n_heads, cfg.index_head_dim
    return {
        "wk": keys.linear("wk", width, cfg.head_dim, ("index", "kv")),
        "k_norm": keys.gain("k_norm", width, "index"),
        "wq_b": queries.linear("wq_b", heads * width, cfg.q_lora_rank, ("index", "q_rank"), fp8),
        "weights_proj": queries.linear(
            "weights_proj", heads, cfg.hidden_size, ("index_heads", "embed")
        ),
    }


def _engram(cfg: ModelConfig, ordinal: int) -> Params:
    fp8, _ = _formats(cfg)
    at = _Stack(f"layers.{cfg.engram_layer_ids[ordinal]}.engram.")
    rows, width = cfg.engram_num_embeddings[ordinal], cfg.engram_head_dim
    d, c = cfg.hidden_size, cfg.hc_mult
    streams = ("stream", "embed")
    return {
        "embed": at.linear("embed", rows, width, (TABLE_ROWS, None), "fp8_group"),
        "wkv": at.linear("wkv", (c + 1) * d, cfg.engram_columns * width, (None, "engram_in"), fp8),
        "q_weight": at.bf16("q_weight", (c, d), streams, init=1.0, constant=True),
        "k_weight": at.bf16("k_weight", (c, d), streams, init=1.0, constant=True),
    }


def _draft(cfg: ModelConfig) -> Params:
    fp8, _ = _formats(cfg)
    count, d, rank = cfg.num_nextn_predict_layers, cfg.hidden_size, cfg.dspark_markov_rank
    first, last = _Stack("mtp.0."), _Stack(f"mtp.{count - 1}.")
    taps = len(cfg.dspark_target_layer_ids)
    at = _Stack("mtp.{}.", (tuple(range(count)),), ("draft_layer",))
    return {
        "layers": _block(cfg, at, cfg.dspark_n_routed_experts),
        "main_proj": first.linear("main_proj", d, taps * d, ("embed", "taps"), fp8),
        "main_norm": first.gain("main_norm", d, "embed"),
        "norm": last.gain("norm", d, "embed"),
        "markov_embed": last.bf16(
            "markov_head.embed.weight", (cfg.vocab_size, rank), ("vocab", "markov"), init=1.0
        ),
        "markov_head": last.linear("markov_head.head", cfg.vocab_size, rank, ("vocab", "markov")),
        "confidence": last.linear("confidence_head.proj", 1, d + rank, (None, "confidence_in")),
    }


def _vision(cfg: ModelConfig) -> Params:
    vision = cfg.vision
    if vision is None:
        raise ValueError("the config has no vision tower")
    d, width, mlp = cfg.hidden_size, vision.hidden_size, vision.intermediate_size
    root = _Stack("")
    at = _Stack("vision.blocks.{}.", (tuple(range(vision.num_hidden_layers)),), ("vision_layer",))
    cell = width * vision.downsample_ratio**2

    def biased(where: _Stack, name: str, n: int, k: int) -> Params:
        bias = where.bf16(name + ".bias", (n,), (None,), init=0.0, constant=True)
        return {"weight": where.linear(name, n, k, (None, None)), "bias": bias}

    return {
        "patch_embed": biased(root, "vision.patch_embed.proj", width, 3 * vision.patch_size**2),
        "blocks": {
            "norm1": at.gain("norm1", width, "vision"),
            "wqkv": biased(at, "attn.wqkv", 3 * width, width),
            "wo": biased(at, "attn.wo", width, width),
            "norm2": at.gain("norm2", width, "vision"),
            "w1": at.linear("mlp.w1", 2 * mlp, width, (None, "vision")),
            "w2": at.linear("mlp.w2", width, mlp, ("vision", None)),
        },
        "norm": root.gain("vision.norm", width, "vision"),
        "aligner": {
            "w1": biased(root, "aligner.w1", d, cell),
            "w2": biased(root, "aligner.w2", d, d),
        },
        "image_start": root.bf16("image_start", (d,), ("embed",)),
        "image_end": root.bf16("image_end", (d,), ("embed",)),
        "image_newline": root.bf16("image_newline", (d,), ("embed",)),
    }


# -- what follows from the tree --------------------------------------------------------------------


def specs(cfg: ModelConfig) -> list[Spec]:
    """Every `Spec` of the tree, in tree order."""
    return jax.tree.leaves(abstract(cfg))


def shapes(cfg: ModelConfig) -> Params:
    """The tree as `jax.ShapeDtypeStruct`, for ahead-of-time compilation without weights."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), abstract(cfg))


def by_path(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path in tree order, such as `layers.attn.wq_a.codes`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def summary(params: Params) -> str:
    """A table for reading: arrays, dtypes and bytes of every part of a tree of weights."""
    lines = [f"{'part':12} {'arrays':>6}  {'bytes':>8}  dtypes"]
    for name, part in [*params.items(), ("all", params)]:
        leaves = jax.tree.leaves(part)
        kinds = ", ".join(sorted({np.dtype(leaf.dtype).name for leaf in leaves}))
        held = summaries.size(summaries.bytes_of(part))
        lines.append(f"{name:12} {len(leaves):6}  {held:>8}  {kinds}")
    return "\n".join(lines)


def leaf_differences(given: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """One line for every path whose leaf is missing, extra, or of another shape or dtype."""
    lines = [f"missing {path}" for path in expected if path not in given]
    for path, leaf in given.items():
        got = (tuple(leaf.shape), np.dtype(leaf.dtype).name)
        if path not in expected:
            lines.append(f"unexpected {path} {got}")
            continue
        want = (tuple(expected[path].shape), np.dtype(expected[path].dtype).name)
        if got != want:
            lines.append(f"{path} is {got}, expected {want}")
    return lines


def lengthened(specs: Mapping[str, Spec], given: Mapping[str, Any]) -> dict[str, Spec]:
    """`specs` by path; Engram tables as long as those given where these have more rows, which are
    the padding that a mesh needed (`axes.padded`).
    """
    made = dict(specs)
    for path, spec in specs.items():
        if spec.axes[:1] == (TABLE_ROWS,) and path in given:
            rows = max(spec.shape[0], *given[path].shape[:1])
            made[path] = dataclasses.replace(spec, shape=(rows, *spec.shape[1:]))
    return made


def differences(params: Params, cfg: ModelConfig, padded: bool = False) -> list[str]:
    """What keeps `params` from being a tree of this config, one line per path; empty if nothing.

    padded: Engram tables may have rows beyond their own (`lengthened`).
    """
    expected, given = abstract(cfg), by_path(params)
    wanted = by_path(expected)
    lines = leaf_differences(given, lengthened(wanted, given) if padded else wanted)
    if not lines and jax.tree.structure(params) != jax.tree.structure(expected):
        lines.append("the quantized formats differ")
    return lines


def is_weight(node: Any) -> bool:
    """True for a `Quantized` node: use as `is_leaf` to see weights whole."""
    return isinstance(node, Quantized)


def init(key: jax.Array, cfg: ModelConfig) -> Params:
    """Random weights in the released storage; each leaf is keyed by its first tensor name.

    Drawn and quantized in blocks of one size, so that three small compilations serve every config.
    """

    def draw(leaf: Any) -> Any:
        spec: Spec = leaf.codes if is_weight(leaf) else leaf
        if spec.constant:
            return jnp.asarray(np.full(spec.shape, spec.init, spec.dtype))
        name = next(spec.tensors(), ((), spec.template))[1]
        seed = np.uint32(int.from_bytes(name.encode()[-24:], "little") % (2**31 - 1))
        shape = spec.shape
        if is_weight(leaf) and leaf.format == "fp4_group":
            shape = (*shape[:-1], shape[-1] * 2)
        size = math.prod(shape)
        blocks = [_normals(key, seed, np.uint32(i)) for i in range(math.ceil(size / _BLOCK))]
        flat = np.concatenate([np.zeros(0, np.float32), *blocks])[:size]
        value = flat.reshape(shape) * np.float32(spec.init)
        if is_weight(leaf):
            return _in_storage(value, leaf.format)
        return jnp.asarray(value, spec.dtype)

    return jax.tree.map(draw, abstract(cfg), is_leaf=is_weight)


_BLOCK = 1 << 16


@jax.jit
def _normals(key: jax.Array, seed: jax.Array, number: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(key, seed), number)
    return jax.random.normal(key, (_BLOCK,), jnp.float32)


def _in_storage(value: np.ndarray, format: quant.Format) -> Quantized:
    """`quant.quantize` of [..., N, K] tile by tile: the same codes, one compilation per format."""
    rows, (n, k) = quant.GROUP if format == "fp8_block" else 1, value.shape[-2:]
    lead = [(0, 0)] * (value.ndim - 2)
    padded = np.pad(value, [*lead, (0, -n % rows), (0, -k % quant.GROUP)])
    grid = (*value.shape[:-2], padded.shape[-2] // rows, padded.shape[-1] // quant.GROUP)
    split = padded.reshape(*grid[:-1], rows, grid[-1], quant.GROUP)
    tiles = np.moveaxis(split, -3, -2).reshape(-1, rows * quant.GROUP)
    count, batch = len(tiles), _BLOCK // tiles.shape[1]
    tiles = np.pad(tiles, [(0, -count % batch), (0, 0)]).reshape(-1, batch, rows, quant.GROUP)
    done = [_quantize(part, format) for part in tiles]
    width = quant.GROUP // 2 if format == "fp4_group" else quant.GROUP
    codes = np.concatenate([np.zeros((0, rows, width), np.uint8), *(q.codes for q in done)])[:count]
    scale = np.concatenate([np.zeros((0, 1, 1), np.uint8), *(q.scale for q in done)])[:count]
    codes = np.moveaxis(codes.reshape(*grid, rows, width), -2, -3)
    codes = codes.reshape(*grid[:-2], grid[-2] * rows, grid[-1] * width)
    codes = codes[..., :n, : k * width // quant.GROUP]
    return Quantized(jnp.asarray(codes), jnp.asarray(scale.reshape(grid)), format)


@functools.partial(jax.jit, static_argnums=1)
def _quantize(tiles: jax.Array, format: quant.Format) -> Quantized:
    return quant.quantize(tiles, format)


@jax.jit
def decode(params: Params) -> Params:
    """The same weights decoded to bfloat16 bit patterns: more memory, no decoding at every step.

    Values and results stay the same in every bit. Matrices stored in FP8 or FP4 or stacked over
    layers in bfloat16 are decoded; the Engram tables, of which a token reads a few rows, are not.
    """
    spared = {"engram", "vision"}

    def one(leaf: Any) -> Any:
        stacked = not is_weight(leaf) and leaf.dtype == jnp.bfloat16 and leaf.ndim > 2
        return quant.decode_to_bits(leaf) if is_weight(leaf) or stacked else leaf

    done = {
        name: tree if name in spared else jax.tree.map(one, tree, is_leaf=is_weight)
        for name, tree in params.items()
    }
    done["engram"] = tuple(
        {**memory, "wkv": one(memory["wkv"])} for memory in params.get("engram", ())
    )
    return done


def decoded_bytes(cfg: ModelConfig) -> int:
    """Bytes of the weights after `decode`, from the abstract tree."""
    sizes = jax.eval_shape(decode, shapes(cfg))
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(sizes))


@functools.partial(jax.jit, static_argnums=1)
def widen(params: Params, dtype: Any = jnp.float32) -> Params:
    """Every leaf as a plain float array of `dtype` (exact for float32)."""

    def one(leaf: Any) -> jax.Array:
        return quant.dequantize(leaf, dtype) if is_weight(leaf) else jnp.asarray(leaf).astype(dtype)

    return jax.tree.map(one, params, is_leaf=is_weight)


@dataclasses.dataclass(frozen=True)
class Census:
    """Counts over the released tensors of a config; a packed FP4 byte is two parameters."""

    tensors: int
    parameters: int
    bytes_by_storage: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all tensors together."""
        return sum(self.bytes_by_storage.values())


def census(cfg: ModelConfig) -> Census:
    """Count what a checkpoint of this config holds, from the abstract tree alone."""
    tensors = parameters = 0
    size: dict[str, int] = {}
    for spec in specs(cfg):
        tensors += math.prod(len(s) for s in spec.stack)
        elements = math.prod(spec.shape)
        width = {"F32": 4, "BF16": 2}.get(spec.storage, 1)
        size[spec.storage] = size.get(spec.storage, 0) + elements * width
        if spec.storage != "F8_E8M0":
            parameters += elements * (2 if spec.storage == "I8" else 1)
    return Census(tensors, parameters, size)
