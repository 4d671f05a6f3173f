"""Bytes that a device sends to others in one call (docs/scale.md 5)."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.axes import EXPERT
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.quant import GROUP
from deepinfer_jax.scale.hardware import Hardware
from deepinfer_jax.scale.layouts import Layout
from deepinfer_jax.scale.workload import Call, Workload


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes sent by a device, as much as it receives; `elements`: numbers among them, by
    collective of the compiled program ((name, count), ..), where it has one.
    """

    name: str
    sent: float
    elements: tuple[tuple[str, int], ...] = ()


def traffic(cfg: ModelConfig, layout: Layout, call: Call, work: Workload) -> tuple[Traffic, ...]:
    """Of one call, by what it is for; empty on one device."""
    if layout.size(EXPERT) == 1:
        return ()
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


def seconds(sent: float, layout: Layout, hardware: Hardware) -> float:
    """Time to send so much to the others alike: within the domain and beyond it, side by side."""
    n = layout.size(EXPERT)
    if n <= 1:
        return 0.0
    near = min(hardware.domain, n) - 1
    within = sent * near / (n - 1) / hardware.link
    return max(within, sent * (n - 1 - near) / (n - 1) / hardware.network)
