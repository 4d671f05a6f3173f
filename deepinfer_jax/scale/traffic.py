"""Bytes that a device sends to others in one call (docs/scale.md 5)."""

from __future__ import annotations

import dataclasses

from deepinfer_jax import quant
from deepinfer_jax.axes import CONTEXT, EXPERT
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import dealt, index
from deepinfer_jax.quant import GROUP
from deepinfer_jax.scale.hardware import Hardware
from deepinfer_jax.scale.layouts import Layout
from deepinfer_jax.scale.workload import Call, Workload

_SHOWN, _ANSWERED = "all-gather", "all-to-all"
_Numbers = tuple[str, int, int]  # collective, numbers of a row, bytes of each


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes sent by a device along a mesh axis, as much as it receives; `elements`: numbers among
    them, by collective of the compiled program ((name, count), ..), where it has one.
    """

    name: str
    sent: float
    elements: tuple[tuple[str, int], ...] = ()
    axis: str = EXPERT


def traffic(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> tuple[Traffic, ...]:
    """Of one call, by what it is for; empty on one device."""
    along = () if layout.ranks == 1 else _context(cfg, layout, call, work)
    return (*along, *(() if layout.size(EXPERT) == 1 else _exchanged(cfg, layout, call, work)))


def _exchanged(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> tuple[Traffic, ...]:
    """Along the axis of experts."""
    made = [
        _experts("exchange of rows", call.rows, cfg.num_hidden_layers, cfg.num_experts_per_tok,
                 cfg, layout, work),
    ]  # fmt: skip
    if call.drafted:
        made.append(
            _experts("exchange of drafts", call.drafted, cfg.num_nextn_predict_layers,
                     cfg.dspark_num_experts_per_tok, cfg, layout, work)
        )  # fmt: skip
    if layout.parts("engram_rows") > 1 and layout.engram == "device":
        made.append(_engram(cfg, layout, call, work))
    if layout.parts("vocab") > 1:
        made.append(_vocabulary(cfg, layout, call, work))
    return tuple(made)


def _experts(
    name: str, rows: int, layers: int, k: int, cfg: ModelConfig, layout: Layout, work: Workload
) -> Traffic:
    n, d = layout.size(EXPERT), cfg.hidden_size
    if work.exchange == "gathered":
        # As `exchange.over_devices`: rows, ids, weights to everybody, outputs of all choices back.
        there = rows * (2 * d + 8 * k)
        back = rows * k * 2 * d
        elements = (
            ("all-gather", layers * n * rows * (d + 2 * k)),
            ("all-to-all", layers * n * rows * k * d),
        )
        return Traffic(name, layers * (n - 1) * float(there + back), elements)
    others = (n - 1) / n
    reached = n * (1 - (1 - 1 / n) ** k) * others  # other devices with an expert of the row
    there = rows * reached * d * (1 + 1 / GROUP)  # in FP8, with its scales
    return Traffic(name, layers * (there + rows * k * others * 2 * d))


def _share(layout: Layout, work: Workload) -> float:
    """How often a question or an answer about a device's own row is sent."""
    n = layout.size(EXPERT)
    return (n - 1) if work.exchange == "gathered" else (n - 1) / n


