"""Arithmetic and bytes of one call on one device, section by section (docs/scale.md 4).

Matrices are read from the tree of parameters, so that every config counts itself. Multiplying and
adding are two operations.
"""

from __future__ import annotations

import dataclasses
import math

from deepinfer_jax import info, quant
from deepinfer_jax.axes import EXPERT
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Spec
from deepinfer_jax.scale import memory
from deepinfer_jax.scale.hardware import Precision
from deepinfer_jax.scale.layouts import Layout
from deepinfer_jax.scale.workload import Call, Workload

_OF_ENTRIES = ("compressors", "index keys")
_FLOAT32 = 2  # passes of bfloat16 units that a float32 product counts as: half their rate


@dataclasses.dataclass(frozen=True)
class Section:
    """Operations by precision ((precision, count), ..) and bytes of device memory."""

    name: str
    flops: tuple[tuple[Precision, float], ...]
    read: float

    @property
    def operations(self) -> float:
        """Of all precisions."""
        return sum(count for _, count in self.flops)


def sections(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> tuple[Section, ...]:
    """What a device does in a call: the backbone, the head, and where it drafts, the drafter."""
    made = [
        _matrices("attention", ("attention", "Engram dense"), cfg, layout, call, work),
        _core(cfg, call),
        _scores(cfg, layout, call, work),
        _matrices("shared experts", ("shared experts",), cfg, layout, call, work),
        _routed(cfg, layout, call.rows, work, draft=False),
        _streams(cfg, layout, call, work),
        _head(cfg, layout, call.sampled, work),
    ]
    if call.drafted:
        made.append(_drafter(cfg, layout, call, work))
        made.append(_routed(cfg, layout, call.drafted, work, draft=True))
    return tuple(made)


def _precision(spec: Spec, work: Workload) -> Precision:
    # FP4 weights meet FP8 activations, so that FP8 units multiply them.
    stored = spec.storage in ("F8_E4M3", "I8") and work.arithmetic == "stored"
    return "fp8" if stored else "bf16"


def products(spec: Spec) -> float:
    """Multiplications of one row with the matrices of a leaf; 0 where it is no matrix."""
    no_product = spec.storage == "F8_E8M0" or spec.template.endswith("embed.weight")
    if no_product or len(spec.tensor_shape) != 2 or "stream" in spec.axes:
        return 0
    packed = 2 if spec.storage == "I8" else 1
    passes = _FLOAT32 if spec.storage == "F32" else 1
    return math.prod(spec.shape) * packed * passes


def _named(cfg: ModelConfig, kinds: tuple[str, ...], layout: Layout) -> list[Spec]:
    found = [spec for kind, spec in memory.specs(cfg) if kind in kinds]
    return [spec for spec in found if not layout.off_device(spec)]


def _is_routed(spec: Spec) -> bool:
    return ".experts.{" in spec.template


def _total(
    name: str, each: list[tuple[Spec, float]], layout: Layout, work: Workload, more: float = 0
) -> Section:
    """A section of (leaf, rows that meet it): each leaf is read once."""
    flops: dict[Precision, float] = {}
    read = more
    for spec, rows in each:
        kind = _precision(spec, work)
        flops[kind] = flops.get(kind, 0) + 2 * products(spec) * rows
        read += memory.nbytes(spec, layout)
    return Section(name, tuple(flops.items()), read)


def _matrices(
    name: str, kinds: tuple[str, ...], cfg: ModelConfig, layout: Layout, call: Call,
    work: Workload,
) -> Section:  # fmt: skip
    # Entries are made of all rows by every device that shares them.
    each: list[tuple[Spec, float]] = [
        (s, call.shared if info.component_of(s) in _OF_ENTRIES else call.rows)
        for s in _named(cfg, kinds, layout)
    ]
    return _total(name, each, layout, work)


def _keys(cfg: ModelConfig, layer: int, context: int) -> tuple[int, int]:
    """Keys of a row in a layer: of the window, and selected entries."""
    ratio = cfg.compress_ratios[layer]
    chosen = min(context // ratio, cfg.index_topk) if ratio else 0
    return min(context, cfg.sliding_window), chosen


def _core(cfg: ModelConfig, call: Call) -> Section:
    """Attention proper: every row gathers its own keys; its own vectors are written once."""
    width, head = quant.window_bytes(cfg.head_dim), cfg.num_attention_heads * cfg.head_dim
    macs = read = 0
    for layer in range(cfg.num_hidden_layers):
        window, chosen = _keys(cfg, layer, call.context)
        macs += 2 * head * (window + chosen)  # scores, then values
        read += (window + 1) * width + chosen * quant.main_bytes(cfg.head_dim)
    return Section("attention over keys", (("bf16", 2.0 * macs * call.rows),), read * call.rows)


def _scores(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> Section:
    """Index scores. A full scan of keys is counted once for all rows of a sequence, which see the
    same; candidates, which a row has of its own, for every row. Devices that share them score
    their part of the keys for the rows of all.
    """
    per_key = cfg.index_n_heads * cfg.index_head_dim
    size = quant.index_bytes(cfg.index_head_dim)
    most = cfg.candidate_topk_blocks * cfg.candidate_block_size
    macs = read = 0.0
    for layer in cfg.index_source_layer_ids:
        entries = call.context // cfg.compress_ratios[layer]
        restricted = 0 <= cfg.candidate_source_layer_id < layer and entries > most
        seen = most if restricted else entries
        macs += per_key * seen * call.rows
        read += size * seen * (call.rows if restricted else call.slots / layout.ranks)
    precision: Precision = "fp4" if work.arithmetic == "stored" else "bf16"
    written = (
        4.0
        * call.rows
        * sum(call.context // cfg.compress_ratios[layer] for layer in cfg.kv_source_layer_ids)
    )
    return Section("index scores", ((precision, 2 * macs),), read + 2 * written)


def _routed(cfg: ModelConfig, layout: Layout, rows: int, work: Workload, *, draft: bool) -> Section:
    """Routed experts of a device: those that any row of its group chose are read."""
    total = cfg.dspark_n_routed_experts if draft else cfg.n_routed_experts
    k = cfg.dspark_num_experts_per_tok if draft else cfg.num_experts_per_tok
    kinds = ("drafter",) if draft else ("routed experts",)
    found = [spec for spec in _named(cfg, kinds, layout) if _is_routed(spec)]
    together = rows * layout.size(EXPERT)
    used = 1 - (1 - k / total) ** together  # of the experts, under uniform routing
    whole = _total("", [(spec, rows * k / total) for spec in found], layout, work)
    # `products` of a stack counts every expert; a row meets k of them, wherever they are.
    flops: tuple[tuple[Precision, float], ...] = tuple(
        (precision, count * work.balance) for precision, count in whole.flops
    )
    name = "drafter: routed experts" if draft else "routed experts"
    return Section(name, flops, whole.read * used)


def _streams(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> Section:
    """Mixes, routers and norms, and the streams themselves: read twice and written once in each of
    a layer's two sub-layers.
    """
    found = _named(cfg, ("routers, streams, norms",), layout)
    moved = 3.0 * 2 * cfg.num_hidden_layers * call.rows * cfg.hc_mult * cfg.hidden_size * 2
    return _total("streams, routers", [(s, call.rows) for s in found], layout, work, moved)


def _head(cfg: ModelConfig, layout: Layout, rows: int, work: Workload) -> Section:
    """Logits, and sampling, which reads them three times."""
    found = [s for s in _named(cfg, ("embedding and head",), layout) if products(s)]
    moved = 4.0 * 4 * rows * cfg.vocab_size
    # Cut over the vocabulary, a device has all rows but a part of the columns: as many products.
    return _total("head and sampling", [(s, rows) for s in found], layout, work, moved)


def _drafter(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> Section:
    """The draft blocks without their routed experts, the head once more, the Markov head; and the
    context that every row of the backbone leaves for them.
    """
    each: list[tuple[Spec, float]] = []
    for spec in _named(cfg, ("drafter",), layout):
        if not _is_routed(spec) and products(spec):
            rows = call.shared if "main_proj" in spec.template else call.drafted
            each.append((spec, rows))
    head = [s for s in _named(cfg, ("embedding and head",), layout) if products(s)]
    each += [(spec, call.drafted) for spec in head]
    keys = min(call.context, cfg.sliding_window) + cfg.dspark_block_size
    rings = cfg.num_nextn_predict_layers * keys * quant.window_bytes(cfg.head_dim) * call.drafted
    moved = 4.0 * 4 * call.drafted * cfg.vocab_size + rings
    return _total("drafter", each, layout, work, moved)
