"""Bytes of a device: weights, caches, and intermediate values by the package's own accounting.

Weights and caches are exact: they come from the trees that are allocated. Intermediate values are
an estimate of what has to exist at once (docs/scale.md 3), never what a CPU's compiler sets aside.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from deepinfer_jax import axes, cache, info, params, quant, tables
from deepinfer_jax.axes import EXPERT
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import dealt
from deepinfer_jax.numerics import Numerics, stored
from deepinfer_jax.numerics.mapping import ROWS_AT_ONCE
from deepinfer_jax.numerics.pallas.products import DECODED_ROWS
from deepinfer_jax.scale.layouts import Layout
from deepinfer_jax.scale.workload import Call, Workload

STORED = Numerics(rows="pallas")  # caches of packed bytes, as on a GPU
_KINDS = {
    "attention": "attention",
    "compressors": "attention",
    "index keys": "attention",
    "index queries": "attention",
    "embedding": "embedding and head",
    "head": "embedding and head",
    "DSpark draft": "drafter",
    "vision tower": "vision",
    "aligner and delimiters": "vision",
    "routers": "routers, streams, norms",
    "hyper-connections": "routers, streams, norms",
    "block norms": "routers, streams, norms",
    "final norm": "routers, streams, norms",
}  # any other component is a kind of its own


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes of one kind: on a device, and in the memory of the host for all its devices."""

    kind: str
    device: int
    host: int = 0


@functools.lru_cache(maxsize=16)
def specs(cfg: ModelConfig) -> tuple[tuple[str, params.Spec], ...]:
    """(kind, leaf) of every parameter."""
    return tuple((kind_of(spec), spec) for spec in params.specs(cfg))


def kind_of(spec: params.Spec) -> str:
    """The kind of a parameter, as `weights` names it."""
    name = info.component_of(spec)
    return _KINDS.get(name, name)


@functools.lru_cache(maxsize=4096)
def shard_shape(leaf: Any, layout: Layout) -> tuple[int, ...]:
    """Shape of a leaf's part on one device."""
    return axes.shard_shape(leaf, axes.abstract_mesh(dict(layout.mesh)), layout.rules)


def nbytes(leaf: Any, layout: Layout) -> int:
    """Bytes of a leaf on one device."""
    return math.prod(shard_shape(leaf, layout)) * leaf.dtype.itemsize


def weights(cfg: ModelConfig, layout: Layout) -> tuple[Part, ...]:
    """Weights by kind, in the order of their bytes on a device."""
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    for kind, spec in specs(cfg):
        if layout.off_device(spec):
            size = math.prod(spec.shape) * spec.dtype.itemsize
            host[kind] = host.get(kind, 0) + size
            device.setdefault(kind, 0)
        else:
            device[kind] = device.get(kind, 0) + nbytes(spec, layout)
    parts = [Part(kind, size, host.get(kind, 0)) for kind, size in device.items()]
    return tuple(sorted(parts, key=lambda part: (-part.device, part.kind)))


def caches(cfg: ModelConfig, layout: Layout, work: Workload) -> tuple[Part, ...]:
    """The cache of all sequences and the constant tables, by kind."""
    slots = work.slots(layout) * layout.parts("slot")
    paging, slack = work.paging(cfg, layout), 1 + work.drafts
    shapes = cache.cache_shapes(cfg, STORED, slots, work.context, slack, paging, layout.ranks)
    leaves = cache.cache_leaves(shapes)

    def size(*trees: Any) -> int:
        return sum(nbytes(leaf, layout) for leaf in jax.tree.leaves(trees))

    turned = jax.tree.leaves(tables.table_shapes(cfg, work.context))
    return (
        Part("compressed KV", size(leaves.kv)),
        Part("index keys", size(leaves.keys)),
        Part("window rings", size(leaves.window)),
        Part("draft rings", size(leaves.draft)),
        Part("pending pooling", size(leaves.pending)),
        Part("tables of pages, history", size(leaves.pages, leaves.history, leaves.lengths)),
        Part("rotations, token map", sum(math.prod(t.shape) * t.dtype.itemsize for t in turned)),
    )


