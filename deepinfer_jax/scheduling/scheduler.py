"""The scheduler: which job is in which slot with which pages, and what the device does next."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable

from deepinfer_jax.scheduling import sharing
from deepinfer_jax.scheduling.jobs import Job, Limits, check_integer
from deepinfer_jax.scheduling.orders import FirstCome, Order
from deepinfer_jax.scheduling.prefixes import Beginning, beginnings
from deepinfer_jax.scheduling.seats import Seats
from deepinfer_jax.scheduling.step import Chunk, Grant, Preempted, Saved, Seated, Step
from deepinfer_jax.scheduling.tickets import Ticket, Waiting


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What is in use: jobs waiting and running, pages free and of the pool, prefixes known."""

    waiting: int
    running: int
    free_pages: int
    pages: int
    prefixes: int


class Scheduler:
    """Jobs in, steps out. The one mutable object here; it holds numbers, never arrays.

    All conflicts are settled by one order of the jobs, which never changes: the waiting job that
    stands first gets the next slot, the running one that stands first gets prompt rows and pages
    first, and loses its pages to nobody behind it. So the first of all unfinished jobs gets on in
    every step once it runs, and until it runs nobody slips past it, except that a job may wait for
    a beginning that one before it is computing.
    """

    def __init__(self, limits: Limits, order: Order | None = None, salt: str = "") -> None:
        """`order`: default `FirstCome`. `salt`: names weights and numerics, see `renew`."""
        self.limits = limits
        self._order = FirstCome() if order is None else order
        self._salt = salt
        self._seats = Seats(limits)
        self._waiting = Waiting()
        self._jobs: dict[Hashable, Ticket] = {}
        self._arrivals = itertools.count()

    # -- jobs come and go --------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Let `job` wait for a slot.

        Raises ValueError for a job that can never fit (with the arithmetic) and for an id that an
        unfinished job has.
        """
        self._check(job)
        arrival = next(self._arrivals)
        ticket = Ticket(job, (self._order.rank(job, arrival), arrival), self._beginnings(job))
        self._jobs[job.id] = ticket
        self._waiting.add(ticket)

    def fork(self, job: Job, count: int) -> tuple[Job, ...]:
        """Submit `count` copies of `job`, with ids (job.id, 0), (job.id, 1) ..., and return them.

        They are ordinary jobs: the others wait while the first computes the full pages of their
        prompt, and then share them. Raises like `submit`, before any is submitted.
        """
        check_integer("count", count, 1)
        copies = tuple(dataclasses.replace(job, id=(job.id, number)) for number in range(count))
        for copy in copies:
            self._check(copy)
        for copy in copies:
            self.submit(copy)
        return copies

    def advance(self, slot: int, tokens: int) -> None:
        """The job in `slot` has emitted `tokens` more; `finish` it where these are its last.

        Raises ValueError for a slot that is empty or still at its prompt, and for more tokens than
        the job may emit.
        """
        seat = self._seats.at(slot)
        job, emitted = seat.ticket.job, seat.ticket.emitted
        if seat.filling:
            raise ValueError(f"slot {slot} has computed {seat.done} of {seat.prompt} prompt tokens")
        if not 0 <= tokens <= job.max_tokens - emitted:
            raise ValueError(
                f"tokens must lie in 0..{job.max_tokens - emitted} for job {job.id!r}, which has "
                f"emitted {emitted} of {job.max_tokens}, got {tokens}"
            )
        seat.ticket.emitted += tokens

    def finish(self, slot: int) -> Hashable:
        """The job in `slot`, whose id this returns, has ended: slot and pages are free. ValueError
        for an empty slot.
        """
        seat = self._seats.at(slot)
        self._seats.leave(seat)
        del self._jobs[seat.ticket.job.id]
        return seat.ticket.job.id

    def cancel(self, job: Hashable) -> int | None:
        """Forget the job of that id, wherever it is. ValueError for an unknown one.

        Returns the slot that it had, or None if it was waiting.
        """
        ticket = self._jobs.get(job)
        if ticket is None:
            raise ValueError(f"there is no unfinished job {job!r}")
        for seat in self._seats:
            if seat.ticket is ticket:
                self.finish(seat.slot)
                return seat.slot
        self._waiting.remove(ticket)
        del self._jobs[job]
        return None

    def renew(self, salt: str) -> None:
        """Weights or numerics have changed (`salt` names them), or a step went wrong on the device.

        No job begins from anything computed so far. Running jobs go on with what their slots hold.
        """
        self._salt = salt
        self._seats.prefixes.clear()
        for seat in self._seats:
            seat.cuts.clear()
        waiting = list(self._waiting)
        self._waiting = Waiting()
        for ticket in self._jobs.values():
            ticket.beginnings = self._beginnings(ticket.job)
        for ticket in waiting:
            self._waiting.add(ticket)

    def restart(self) -> None:
        """The device has lost its state: running jobs wait again, in their old places, with what
        they had emitted; no beginning is known.
        """
        self._seats.prefixes.clear()
        for seat in list(self._seats):
            self._seats.leave(seat)
            self._waiting.add(seat.ticket)

    def usage(self) -> Usage:
        """What is in use."""
        pages = self._seats.pages
        return Usage(
            len(self._waiting), len(self._seats), pages.free, pages.count, len(self._seats.prefixes)
        )

    @property
    def filling(self) -> bool:
        """Whether a running job has prompt tokens to compute."""
        return any(seat.filling for seat in self._seats)

    # -- steps -------------------------------------------------------------------------------------

    def step(self, lookahead: int = 1, unreported: int = 0) -> Step:
        """What the device does next. It counts as done: the next step builds on it.

        The tokens of a step may be reported after the next one is asked for, so that the device
        need not wait. A slot that has ended by then runs once more in vain, and what a slot emitted
        for a job that was preempted meanwhile is not to be reported: it will come again.

        Args:
          lookahead: most tokens that a look can add to a slot, rounds x (drafts + 1).
          unreported: most tokens that a slot may have emitted in steps not reported yet.

        Raises ValueError where a job that has emitted all its tokens was not finished.
        """
        check_integer("lookahead", lookahead, 1)
        check_integer("unreported", unreported, 0)
        for seat in self._seats:
            if seat.ticket.length == seat.ticket.most:
                raise ValueError(f"the job in slot {seat.slot} has all its tokens: finish it first")
        self._seats.prefixes.unpin_all()
        made = _Made()
        filling = self.filling
        made.ahead = 1 if filling else lookahead
        if self.limits.mixed or not filling:
            self._decode(made, unreported)
        # What was just taken from a job is not given to the next that waits, itself perhaps.
        if not made.preempted:
            self._seat(made)
        if made.seated and not self.limits.mixed:
            made.decode.clear()  # prompts come first
        self._fill(made)
        if made.chunks:
            made.ahead = 1
        return made.step()

    def _decode(self, made: _Made, unreported: int) -> None:
        """Slots that are past their prompts, in order, with pages for the tokens ahead."""
        for seat in self._seats:
            if seat.filling or seat not in self._seats:
                continue
            held = len(seat.pages)
            pages, left = self._seats.grow(seat, unreported + made.ahead)
            for other in left:
                made.preempted.append(Preempted(other.slot, other.ticket.job.id))
                self._waiting.add(other.ticket)
            if pages is None:
                continue  # it keeps what it has and sits out: those before it need the rest
            if pages:
                made.grants.append(Grant(seat.slot, held, pages))
            made.decode.append(seat.slot)

    def _seat(self, made: _Made) -> None:
        """Waiting jobs into free slots, in order, until one has to wait for pages."""
        free = self._seats.free()
        coming: dict[bytes, tuple[int, int]] = {}
        for seat in self._seats:
            sharing.promise(coming, seat)
        for ticket in list(self._waiting) if free else ():
            if not free:
                return
            entry = self._seats.prefixes.find(ticket.beginnings)
            if sharing.worth_waiting(ticket, entry, coming):
                continue
            seat = self._seats.enter(ticket, entry, free[0])
            if seat is None:
                return  # a smaller job that slipped past could make this one wait for ever
            free.pop(0)
            self._waiting.remove(ticket)
            known = entry.tokens if entry else 0
            seat.cuts = sharing.cuts(ticket, known, self._waiting, self.limits)
            sharing.promise(coming, seat)
            snapshot = entry.snapshot if entry else None
            made.seated.append(Seated(seat.slot, ticket.job.id, seat.done, snapshot, seat.prompt))
            made.grants.append(Grant(seat.slot, 0, tuple(seat.pages)))

    def _fill(self, made: _Made) -> None:
        """Prompt rows for the slots that have some left, in order, while there is room."""
        rows = self.limits.rows
        prefixes = self._seats.prefixes
        for seat in self._seats:
            if not seat.filling or not rows:
                continue
            while seat.cuts and seat.cuts[0].key in prefixes:
                seat.cuts.popleft()  # somebody else was there first
            start, job = seat.done, seat.ticket.job
            end = seat.cuts[0].tokens if seat.cuts else seat.prompt
            seat.done = job.whole(min(end, start + rows))
            if seat.done == start:
                continue  # its span waits for more rows: the first seat always has enough
            rows -= seat.done - start
            made.chunks.append(
                Chunk(seat.slot, job.id, start, seat.done - start, last=not seat.filling)
            )
            if seat.cuts and seat.cuts[0].tokens == seat.done:
                _, key = seat.cuts.popleft()
                pages = seat.pages[: self.limits.pages_for(seat.done)]
                entry = prefixes.keep(key, seat.done, pages)
                if entry:
                    made.saved.append(Saved(seat.slot, entry.snapshot, seat.done))

    # -- small things ------------------------------------------------------------------------------

    def _check(self, job: Job) -> None:
        self.limits.check(job)
        if job.id in self._jobs:
            raise ValueError(f"job id {job.id!r} is taken by an unfinished job; ids must differ")

    def _beginnings(self, job: Job) -> tuple[Beginning, ...]:
        if not self.limits.snapshots or not job.reuse:
            return ()
        return beginnings(job.tokens, self.limits.page_tokens, self._salt, job.spans)


@dataclasses.dataclass(slots=True)
class _Made:
    """A `Step` in the making."""

    preempted: list[Preempted] = dataclasses.field(default_factory=list)
    seated: list[Seated] = dataclasses.field(default_factory=list)
    grants: list[Grant] = dataclasses.field(default_factory=list)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    decode: list[int] = dataclasses.field(default_factory=list)
    ahead: int = 1
    saved: list[Saved] = dataclasses.field(default_factory=list)

    def step(self) -> Step:
        """The finished value."""
        return Step(
            tuple(self.preempted), tuple(self.seated), tuple(self.grants), tuple(self.chunks),
            tuple(self.decode), self.ahead, tuple(self.saved),
        )  # fmt: skip
