"""What the scheduler says: one step of the device, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Preempted:
    """`job` lost `slot` and its pages, and waits again; it keeps what it has emitted."""

    slot: int
    job: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Seated:
    """`job` takes `slot`, which holds `reused` tokens at first.

    Attributes:
      snapshot: where to copy the slot's state from; None where `reused` is 0: an empty state.
      prompt: tokens to compute before the next one is sampled, `reused` included: the prompt, and
        what the job had emitted when it was preempted.
    """

    slot: int
    job: Hashable
    reused: int
    snapshot: int | None
    prompt: int


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """`pages` become number `first`, `first` + 1 ... of the slot's page table."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """`count` prompt rows of `slot` from position `start`; after the `last` chunk it samples."""

    slot: int
    job: Hashable
    start: int
    count: int
    last: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """After the step's chunks, copy the state of `slot`, at `tokens` tokens, to `snapshot`."""

    slot: int
    snapshot: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step, to be carried out in the order of its fields.

    Attributes:
      preempted: slots that are given up.
      seated: slots that begin a job.
      grants: pages for slots. Earlier pages of a table stay; pages shared with others come first
        in a new table and are never written.
      chunks: rows of prompts, in one call, at most one chunk a slot.
      decode: slots that decode: beside the chunks where there are any, else a look of rounds.
      ahead: tokens that each of them has page room for; 1 beside chunks.
      saved: snapshots to keep.
    """

    preempted: tuple[Preempted, ...] = ()
    seated: tuple[Seated, ...] = ()
    grants: tuple[Grant, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode: tuple[int, ...] = ()
    ahead: int = 1
    saved: tuple[Saved, ...] = ()

    def without(self, slots: Collection[int]) -> Step:
        """The step without prompt rows and snapshots of `slots`, whose jobs have ended."""
        return dataclasses.replace(
            self,
            chunks=tuple(chunk for chunk in self.chunks if chunk.slot not in slots),
            saved=tuple(saved for saved in self.saved if saved.slot not in slots),
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is to run: every job is finished."""
        return not self.chunks and not self.decode
