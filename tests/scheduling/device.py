"""A device without a model: it carries out steps and refuses whatever a real one could not survive.

What stands in a page is a digest of all tokens up to there, like real KV, and so is a slot's state;
the next token is a function of it. A page that is lost, shared and written, or restored at the
wrong place therefore shows, as a wrong table here or as another reply than the job gives alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from deepinfer_jax.scheduling import Chunk, Job, Limits, Scheduler, Step

EMPTY = 0  # the state of a slot without tokens
GARBAGE = -1


def absorb(state: int, token: int) -> int:
    """State after one more token."""
    return hash((state, token))


def following(state: int) -> int:
    """The token that comes next."""
    return state % 97


def ends(token: int) -> bool:
    """Whether `token` ends a reply."""
    return token % 31 == 0


def contents(job: Job) -> list[int]:
    """What stands at the places of the prompt: token ids, but in a span what it shows there."""
    shown = list(job.tokens)
    for span in job.spans:
        for place in range(span.start, span.end):
            shown[place] = hash((span.key, place - span.start))
    return shown


def alone(job: Job, stopping: bool = True) -> list[int]:
    """The reply of `job`, without any scheduling; unless `stopping`, it has max_tokens."""
    state = EMPTY
    for token in contents(job):
        state = absorb(state, token)
    reply = [following(state)]
    while not (stopping and ends(reply[-1])) and len(reply) < job.max_tokens:
        state = absorb(state, reply[-1])
        reply.append(following(state))
    return reply


@dataclasses.dataclass(eq=False)
class Slot:
    """What the device knows of a slot: `tokens` are those of the prompt and of the reply so far."""

    number: int
    job: Job
    tokens: list[int]
    prompt: int
    length: int
    state: int
    ended: bool = False
    table: list[int] = dataclasses.field(default_factory=list)


class Device:
    """Pages, slots and snapshots; `run` carries out a step and reports to the scheduler."""

    def __init__(
        self, scheduler: Scheduler, stopping: bool = True, overlapped: bool = False
    ) -> None:
        """Unless `stopping`, replies have max_tokens. `overlapped`: report a step with the next."""
        self.scheduler = scheduler
        self.stopping = stopping
        self.overlapped = overlapped
        self.limits: Limits = scheduler.limits
        self.jobs: dict[Hashable, Job] = {}
        self.replies: dict[Hashable, list[int]] = {}
        self.slots: dict[int, Slot] = {}
        self.finished: set[Hashable] = set()
        self.reused = 0
        self._pages = [[GARBAGE] * self.limits.page_tokens for _ in range(self.limits.pages)]
        self._snapshots: dict[int, tuple[int, int]] = {}
        self._news: list[tuple[Slot, list[int]]] = []

    @property
    def unreported(self) -> int:
        """Most tokens that a slot has emitted without a report."""
        return max((len(tokens) for _, tokens in self._news), default=0)

    def expect(self, job: Job) -> None:
        """`job` was submitted."""
        self.jobs[job.id], self.replies[job.id] = job, []
        self.finished.discard(job.id)

    def drop(self, job: Hashable, slot: int | None) -> None:
        """`job` was cancelled."""
        del self.jobs[job]
        if slot is not None:
            assert self.slots.pop(slot).job.id == job

    def run(self, step: Step, emitted: Callable[[int], int] = lambda most: most) -> None:
        """Carry out `step`; a decoding slot emits `emitted(most)` tokens, 1 to most."""
        for gone in step.preempted:
            assert self.slots.pop(gone.slot).job.id == gone.job
        self._seat(step)
        for grant in step.grants:
            slot = self.slots[grant.slot]
            assert grant.first == len(slot.table)
            slot.table.extend(grant.pages)
        assert len({chunk.slot for chunk in step.chunks}) == len(step.chunks)
        rows = sum(chunk.count for chunk in step.chunks)
        assert rows <= self.limits.rows
        news = [self._chunk(chunk) for chunk in step.chunks]
        news += [self._decode(self.slots[number], step.ahead, emitted) for number in step.decode]
        for saved in step.saved:
            slot = self.slots[saved.slot]
            assert slot.length == saved.tokens
            assert 0 <= saved.snapshot < self.limits.snapshots
            self._snapshots[saved.snapshot] = (slot.length, slot.state)
        now, self._news = (self._news, news) if self.overlapped else (news, [])
        for slot, tokens in now:
            self._report(slot, tokens)

    def _seat(self, step: Step) -> None:
        for seated in step.seated:
            assert seated.slot not in self.slots, "a slot runs two jobs"
            assert seated.job not in {slot.job.id for slot in self.slots.values()}
            job = self.jobs[seated.job]
            state = EMPTY
            if seated.snapshot is None:
                assert seated.reused == 0
            else:
                tokens, state = self._snapshots[seated.snapshot]
                assert tokens == seated.reused > 0
            known = [*contents(job), *self.replies[job.id]]
            assert seated.prompt == len(known)
            assert seated.reused < seated.prompt, "no row is left to sample from"
            self.slots[seated.slot] = Slot(
                seated.slot, job, known, seated.prompt, seated.reused, state
            )
            self.reused += seated.reused

    def _chunk(self, chunk: Chunk) -> tuple[Slot, list[int]]:
        slot = self.slots[chunk.slot]
        assert slot.job.id == chunk.job
        assert chunk.start == slot.length
        assert chunk.count > 0
        for span in slot.job.spans:
            inside = {*range(span.start, span.end)}
            part = inside & {*range(chunk.start, chunk.start + chunk.count)}
            assert part in (set(), inside), "a span is split"
        self._check_pages(slot)
        for _ in range(chunk.count):
            self._feed(slot)
        assert chunk.last == (slot.length == slot.prompt)
        return slot, [self._emit(slot)] if chunk.last else []

    def _decode(
        self, slot: Slot, ahead: int, emitted: Callable[[int], int]
    ) -> tuple[Slot, list[int]]:
        if slot.ended:
            assert self.overlapped, "it was finished"
            return slot, []
        assert slot.length == len(slot.tokens) - 1 >= slot.prompt
        most = min(ahead, len(slot.job.tokens) + slot.job.max_tokens - len(slot.tokens))
        self._check_pages(slot)
        for place in range(most):  # drafts that will be rejected
            self._write(slot, slot.length + place, GARBAGE)
        tokens: list[int] = []
        for _ in range(emitted(most)):
            self._feed(slot)
            tokens.append(self._emit(slot))
            if slot.ended:
                break
        return slot, tokens

    def _feed(self, slot: Slot) -> None:
        slot.state = absorb(slot.state, slot.tokens[slot.length])
        self._write(slot, slot.length, slot.state)
        slot.length += 1

    def _emit(self, slot: Slot) -> int:
        token = following(slot.state)
        slot.tokens.append(token)
        full = len(slot.tokens) == len(slot.job.tokens) + slot.job.max_tokens
        slot.ended = full or (self.stopping and ends(token))
        return token

    def _write(self, slot: Slot, position: int, value: int) -> None:
        page = slot.table[position // self.limits.page_tokens]
        for other in self.slots.values():
            assert other is slot or page not in other.table, "a shared page is written"
        self._pages[page][position % self.limits.page_tokens] = value

    def _check_pages(self, slot: Slot) -> None:
        """The slot's pages hold its tokens, each after all before it."""
        state, size = EMPTY, self.limits.page_tokens
        for position in range(slot.length):
            state = absorb(state, slot.tokens[position])
            assert self._pages[slot.table[position // size]][position % size] == state
        assert slot.state == state

    def _report(self, slot: Slot, tokens: list[int]) -> None:
        if not tokens or self.slots.get(slot.number) is not slot:
            return  # preempted or cancelled meanwhile
        job, reply = slot.job, self.replies[slot.job.id]
        reply.extend(tokens)
        self.scheduler.advance(slot.number, len(tokens))
        if (self.stopping and ends(reply[-1])) or len(reply) == job.max_tokens:
            assert reply == alone(job, self.stopping)
            self.scheduler.finish(slot.number)
            self.finished.add(job.id)
            del self.slots[slot.number], self.jobs[job.id]


def drain(device: Device, lookahead: int = 1, most: int = 10_000) -> list[Step]:
    """Run until nothing is left; the steps it took, at most `most`."""
    steps: list[Step] = []
    while not (step := device.scheduler.step(lookahead, device.unreported)).idle:
        assert len(steps) < most, "no end in sight"
        steps.append(step)
        device.run(step)
    assert not device.jobs
    return steps
