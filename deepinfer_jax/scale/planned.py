"""`plan`: what a model needs and takes on a mesh of some hardware, as one value.

Pure: numbers in, numbers out. The compiled programs of `scale.compiled` are a witness beside it,
not a source of what it says about memory of an accelerator.
"""

from __future__ import annotations

import dataclasses

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.scale import memory, traffic, work
from deepinfer_jax.scale.hardware import Hardware
from deepinfer_jax.scale.layouts import Layout
from deepinfer_jax.scale.memory import Part
from deepinfer_jax.scale.workload import Call, Workload

SHARE = 0.9  # of a device's memory that may be planned with; the rest is for the runtime


@dataclasses.dataclass(frozen=True)
class Timed:
    """A section of a call: seconds, and what they are spent on."""

    name: str
    seconds: float
    limit: str  # arithmetic, memory or links
    flops: float = 0.0
    nbytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Step:
    """A call on the roofline: no section faster than its arithmetic, memory or links allow, one
    after the other. Launches and waiting are not in it: it is a bound from below.
    """

    rows: int
    sections: tuple[Timed, ...]

    @property
    def seconds(self) -> float:
        """Of the whole call."""
        return sum(section.seconds for section in self.sections)

    @property
    def limit(self) -> str:
        """What most of the time is spent on: arithmetic, memory or links."""
        spent: dict[str, float] = {}
        for section in self.sections:
            spent[section.limit] = spent.get(section.limit, 0.0) + section.seconds
        return max(spent, key=lambda name: spent[name])

    @property
    def longest(self) -> Timed:
        """The section that takes longest."""
        return max(self.sections, key=lambda section: section.seconds)


@dataclasses.dataclass(frozen=True)
class Plan:
    """See the modules of this package for what each number is; bytes and seconds of one device."""

    layout: Layout
    hardware: Hardware
    workload: Workload
    slots: int
    weights: tuple[Part, ...]
    caches: tuple[Part, ...]
    activations: tuple[Part, ...]
    at_once: int
    decode: Step
    prefill: Step
    largest: int

    @property
    def needed(self) -> int:
        """Bytes of a device."""
        return _sum(self.weights) + _sum(self.caches) + self.at_once

    @property
    def room(self) -> int:
        """Bytes that may be planned with."""
        return int(SHARE * self.hardware.memory)

    @property
    def feasible(self) -> bool:
        """Whether everything fits."""
        return self.needed <= self.room

    @property
    def tokens_per_second(self) -> float:
        """Of a device, with the assumed acceptance."""
        return self.slots_share * self.workload.emitted / self.decode.seconds

    @property
    def full_acceptance(self) -> float:
        """Of a device, if every draft were right, as charts of others count."""
        return self.slots_share * (1 + self.workload.drafts) / self.decode.seconds

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of a device. Those with the same sequences run the same rows, but where
        they share the cache: then each has rows of its own.
        """
        return self.prefill.rows * self._share * self.layout.ranks / self.prefill.seconds

    @property
    def slots_share(self) -> float:
        """Sequences a device of the mesh: the whole over the devices."""
        return self.slots * self._share

    @property
    def _share(self) -> float:
        """Of what a device computes, as other devices compute the same."""
        return self.layout.parts("slot") / self.layout.devices


def _sum(parts: tuple[Part, ...]) -> int:
    return sum(part.device for part in parts)


def plan(cfg: ModelConfig, layout: Layout, hardware: Hardware, workload: Workload) -> Plan:
    """The plan of a workload; ValueError where the layout cannot hold the model or the workload
    is none for it. What does not fit into memory is no error: `Plan.feasible` says so.
    """
    layout.check(cfg)
    workload.check(cfg)
    decode = Call.decode(cfg, layout, workload)
    prompts = Call.prompts(cfg, layout, workload)
    living = memory.activations(cfg, layout, decode, workload)
    filling = memory.activations(cfg, layout, prompts, workload)
    parts = max(living, filling, key=memory.at_once)
    weights = memory.weights(cfg, layout)
    return Plan(
        layout=layout,
        hardware=hardware,
        workload=workload,
        slots=decode.slots,
        weights=weights,
        caches=memory.caches(cfg, layout, workload),
        activations=parts,
        at_once=memory.at_once(parts),
        decode=step(cfg, layout, hardware, decode, workload),
        prefill=step(cfg, layout, hardware, prompts, workload),
        largest=largest(cfg, layout, hardware, workload),
    )


def step(
    cfg: ModelConfig, layout: Layout, hardware: Hardware, call: Call, workload: Workload
) -> Step:
    """The roofline of one call."""
    made = []
    for section in work.sections(cfg, layout, call, workload):
        busy = sum(count / hardware.rate(p) for p, count in section.flops)
        moved = section.read / hardware.bandwidth
        limit = "arithmetic" if busy > moved else "memory"
        made.append(Timed(section.name, max(busy, moved), limit, section.operations, section.read))
    for sent in traffic.traffic(cfg, layout, call, workload):
        spent = traffic.seconds(sent, layout, hardware)
        made.append(Timed(sent.name, spent, "links", nbytes=sent.sent))
    return Step(call.rows, tuple(made))


def largest(cfg: ModelConfig, layout: Layout, hardware: Hardware, workload: Workload) -> int:
    """Most sequences of this context on the mesh that fit; 0 where none does."""
    room = SHARE * hardware.memory - _sum(memory.weights(cfg, layout))
    parts = layout.parts("slot")

    def fits(slots: int) -> bool:
        asked = dataclasses.replace(workload, concurrency=slots * parts)
        calls = (Call.decode(cfg, layout, asked), Call.prompts(cfg, layout, asked))
        most = max(memory.at_once(memory.activations(cfg, layout, c, asked)) for c in calls)
        return _sum(memory.caches(cfg, layout, asked)) + most <= room

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * parts
