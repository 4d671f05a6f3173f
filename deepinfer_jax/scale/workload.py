"""What is asked of a mesh: sequences, their length, drafts, and how things are done."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from deepinfer_jax.cache import Paging
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.scale.layouts import Layout

Arithmetic = Literal["bf16", "stored"]
Exchange = Literal["gathered", "routed"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """See the fields; the defaults are those of `deepinfer-jax plan`.

    context     tokens that each sequence has in the cache
    concurrency sequences on the whole mesh
    drafts      verified in every round; 0: plain decoding
    acceptance  probability that a draft is right if all before it are; assumed, not measured
    prefill     rows of one device in a call that runs prompts, before padding
    balance     busiest device over the mean, in routed experts (`moe_lb`)
    arithmetic  "bf16": weights are decoded before they multiply, as this package does; "stored":
                FP8 by FP8, and FP4 by FP4 for index scores, as hardware with such units could
    exchange    "gathered": every row goes to every device, as this package's programs do; "routed":
                rows go where their experts are, and only there
    page        tokens of a page of global KV
    """

    context: int = 65536
    concurrency: int = 256
    drafts: int = 5
    acceptance: float = 0.75
    prefill: int = 1024
    balance: float = 1.0
    arithmetic: Arithmetic = "bf16"
    exchange: Exchange = "gathered"
    page: int = 64

    def __post_init__(self) -> None:
        least = {"context": 1, "concurrency": 1, "drafts": 0, "prefill": 1, "page": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance must lie in 0..1, got {self.acceptance!r}")
        if not (math.isfinite(self.balance) and self.balance >= 1):
            raise ValueError(f"balance (busiest over mean) must be >= 1, got {self.balance!r}")
        for name, kind in (("arithmetic", Arithmetic), ("exchange", Exchange)):
            if getattr(self, name) not in get_args(kind):
                expected = " or ".join(get_args(kind))
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    def check(self, cfg: ModelConfig) -> None:
        """Refuse what the model cannot do."""
        if self.context > cfg.max_position_embeddings:
            raise ValueError(
                f"context={self.context} exceeds max_position_embeddings="
                f"{cfg.max_position_embeddings} of the model"
            )
        if self.drafts > cfg.most_drafts:
            raise ValueError(
                f"drafts={self.drafts}, but one pass of this model's drafter makes at most "
                f"{cfg.most_drafts}"
            )

    def slots(self, layout: Layout) -> int:
        """Sequences on a device."""
        return -(-self.concurrency // layout.parts("slot"))

    def paging(self, cfg: ModelConfig, layout: Layout) -> Paging:
        """Pages of all sequences of the mesh; each has entries for all devices that share it."""
        least = math.lcm(*cfg.ratios) * layout.ranks if cfg.ratios else 1
        page = -(-self.page // least) * least if cfg.ratios else 1
        slots = self.slots(layout) * layout.parts("slot")
        return Paging(page, slots * -(-self.context // page))

    @property
    def emitted(self) -> float:
        """Expected tokens of a round, the one after the last right draft included."""
        return sum(self.acceptance**i for i in range(self.drafts + 1))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call as a device sees it: its rows, those whose logits it wants, its sequences.

    drafted: rows of draft blocks; shared: rows of all devices that have the same sequences, of
    which `rows` are its own, padding among them.
    """

    rows: int
    sampled: int
    slots: int
    context: int
    drafted: int
    shared: int

    @classmethod
    def decode(cls, cfg: ModelConfig, layout: Layout, work: Workload) -> Call:
        """A round: drafts, their verification, a token more."""
        slots = work.slots(layout)
        rows = slots * (1 + work.drafts)
        own = own_rows(rows, layout.ranks)
        return cls(own, rows, slots, work.context, slots * work.drafts, rows)

    @classmethod
    def prompts(cls, cfg: ModelConfig, layout: Layout, work: Workload) -> Call:
        """A chunk of prompts, seen at the end of their context."""
        slots, rows = work.slots(layout), work.prefill * layout.ranks
        own = own_rows(rows, layout.ranks)
        return cls(own, slots, min(slots, rows), work.context, 0, rows)


def own_rows(rows: int, ranks: int) -> int:
    """Rows of each of `ranks` devices that share them, as `mirror.mirrored` cuts a call."""
    return rows if ranks == 1 else 2 * -(-rows // (2 * ranks))