def _engram(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> Traffic:
    """Numbers of table rows, and the rows: codes and scales."""
    n, width = layout.size(EXPERT), cfg.engram_head_dim
    asked = call.rows * cfg.engram_columns * len(cfg.engram_layer_ids)
    answer = width + -(-width // GROUP)
    elements = (("all-gather", n * asked), ("all-to-all", n * asked * answer))
    return Traffic("Engram rows", asked * (4 + answer) * _share(layout, work), elements)


def _vocabulary(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> Traffic:
    """Embeddings of rows; rows for the head to all devices and their logits back; the same of
    drafts, whose Markov head has an embedding and a head of its own.
    """
    n, d, v, rank = layout.size(EXPERT), cfg.hidden_size, cfg.vocab_size, cfg.dspark_markov_rank
    tables = ((call.rows + call.drafted, d), (call.drafted, rank))
    heads = ((call.sampled + call.drafted, d), (call.drafted, rank))
    gathered = sum(n * count for count, _ in tables)
    gathered += sum(n * count * width for count, width in heads)
    returned = sum(n * count * width for count, width in tables)
    returned += sum(count * v for count, _ in heads)
    looked_up = sum(count * (4 + 2 * width) for count, width in tables) * _share(layout, work)
    judged = sum(count * (n - 1) * (2 * width + 4 * v / n) for count, width in heads)
    elements = (("all-gather", gathered), ("all-to-all", returned))
    return Traffic("vocabulary", looked_up + judged, elements)


def _context(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> tuple[Traffic, ...]:
    """Between devices that share rows and global KV (docs/parallel.md 5): what every row shows to
    all of them, what of a search comes back, and the chosen vectors.
    """
    reading = sum(1 for ratio in cfg.compress_ratios[: cfg.num_hidden_layers] if ratio)
    some, padded, asking = dealt.ROWS_AT_ONCE, call.rows, len(cfg.index_source_layer_ids)
    if call.rows > some:
        # Some rows after others, in a loop of every layer's own. Otherwise places are sent once for
        # all layers that use them: the compiler sees that they are the same.
        padded, asking = -(-call.rows // some) * some, reading
    vectors = [
        (_SHOWN, asking * cfg.index_topk, 4),
        (_ANSWERED, reading * cfg.index_topk * quant.main_bytes(cfg.head_dim), 1),
    ]
    return (
        _along("shared rows", _of_rows(cfg), call.rows, layout),
        _along("shared searches", _of_searches(cfg, layout, work), call.rows, layout),
        _along("shared KV", vectors, padded, layout),
    )


def _along(name: str, each: list[_Numbers], rows: int, layout: Layout) -> Traffic:
    """Of `rows` of a device, to every other one that shares them."""
    ranks = layout.ranks
    sent = sum(count * size for _, count, size in each) * rows * (ranks - 1)
    elements = {kind: 0 for kind, *_ in each}
    for kind, count, _ in each:
        elements[kind] += ranks * rows * count
    return Traffic(name, float(sent), tuple(elements.items()), CONTEXT)


def _of_rows(cfg: ModelConfig) -> list[_Numbers]:
    """Vectors of the window, what entries are made of, and what leaves the last layer."""
    d, taps = cfg.hidden_size, len(cfg.dspark_target_layer_ids)
    numbers = cfg.num_hidden_layers * cfg.head_dim
    numbers += (len(cfg.kv_source_layer_ids) + 1 + taps) * d
    return [(_SHOWN, numbers, 2)]


def _of_searches(cfg: ModelConfig, layout: Layout, work: Workload) -> list[_Numbers]:
    """Queries, and once the candidates where a layer has some; the best entries and blocks of each
    device. As `dealt.select`.
    """
    paging, ranks, size = work.paging(cfg, layout), layout.ranks, cfg.candidate_block_size
    made: list[_Numbers] = []
    for layer in cfg.index_source_layer_ids:
        kind = cfg.kinds()[layer]
        held = -(-work.context // paging.tokens) * (paging.tokens // (kind.ratio * ranks))
        scored = held
        made.append((_SHOWN, cfg.index_n_heads * cfg.index_head_dim, 2))
        made.append((_SHOWN, cfg.index_n_heads, 4))
        width = index.candidate_width(cfg, held * ranks)
        if kind.uses_candidates:
            scored = width * -(-size // ranks)
        made.append((_ANSWERED, 2 * min(cfg.index_topk, scored), 4))
        if kind.candidate_source and any(later.uses_candidates for later in cfg.kinds()):
            made.append((_ANSWERED, -(-held * ranks // size), 4))
            made.append((_SHOWN, width, 4))
    return made


def seconds(sent: Traffic, layout: Layout, hardware: Hardware) -> float:
    """Time to send so much to the others alike: within the domain and beyond it, side by side.
    Devices along an axis stand as far apart as the axes behind it are long.
    """
    n = layout.size(sent.axis)
    if n <= 1:
        return 0.0
    apart = layout.size(EXPERT) if sent.axis == CONTEXT else 1
    near = min(max(hardware.domain // apart, 1), n) - 1
    within = sent.sent * near / (n - 1) / hardware.link
    return max(within, sent.sent * (n - 1 - near) / (n - 1) / hardware.network)
