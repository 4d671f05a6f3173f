"""Random arrivals, forks, cancellations and steps on a fake device; invariants after each."""

from __future__ import annotations

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer_jax.scheduling import (
    FirstCome,
    Job,
    Limits,
    Priority,
    Scheduler,
    ShortestFirst,
    Span,
)
from tests.scheduling.device import Device

LONGEST = 30


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    return Limits(
        slots=draw(st.integers(1, 4)),
        pages=draw(st.integers(3, 14)),
        page_tokens=3,
        rows=draw(st.sampled_from([1, 2, 8, 13])),
        longest=LONGEST,
        snapshots=draw(st.integers(0, 4)),
        keep=draw(st.sampled_from(["shared", "ends"])),
        mixed=draw(st.booleans()),
    )


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Beginnings of two texts with different ends: many have some pages in common."""
    text = draw(st.sampled_from([100, 200]))
    head = [text + place for place in range(draw(st.integers(0, 12)))]
    tail = [draw(st.integers(0, 1)) * 1000 + place for place in range(draw(st.integers(1, 7)))]
    return (*head, *tail)


@st.composite
def spans(draw: st.DrawFn, prompt: tuple[int, ...]) -> tuple[Span, ...]:
    """Up to three anywhere in the prompt, up to all of it; few contents, so that some are equal."""
    found, at = [], 0
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 3]))):
        start = at + draw(st.integers(0, 4))
        length = draw(st.integers(1, 9))
        if start + length > len(prompt):
            break
        found.append(Span(start, length, draw(st.sampled_from([b"sun", b"moon"]))))
        at = start + length
    return tuple(found)


@st.composite
def jobs(draw: st.DrawFn) -> tuple:
    """Prompt, max_tokens, priority, reuse, spans."""
    prompt = draw(prompts())
    reuse = draw(st.sampled_from([True, True, True, False]))
    return prompt, draw(st.integers(1, 20)), draw(st.integers(0, 9)), reuse, draw(spans(prompt))


ORDERS = st.sampled_from([FirstCome(), ShortestFirst(5), Priority(3)])


class Machine(RuleBasedStateMachine):
    """The scheduler against what the test knows: jobs, arrivals, the fake device."""

    @initialize(limits=limits(), order=ORDERS, overlapped=st.booleans())
    def start(self, limits: Limits, order, overlapped: bool) -> None:
        self.limits, self.order = limits, order
        self.scheduler = Scheduler(limits, order)
        self.device = Device(self.scheduler, overlapped=overlapped)
        self.ranks: dict[object, tuple[int, int]] = {}
        self.arrivals = 0
        self.names = 0

    # -- what can happen --

    @rule(jobs=st.lists(jobs(), min_size=1, max_size=4), count=st.integers(1, 4))
    def arrive(self, jobs, count) -> None:
        """Some jobs, and several samples of the last one."""
        for job in jobs[:-1]:
            self.submit(*job, 1)
        self.submit(*jobs[-1], count)

    def submit(self, tokens, most, priority, reuse, spans, count) -> None:
        self.names += 1
        job = Job(self.names, tokens, most, priority, reuse, spans)
        total = len(tokens) + most
        if total > LONGEST or -(-total // 3) > self.limits.pages:
            with pytest.raises(ValueError, match=f"= {total} "):
                self.scheduler.submit(job)
            return
        room = self.limits.rows
        if any(span.length > room for span in spans):
            with pytest.raises(ValueError, match=f" {room} prompt rows: show a smaller image"):
                self.scheduler.submit(job)
            return
        if count == 1:
            self.scheduler.submit(job)
            jobs = (job,)
        else:
            jobs = self.scheduler.fork(job, count)
        for each in jobs:
            self.device.expect(each)
            self.ranks[each.id] = (self.order.rank(each, self.arrivals), self.arrivals)
            self.arrivals += 1

    @precondition(lambda self: self.device.jobs)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        job = data.draw(st.sampled_from(list(self.device.jobs)))
        self.device.drop(job, self.scheduler.cancel(job))

    @rule(often=st.integers(0, 7))
    def renew(self, often: int) -> None:
        if often:
            return  # the cache must have time to fill
        self.scheduler.renew(f"version {self.names}")
        assert self.scheduler.usage().prefixes == 0

    @rule(lookahead=st.integers(1, 7), data=st.data())
    def step(self, lookahead: int, data) -> None:
        self.once(lookahead, lambda most: data.draw(st.integers(1, most)))

    @rule(lookahead=st.integers(1, 7), times=st.integers(2, 4))
    def steps(self, lookahead: int, times: int) -> None:
        """Many steps are as likely as many arrivals."""
        for _ in range(times):
            self.once(lookahead, lambda most: most)

    def teardown(self) -> None:
        """Everything left finishes, within a bound, and leaves nothing behind."""
        work = sum(len(job.tokens) + job.max_tokens + 2 for job in self.device.jobs.values())
        for _ in range((len(self.device.jobs) + 1) * work):
            if not self.device.jobs:
                break
            self.once(1, lambda most: most)
        assert not self.device.jobs, "somebody starves"
        self.scheduler.renew("")
        usage = self.scheduler.usage()
        assert (usage.waiting, usage.running, usage.free_pages) == (0, 0, self.limits.pages)

    # -- a step and what must be true of it --

    def once(self, lookahead: int, emitted) -> None:
        running = {number: slot.job.id for number, slot in self.device.slots.items()}
        waiting = set(self.device.jobs) - set(running.values())
        step = self.scheduler.step(lookahead, self.device.unreported)
        assert step.idle == (not self.device.jobs)
        assert step.ahead == 1 or not step.chunks
        assert step.ahead in (1, lookahead)
        gone = [self.ranks[each.job] for each in step.preempted]
        stay = [self.ranks[job] for job in running.values() if self.ranks[job] not in gone]
        if gone:  # those that stand last, for the sake of one that stands before them
            assert not step.seated
            assert max(stay) < min(gone)
            assert min(self.ranks[running[slot]] for slot in step.decode) < min(gone)
        self.check_order(step, waiting)
        self.device.run(step, emitted)

    def check_order(self, step, waiting) -> None:
        seated = [self.ranks[each.job] for each in step.seated]
        assert seated == sorted(seated)
        waiting = waiting - {each.job for each in step.seated}
        if not self.limits.snapshots and seated:
            assert all(self.ranks[job] > max(seated) for job in waiting)
        jobs = {number: slot.job.id for number, slot in self.device.slots.items()}
        jobs |= {each.slot: each.job for each in step.seated}
        for each in step.preempted:
            del jobs[each.slot]
        if jobs:
            active = {chunk.slot for chunk in step.chunks} | set(step.decode)
            if self.limits.mixed or not step.chunks:
                first = min(jobs, key=lambda slot: self.ranks[jobs[slot]])
                assert first in active, "the first job does not get on"
        filling = [self.ranks[chunk.job] for chunk in step.chunks]
        assert filling == sorted(filling)

    # -- what must be true at any time --

    @invariant()
    def pages_add_up(self) -> None:
        seats = self.scheduler._seats
        entries = list(seats.prefixes)
        tables = [slot.table for slot in self.device.slots.values()]
        assert sorted(map(sorted, tables)) == sorted(sorted(seat.pages) for seat in seats)
        owners = collections.Counter(
            page for table in [*tables, *(entry.pages for entry in entries)] for page in table
        )
        for page in range(self.limits.pages):
            assert seats.pages.owners(page) == owners[page]
        assert seats.pages.free + len(owners) == self.limits.pages
        snapshots = [entry.snapshot for entry in entries]
        assert len(set(snapshots)) == len(snapshots) <= self.limits.snapshots

    @invariant()
    def shared_pages_are_full(self) -> None:
        """A page with two owners lies within what each of them has computed and will not touch."""
        seats = self.scheduler._seats
        for slot in self.device.slots.values():
            full = slot.length // self.limits.page_tokens
            assert all(seats.pages.owners(page) == 1 for page in slot.table[full:])
            assert len(set(slot.table)) == len(slot.table)


def test_any_sequence_of_events() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=200, stateful_step_count=30, deadline=None)
    )
