"""What a run came to, in numbers: of every step, and of the whole. Values, and their adding up."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from deepinfer_jax.engine.watch import Watch
from deepinfer_jax.rounds import Round
from deepinfer_jax.scheduling import Step, Usage

Kind = Literal["prompts", "decode", "grammar"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One call of the device, as it looks once its results are read.

    Attributes:
      time: seconds since the epoch.
      kind: "prompts" (one row of each decoding slot may run beside them), "decode" (a look of
        several rounds) or "grammar" (one round that follows grammars).
      rows: rows that the call computes, in each round: its size, whether all are used or not.
      prompt_tokens: prompt rows among them.
      slots: slots that decode. waiting: requests without a slot. pages: pages in use.
      rounds: rounds that were run.
      tokens: tokens that became part of replies.
      verified, accepted: drafts that rounds verified, and those of them in the replies.
      latency_s: from asking until the results were read; None where nothing was read of it: a part
        of a prompt. With steps asked ahead it holds the rest of the step before.
      idle_s, compile_s: seconds that the device waited for the host since the record before, and
        that were spent on compiling.
      moe_lb: over a mesh, tokens of the slowest place along its axis "expert" over those of the
        mean one (docs/eplb.md 2), both added up over rounds and layers before they are divided;
        None on one device, and where nothing was read.
    """

    time: float
    kind: Kind
    rows: int
    prompt_tokens: int
    slots: int
    waiting: int
    pages: int
    rounds: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    latency_s: float | None = None
    idle_s: float = 0.0
    compile_s: float = 0.0
    moe_lb: float | None = None


Observer = Callable[[StepRecord], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """What an engine has done so far.

    Attributes:
      requests: submitted; of them done, failed, waiting and running now. The rest was cancelled.
      prompt_tokens: prompt rows computed, again after a preemption. shared_tokens: tokens of
        beginnings that were taken over from other requests instead.
      tokens: emitted, in rounds and after prompts; verified, accepted: drafts, as in `Timing`.
      preempted: how often a request lost its slot.
      pages, used_pages, peak_pages: of global KV in all, in use now, and at most.
      seconds: while there was something to do, without compiling.
      idle_s: of them, how long the device waited for the host (`Watch`).
      compiled: programs made or read from a cache, warm-up included; recompiled: after it.
      compile_s: seconds that this took.
      moved_layers: how often a layer's experts moved to another placement (docs/parallel.md 3).
    """

    requests: int
    done: int
    failed: int
    waiting: int
    running: int
    prompt_tokens: int
    shared_tokens: int
    tokens: int
    verified: int
    accepted: int
    preempted: int
    pages: int
    used_pages: int
    peak_pages: int
    seconds: float
    idle_s: float
    compiled: int
    recompiled: int
    compile_s: float
    moved_layers: int = 0

    @property
    def idle_share(self) -> float:
        """Of `seconds`; 0 for none."""
        return self.idle_s / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the verified drafts that were accepted; None where none was verified."""
        return self.accepted / self.verified if self.verified else None


@dataclasses.dataclass
class Counts:
    """What `Tally` adds up of the fields of `Statistics`."""

    requests: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    preempted: int = 0
    moved_layers: int = 0
    peak_pages: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A call on its way: when it was asked for, and what is known of it by then."""

    at: float
    record: StepRecord


class Tally:
    """Adds up what an engine does, and tells an observer of every call."""

    def __init__(self, watch: Watch, observer: Observer | None = None) -> None:
        self.counts = Counts()
        self._watch, self._observer = watch, observer
        self._told = (0.0, 0.0)  # idle and compiling seconds of the records so far

    def plan(self, step: Step, usage: Usage) -> None:
        """A step that is going to be carried out, and what is in use then."""
        counts = self.counts
        counts.preempted += len(step.preempted)
        counts.shared_tokens += sum(seated.reused for seated in step.seated)
        counts.prompt_tokens += sum(chunk.count for chunk in step.chunks)
        counts.peak_pages = max(counts.peak_pages, usage.pages - usage.free_pages)

    def ask(self, kind: Kind, rows: int, slots: int, usage: Usage, prompt_tokens: int = 0) -> Asked:
        """A call is about to be made."""
        pages = usage.pages - usage.free_pages
        return Asked(
            time.perf_counter(),
            StepRecord(time.time(), kind, rows, prompt_tokens, slots, usage.waiting, pages),
        )

    def skip(self, asked: Asked) -> None:
        """Of this call nothing is going to be read."""
        self._tell(asked.record)

    def land(
        self, asked: Asked, made: Round, tokens: int, verified: int, accepted: int,
        moe_lb: float | None = None,
    ) -> None:  # fmt: skip
        """The results of a call were read: so much of them became part of replies."""
        self.counts.tokens += tokens
        self.counts.verified += verified
        self.counts.accepted += accepted
        rounds = int(np.count_nonzero(np.any(made.emitted, axis=(1, 2))))
        latency = time.perf_counter() - asked.at
        self._tell(
            dataclasses.replace(
                asked.record, time=time.time(), rounds=rounds, tokens=tokens, verified=verified,
                accepted=accepted, latency_s=latency, moe_lb=moe_lb,
            )
        )  # fmt: skip

    def _tell(self, record: StepRecord) -> None:
        if self._observer is None:
            return
        idle, compiling = self._told
        self._told = self._watch.idle_s, self._watch.compile_s
        self._observer(
            dataclasses.replace(
                record, idle_s=self._told[0] - idle, compile_s=self._told[1] - compiling
            )
        )

    def statistics(self, usage: Usage) -> Statistics:
        """So far; `usage`: what is in use now."""
        watch = self._watch
        return Statistics(
            **dataclasses.asdict(self.counts),
            waiting=usage.waiting, running=usage.running, pages=usage.pages,
            used_pages=usage.pages - usage.free_pages, seconds=watch.seconds, idle_s=watch.idle_s,
            compiled=watch.compiled, recompiled=watch.recompiled, compile_s=watch.compile_s,
        )  # fmt: skip


def learnt(made: Round, left: np.ndarray, parts: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(confidence [rounds, B, N], most [rounds, B]) of the rounds that were run.

    With several devices, `parts`, a round of theirs counts as one of each, with its own slots.

    most: drafts that could have become part of a reply, of slots with `left` [B] tokens before.
    """
    count = np.count_nonzero(made.emitted, axis=2)  # a slot that takes part emits
    done = count.any(axis=1)
    count, confidence = count[done], np.asarray(made.confidence)[done]
    before = np.cumsum(count, axis=0) - count
    most = np.clip(left - before - 1, 0, confidence.shape[2])
    most = np.where(count > 0, most, 0)
    rounds, own = len(most) * parts, most.shape[1] // parts
    return confidence.reshape(rounds, own, confidence.shape[2]), most.reshape(rounds, own)