def activations(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> tuple[Part, ...]:
    """Intermediate values of a call: what it keeps throughout, and every sub-layer's own, by the
    kernels of a GPU.

    Sub-layers follow one another, so that the largest counts, not their sum (`at_once`).
    """
    t, d, c = call.rows, cfg.hidden_size, cfg.hc_mult
    heads = cfg.num_attention_heads * cfg.head_dim
    kept = t * 2 * c * d * 2 + call.shared * len(cfg.dspark_target_layer_ids) * d * 2
    kept += t * 4 * (cfg.index_topk + cfg.candidate_topk_blocks)
    kept += t * 4 * cfg.num_hidden_layers * cfg.num_experts_per_tok
    entries = max((-(-call.context // m) for m in cfg.ratios), default=0)
    low = cfg.o_groups * cfg.o_lora_rank
    gathered = min(t, ROWS_AT_ONCE) * (cfg.sliding_window + cfg.index_topk) * cfg.head_dim * 2
    fetched = (Part("shared KV on its way", _fetched(cfg, layout, t)),) if layout.ranks > 1 else ()
    return (
        Part("kept throughout", kept + _decoded(cfg, layout, t)),
        Part("attention", t * (heads * (2 + 4 + 2) + low * 2 + 3 * d * 2) + gathered),
        # Beside the scores the best of blocks, and of parts of a row: less than a byte an entry.
        Part("index scores", t * entries * (4 + 1) if cfg.index_source_layer_ids else 0),
        Part("routed experts", _experts(cfg, layout, t, work)),
        Part("logits", 3 * 4 * cfg.vocab_size * max(call.sampled, call.drafted)),
        Part("drafter's experts, copied", _copied(cfg, layout) if call.drafted else 0),
        *fetched,
    )


def _decoded(cfg: ModelConfig, layout: Layout, rows: int) -> int:
    """The largest weight that many rows meet, which is decoded as a whole first (`products`)."""
    if rows < DECODED_ROWS:
        return 0
    dense = [
        math.prod(shard_shape(leaf, layout)[len(leaf.stack) :])
        for kind, leaf in specs(cfg)
        if leaf.storage == "F8_E4M3" and kind != "Engram tables"
    ]
    return 2 * max(dense, default=0)


def _copied(cfg: ModelConfig, layout: Layout) -> int:
    """One layer of each stack that no kernel can address as a whole (`stored.addressable`)."""
    size = 0
    for kind, leaf in specs(cfg):
        shape = shard_shape(leaf, layout)
        if kind == "drafter" and EXPERT in leaf.axes and stored.out_of_reach(shape, leaf.dtype):
            size += math.prod(shape[1:]) * leaf.dtype.itemsize
    return size


def _fetched(cfg: ModelConfig, layout: Layout, rows: int) -> int:
    """Vectors that every device of a shared cache answers with, as they are sent and as they come:
    some rows after others (`dealt.attend`).
    """
    together = min(rows, dealt.ROWS_AT_ONCE) * layout.ranks
    return 2 * together * cfg.index_topk * quant.main_bytes(cfg.head_dim)


def _experts(cfg: ModelConfig, layout: Layout, rows: int, work: Workload) -> int:
    """Rows and outputs of the exchange, and hidden values of a device's experts."""
    n, k, d = layout.size(EXPERT), cfg.num_experts_per_tok, cfg.hidden_size
    computed = rows * k  # on the mean, wherever they come from
    inside = computed * (d * 2 + 2 * cfg.moe_intermediate_size * 4 + d * 2)
    if n == 1:
        return inside
    if work.exchange == "gathered":
        return inside + n * rows * d * 2 + 2 * n * rows * k * d * 2
    return inside + 2 * computed * d * 2


def at_once(parts: tuple[Part, ...]) -> int:
    """Bytes of `activations` that exist together: the kept ones and the largest sub-layer."""
    sizes = [part.device for part in parts]
    return sizes[0] + max(sizes[1:])
