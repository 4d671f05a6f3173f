"""The engine: requests in, updates out; the scheduler says what is next, the device does the rest.

What a slot computes depends on its own rows only, so which requests share the slots, in what order
they come, how prompts are cut into calls, who shares pages with whom, who is preempted and how
large the cache is decide the time and nothing else. The device is asked for the next step before
the last one's tokens are read: it never waits for Python.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from deepinfer_jax.engine import balance, pictures
from deepinfer_jax.engine.balance import AS_IT_IS, Balance, Balancing
from deepinfer_jax.engine.calls import Shown, calls, joint_calls
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.flights import Flight, Update
from deepinfer_jax.engine.seats import Seat, Work, edits_of, padded, sampling_of
from deepinfer_jax.engine.sites import ONE, Site
from deepinfer_jax.engine.sizes import MOST_STEPS, Sizes, enough_free, grown
from deepinfer_jax.engine.statistics import Asked, Observer, Statistics, Tally, learnt
from deepinfer_jax.engine.structured import StepMasks, Structured
from deepinfer_jax.engine.warming import Warming, compiled, needs, planned
from deepinfer_jax.engine.watch import Watch
from deepinfer_jax.grammar import GrammarError
from deepinfer_jax.images.gallery import Gallery
from deepinfer_jax.loading import Model
from deepinfer_jax.planning import OFF, Policy
from deepinfer_jax.planning.policies import Move, check_policy
from deepinfer_jax.requests import Request
from deepinfer_jax.scheduling import Fleet, Job, Limits, Order, Scheduler, Step, Usage
from deepinfer_jax.transcript import Transcript

IN_FLIGHT = 1  # steps that the device is ahead of what was read


class Engine:
    """The one mutable object: slots on the device, requests on the host. `updates` drives it."""

    def __init__(
        self, model: Model, sizes: Sizes, *, policy: Policy = OFF, order: Order | None = None,
        eager: bool = False, observer: Observer | None = None, site: Site = ONE,
        balancing: Balancing = AS_IT_IS,
    ) -> None:  # fmt: skip
        """`eager`: look after 1, 2, 4 ... rounds at first, for a reader who watches.

        `site`: the devices, which `sizes` are shared by evenly; `balancing`: how experts move.

        `policy`: how rounds use the drafter, `order`: who goes first; both decide the time alone.
        `observer`: is told of every call of the device; it may read the engine, nothing else.
        """
        check_policy(policy)
        balance.check(site, balancing)
        self._model, self._sizes, self._policy, self._site = model, sizes, policy, site
        own = sizes.of_part(site.parts)
        self._limit = 1 if eager else MOST_STEPS
        self._start = time.perf_counter()
        self._memory = policy.start(own.slots, model.cfg.most_drafts)
        limits = Limits(
            slots=own.slots, pages=own.pages, page_tokens=own.page_tokens,
            rows=own.step_rows, longest=own.capacity,
            snapshots=own.snapshots, keep="shared",
        )  # fmt: skip
        salt = model.numerics.fingerprint()
        self._scheduler = (
            Scheduler(limits, order, salt)
            if site.parts == 1
            else Fleet(limits, site.parts, order, salt)
        )
        self._balance = Balance(site.placements, balancing, model.cfg)
        self._structured = Structured(model)
        self._works: dict[Hashable, Work] = {}  # by the number of the submission
        self._draining = False
        self._watch = Watch(launching=jax.default_backend() != "cpu")
        self._tally = Tally(self._watch, observer)
        self._gallery = Gallery(
            model.params, model.cfg, model.numerics, kept_bytes=sizes.picture_bytes,
            ask=self._watch.ask, read=self._watch.read,
        )  # fmt: skip
        self._clear()

    def _clear(self) -> None:
        """An empty device."""
        model, sizes = self._model, self._sizes
        self._flights: deque[Flight] = deque()
        self._filled: set[Hashable] = set()  # whose prompts ran in calls that no flight is of yet
        self._seats: list[Seat | None] = [None] * sizes.slots
        self._stale: set[int] = set()  # slots that the device must not go on with
        self._table = np.full((sizes.slots, sizes.table), -1, np.int32)
        sampling = sampling_of(self._working(), sizes.truncates)
        self._device = Device(model, sizes, sampling, self._watch, self._balance.site(self._site))

    def submit(self, request: Request, priority: int = 0) -> int:
        """Let a request wait for its turn; returns its number, counted from 0.

        Raises ValueError, with the arithmetic, for one that can never fit, or has images that the
        model, or an engine over a mesh, cannot show; ImportError for one with a grammar where
        llguidance is not installed.
        """
        number = self._tally.counts.requests
        self._site.check(request)
        spans = pictures.spans_of(request, self._model)
        job = Job(number, request.tokens, request.options.max_tokens, priority, spans=spans)
        transcript = Transcript(request, self._model.tokenizer, self._model.cfg.eos_token_id)
        work = Work(number, request, transcript)
        if request.options.rule is None:
            self._scheduler.submit(job)
        else:
            self._scheduler.limits.check(job)
            self._structured.submit(work, job)
        needed = grown(self._sizes, [request])
        if needed != self._sizes:
            self._sizes = needed
            self._device.widen(needed)
            self._device.sample(sampling_of(self._working(), needed.truncates))
        self._works[number] = work
        self._tally.counts.requests += 1
        return number

    def cancel(self, number: int) -> None:
        """Forget request `number`; nothing more is heard of it. ValueError if it has ended."""
        slot = None if self._structured.forget(number) else self._scheduler.cancel(number)
        del self._works[number]
        if slot is not None:
            self._give_up(slot)

    def usage(self) -> Usage:
        """Requests waiting and running, pages in use."""
        return self._scheduler.usage()

    def statistics(self) -> Statistics:
        """What has been done so far."""
        return self._tally.statistics(self.usage())

    def warm_up(self, progress: Callable[[Warming], None] | None = None) -> None:
        """Compile, side by side, what the requests submitted so far can need; then `updates` does
        not stop for it, and warns (`RecompileWarning`) of what it has to compile all the same.

        `progress` is told what is being compiled. Requests can be submitted later, too; of other
        kinds, or much longer than those before, they may need programs that this did not foresee.
        """
        model, sizes, works = self._model, self._sizes, self._works.values()
        requests, own = [work.request for work in works], sizes.of_part(self._site.parts)
        wanted = needs(requests, own, model.cfg.vision)
        moves = self._policy.moves(self._memory)
        every = planned(
            model, sizes, wanted, moves, self._device.state(), self._site,
            rearranged=self._balance.rearranges,
        )  # fmt: skip
        self._watch.warmed(*compiled(every, progress))

    def drain(self) -> None:
        """Let the requests that have begun end, and forget the others, with the next update."""
        self._draining = True

    def updates(self) -> Iterator[Update]:
        """What happens to the submitted requests, until all have ended.

        Requests may be submitted and cancelled between updates. One that goes wrong (a value that
        is no number, memory that does not suffice for its prompt) ends with an error of its own;
        the others go on, computed again where the device has lost them.
        """
        for update in self._updates():
            self._tally.counts.done += update.result is not None
            self._tally.counts.failed += update.error is not None
            yield update
        self._watch.rest()

    def _updates(self) -> Iterator[Update]:
        wait = False
        while True:
            for work in [*self._works.values()] if self._draining else ():
                if math.isnan(work.admitted):
                    self.cancel(work.number)
            yield from self._compiled(wait)
            seated = sum(seat is not None for seat in self._seats)
            move = self._policy.move(self._memory, -(-seated // self._site.parts))
            rounds = min(self._limit, move.rounds or MOST_STEPS)
            unreported = sum(flight.most for flight in self._flights)
            step = self._scheduler.step(rounds * (move.size + 1), unreported)
            wait = step.idle and not self._flights
            if wait and not self._structured.compiling:
                return
            suspects = {chunk.job for chunk in step.chunks}
            try:
                # Whoever reads may submit and cancel at every `yield`, but never within a step.
                yield from [] if step.idle else self._carry_out(step, move, rounds)
                self._rearrange()
                # Masks follow from what was emitted: with a grammar at work nothing is ahead.
                ahead = 0 if step.idle or self._ruled() or self._spent() else IN_FLIGHT
                while len(self._flights) > ahead:
                    flight = self._flights.popleft()
                    suspects = {*flight.prompts}
                    yield from self._land(flight)
            except jax.errors.JaxRuntimeError as error:
                yield from self._recover(suspects, error)

    def _rearrange(self) -> None:
        """Move the experts of one layer, if that is due; others follow after later steps."""
        found = self._balance.next()
        if found is not None:
            self._device.move(*found)
            self._tally.counts.moved_layers += 1

    def _spent(self) -> bool:
        """Whether what is on its way ends every reply at work: another look would be in vain.

        For replies of one token a program would be compiled for it.
        """
        flights, works = len(self._flights), self._working()
        ending = all(work.left <= flights for work in works if work)
        return ending and not self._scheduler.filling

    def _compiled(self, wait: bool) -> list[Update]:
        """Let requests be scheduled whose grammars are compiled; end those whose failed."""
        ended = []
        for ready, error in self._structured.ready(wait):
            if error is None:
                self._scheduler.submit(ready.job)
            else:
                del self._works[ready.work.number]
                ended.append(Update(ready.work.number, "", 0, error=error))
        return ended

    def _ruled(self) -> list[int]:
        """Slots whose request has a grammar."""
        return [s for s, seat in enumerate(self._seats) if seat and seat.work.state is not None]

    def _recover(self, suspects: set[Hashable], error: Exception) -> list[Update]:
        """The device failed: the requests whose prompts it was given end, all others start anew.

        Raises `error` where no prompt was to blame.
        """
        blamed = suspects & self._works.keys()
        if not blamed or self._site.processes > 1:  # others may have heard of no error
            raise error
        self._scheduler.restart()
        self._device.close()
        self._clear()
        ended = []
        for work in sorted((self._works.pop(job) for job in blamed), key=lambda w: w.number):
            self._scheduler.cancel(work.number)
            failed = RuntimeError(
                f"request {work.request.id!r}: the device failed at its prompt: {error}"
            )
            failed.__cause__ = error
            ended.append(Update(work.number, "", len(work.raw), error=failed))
        return ended

    # -- asking the device -------------------------------------------------------------------------

    def _carry_out(self, step: Step, move: Move, rounds: int) -> list[Update]:
        """Ask the device for the step; the ends of requests that cannot go on."""
        self._tally.plan(step, self.usage())
        for left in step.preempted:
            self._give_up(left.slot)
        self._enter(step)
        ended = []
        if step.chunks:
            step, shown, ended = self._show(step)
            ended += self._fill(step, shown)
        else:
            ruled = set(self._ruled())
            free, bound = (
                [slot for slot in step.decode if (slot in ruled) == side] for side in (False, True)
            )
            if free:
                self._look(free, step.ahead, move, rounds)
            if bound:
                ended = self._bound_look(bound, move)
        if step.saved:
            pairs = [(saved.slot, saved.snapshot) for saved in step.saved]
            own = self._sizes.of_part(self._site.parts)
            self._device.take(*self._arranged(pairs, (0, own.snapshots)))
        return ended

    def _enter(self, step: Step) -> None:
        """New jobs into their slots, pages into tables; slots given up stop."""
        model, fresh = self._model, {seated.slot for seated in step.seated}
        restored = [(s.slot, s.snapshot) for s in step.seated if s.snapshot is not None]
        for seated in step.seated:
            work = self._works[seated.job]
            if math.isnan(work.admitted):
                work.admitted = self._elapsed()
            self._seats[seated.slot] = Seat(work)
            self._table[seated.slot] = -1
        for grant in step.grants:
            self._table[grant.slot, grant.first : grant.first + len(grant.pages)] = grant.pages
        if step.grants or self._stale:
            self._device.hand_out(self._table.copy())  # the table goes on changing
        changed, works = fresh | self._stale, self._working()
        if changed:
            edited = [work is not None and work.request.options.edits for work in works]
            self._device.seat(
                self._marked(changed),
                np.array([work.left if work else 0 for work in works], np.int32),
                np.array([self._ends(work) for work in works], np.int32),
                {
                    slot: edits_of(self._seat(slot).work, model.cfg, self._sizes)
                    for slot in fresh
                    if edited[slot]
                },
                np.array(edited),
            )
            self._stale.clear()
        if fresh:
            self._device.sample(sampling_of(works, self._sizes.truncates))
        if restored:
            own = self._sizes.of_part(self._site.parts)
            slots, places = self._arranged(restored, (own.slots, 0))
            self._device.restore(places, slots)

    def _show(self, step: Step) -> tuple[Step, list[Shown], list[Update]]:
        """The images among the step's prompts; requests whose images fail end, and leave it."""
        shown, failed = pictures.shown(step.chunks, self._working(), self._gallery)
        if not failed:
            return step, shown, []
        ended = self._end(failed.items())
        # What they were to keep in this step is not there to begin from.
        self._scheduler.renew(self._model.numerics.fingerprint())
        step, shown, more = self._show(step.without(failed))
        return step, shown, ended + more

    def _fill(self, step: Step, shown: list[Shown]) -> list[Update]:
        """Prompt rows in as few calls as their sizes allow; the first has the decode rows too."""
        every = [
            (self._seat(chunk.slot).work.token(position), chunk.slot, position)
            for chunk in step.chunks
            for position in range(chunk.start, chunk.start + chunk.count)
        ]
        ends = {chunk.slot: chunk.start + chunk.count - 1 for chunk in step.chunks if chunk.last}
        packed, ended = None, []
        sampling = {*ends, *step.decode}
        if sampling & set(self._ruled()):
            masks = self._masks(sampling, np.zeros((self._sizes.slots, 0), np.int32))
            packed, ended = masks.packed[:, 0], self._end(masks.failures())
        beside, model = self._marked(step.decode), self._model
        self._filled |= {chunk.job for chunk in step.chunks}
        own, parts = self._sizes.of_part(self._site.parts), self._site.parts
        for call in joint_calls(every, own, parts) if parts > 1 else calls(every, shown, own):
            complete = [slot for _, slot, position in call.part if ends.get(slot) == position]
            slots, rows = int(np.count_nonzero(beside)), call.size + len(beside)
            asked = self._tally.ask("prompts", rows, slots, self.usage(), call.count)
            shows = call.rows(model.cfg, model.numerics)
            made = self._device.fill(shows, self._marked(complete), beside, packed)
            if complete or beside.any():
                self._fly(made, 1, asked)
            else:
                self._tally.skip(asked)
            beside = self._marked(())
        return ended

    def _look(self, slots: list[int], ahead: int, move: Move, rounds: int) -> None:
        """Some rounds of these slots; fewer where a free slot is waited for."""
        limit = min(rounds, ahead // (move.size + 1))
        rows = move.rows * self._site.parts
        asked = self._tally.ask("decode", rows, len(slots), self.usage())
        leave = enough_free(self._scheduler.usage().waiting, self._sizes.slots)
        made = self._device.look(self._only(slots), move, limit, leave)
        self._limit = min(2 * self._limit, MOST_STEPS)
        self._fly(made, limit * (move.size + 1), asked, move)

    def _bound_look(self, slots: list[int], move: Move) -> list[Update]:
        """One round of these slots, whose tokens have to follow grammars."""
        only, b = self._only(slots), self._sizes.slots
        drafts, confidence = np.zeros((b, 0), np.int32), np.zeros((b, 0), np.float32)
        asked = self._tally.ask("grammar", b * (move.size + 1), len(slots), self.usage())
        if move.size:
            first = self._masks(slots, drafts).packed[:, 0]
            proposed = self._device.propose(only, first, move.size).result()
            drafts, confidence = self._watch.read(proposed)
        masks = self._masks(slots, drafts)
        ended = self._end(masks.failures())
        made = self._device.settle(only, drafts, confidence, masks.legal, masks.packed)
        self._fly(made, move.size + 1, asked)
        return ended

    def _fly(self, made: Future[Any], most: int, asked: Asked, move: Move | None = None) -> None:
        """Rounds are on their way."""
        seats, prompts = tuple(self._seats), frozenset(self._filled)
        self._flights.append(Flight(made, seats, most, asked, prompts, move))
        self._filled.clear()

    def _only(self, slots: list[int]) -> np.ndarray | None:
        """[B] bool: these slots; None where nobody else sits in one."""
        seated = {slot for slot, seat in enumerate(self._seats) if seat is not None}
        return None if seated <= set(slots) else self._marked(slots)

    def _masks(self, slots: Collection[int], drafts: np.ndarray) -> StepMasks:
        """Masks of these slots, along drafts [B, N]."""
        works = [work if slot in slots else None for slot, work in enumerate(self._working())]
        return self._structured.masks(works, drafts)

    def _end(self, failures: Iterable[tuple[int, Exception]]) -> list[Update]:
        """End the requests of these slots, which cannot go on."""
        ended = []
        for slot, error in failures:
            work = self._seat(slot).work
            self._finish(slot)
            ended.append(Update(work.number, "", len(work.raw), error=error))
        return ended

    # -- reading what came -------------------------------------------------------------------------

    def _land(self, flight: Flight) -> Iterator[Update]:
        """Hand what rounds emitted to the requests; one that has ended gives up its slot."""
        made, left = self._watch.read(flight.made.result())
        if flight.move is not None:
            seen = learnt(made, left, self._site.parts)
            self._memory = self._policy.learn(self._memory, flight.move, *seen)
        came = np.zeros(3, np.int64)  # tokens, and drafts verified and accepted
        for slot in np.flatnonzero(made.emitted.any(axis=(0, 2))).tolist():
            seat = flight.seats[slot]
            if seat is None or self._seats[slot] is not seat:
                continue  # it ended, or was preempted and will say this again
            work = seat.work
            before = work.verified, work.accepted
            try:
                text, count = work.take(made, slot)
            except (FloatingPointError, GrammarError) as error:
                self._finish(slot)
                yield Update(work.number, "", len(work.raw), error=error)
                continue
            self._scheduler.advance(slot, count)
            came += np.array([count, work.verified - before[0], work.accepted - before[1]])
            now, result = self._elapsed(), None
            if math.isnan(work.first_token):
                work.first_token = now
            if work.transcript.finished:
                result = work.result(self._model.numerics.fingerprint(), now)
                self._finish(slot)
            yield Update(work.number, text, len(work.raw), result)
        came = (int(n) for n in came)
        self._tally.land(flight.asked, made, *came, moe_lb=self._balance.note(made))

    def _finish(self, slot: int) -> None:
        del self._works[self._seat(slot).work.number]
        self._scheduler.finish(slot)
        self._give_up(slot)

    def _give_up(self, slot: int) -> None:
        """Its pages may be another's from now on: the device must write no more of it."""
        self._seats[slot] = None
        self._table[slot] = -1
        self._stale.add(slot)

    def _working(self) -> list[Work | None]:
        """The request of every slot."""
        return [seat.work if seat else None for seat in self._seats]

    def _arranged(
        self, pairs: list[tuple[int, int]], rest: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """([B], [B]) int32: the slots of `pairs`, as their own device numbers them, and the others;
        then `rest`, so that one program serves any number of them.
        """
        size = self._sizes.slots // self._site.parts
        table = np.tile(np.array(rest, np.int32), (self._site.parts, size, 1))
        filled = [0] * self._site.parts
        for slot, other in pairs:
            part, own = divmod(slot, size)
            table[part, filled[part]] = own, other
            filled[part] += 1
        flat = table.reshape(-1, 2)
        return flat[:, 0].copy(), flat[:, 1].copy()

    def _marked(self, slots: Collection[int]) -> np.ndarray:
        """[B] bool: whether a slot is one of these."""
        return np.isin(np.arange(self._sizes.slots), list(slots))

    def _seat(self, slot: int) -> Seat:
        seat = self._seats[slot]
        assert seat is not None, "an empty slot has work"
        return seat

    def _ends(self, work: Work | None) -> list[int]:
        """The stop ids of a slot, padded with -1."""
        ends = work.request.options.ends(self._model.cfg.eos_token_id) if work else []
        return padded(ends, self._sizes.stop_ids)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start
