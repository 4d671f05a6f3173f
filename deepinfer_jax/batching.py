"""Continuous batching: requests move through a fixed number of slots, the device does the rest.

What a slot computes depends on its own rows only, so which requests share the slots, in what order
they come, how prompts are cut into calls and how large the cache is decide the time and nothing
else. Shapes come from short lists of sizes, so that few programs are compiled.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import cache as caches
from deepinfer_jax import rounds, sampling, steps
from deepinfer_jax.loading import Model
from deepinfer_jax.planning import OFF, Policy
from deepinfer_jax.requests import Request, Result, Timing
from deepinfer_jax.rounds import Round, Running
from deepinfer_jax.rows import Rows
from deepinfer_jax.sampling import Sampled, Sampling
from deepinfer_jax.transcript import Transcript

DEFAULT_SLOTS = 8
PREFILL_ROWS = (32, 256)  # rows of a prefill call
SHORTEST_CAPACITY = 512  # tokens a slot can hold; longer ones double it
STOP_IDS = 4  # end tokens a slot can have; more double it
MOST_STEPS = 16  # rounds before the host looks again


@dataclasses.dataclass(frozen=True)
class Update:
    """News of request number `index`: text that became certain, tokens so far, the end's result."""

    index: int
    text: str
    tokens: int
    result: Result | None


@dataclasses.dataclass
class _Seat:
    """The request in a slot, on the host."""

    index: int
    request: Request
    transcript: Transcript
    admitted: float
    first_token: float = math.nan
    raw: list[float] = dataclasses.field(default_factory=list)
    processed: list[float] = dataclasses.field(default_factory=list)
    kept: list[float] = dataclasses.field(default_factory=list)
    rounds: int = 0
    verified: int = 0
    accepted: int = 0

    def count(self, made: Round, step: int, slot: int, place: int) -> None:
        """Count what entry `place` of a round cost, once it is in the reply."""
        if len(self.raw) == 1:
            return  # the first token comes from the prompt
        if place == 0:
            self.rounds += 1
            self.verified += int(made.scheduled[step, slot])
        self.accepted += place < int(made.accepted[step, slot])


# -- the two device programs -----------------------------------------------------------------------

_STATIC = ("cfg", "numerics")
prefill_program = jax.jit(steps.prefill, static_argnames=_STATIC, donate_argnames="cache")
decode_program = jax.jit(
    rounds.decode_many,
    static_argnames=(*_STATIC, "steps", "size", "rows", "mode"),
    donate_argnames="cache",
)


# -- sizes -----------------------------------------------------------------------------------------


def slots_for(count: int, batch_size: int | None) -> int:
    """Slots for `count` requests: a power of two that holds them all, at most `batch_size`."""
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
        raise TypeError(f"batch_size must be an integer, got {batch_size!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return min(_power_of_two(count), DEFAULT_SLOTS if batch_size is None else batch_size)


def capacity_for(requests: Sequence[Request], max_length: int) -> int:
    """Tokens a slot must hold: a doubling of SHORTEST_CAPACITY, at most `max_length`."""
    longest = max(len(r.tokens) + r.options.max_tokens for r in requests)
    return min(max(_power_of_two(longest), SHORTEST_CAPACITY), max_length)


def prefill_rows(waiting: int) -> int:
    """Rows of the next prefill call when `waiting` are to run, so that half or more are real.

    Only the smallest size may be emptier.
    """
    small = PREFILL_ROWS[0]
    return max((size for size in PREFILL_ROWS if size <= 2 * waiting), default=small)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


# -- the loop --------------------------------------------------------------------------------------


class Batch:
    """The slots of one run: a cache on the device, seats on the host. `run` drives it."""

    def __init__(
        self, model: Model, requests: Sequence[Request], slots: int, *, eager: bool,
        policy: Policy = OFF,
    ):  # fmt: skip
        """`eager`: look after 1, 2, 4 ... rounds at first, for a reader who watches.

        `policy`: how rounds use the drafter; it decides the time and nothing else.
        """
        self._model = model
        self._waiting = deque(enumerate(requests))
        self._seats: list[_Seat | None] = [None] * slots
        self._stop_ids = _stop_width(requests)
        self._limit = 1 if eager else MOST_STEPS
        self._start = time.perf_counter()
        self._policy = policy
        self._memory = policy.start(slots, model.cfg.most_drafts)
        capacity = capacity_for(requests, model.max_length)
        self._cache = caches.init_cache(model.cfg, model.numerics, slots, capacity)
        self._sampling = _sampling_of(self._seats)

    def run(self) -> Iterator[Update]:
        """Updates until every request has its result."""
        while self._waiting or any(self._seats):
            fresh = self._admit()
            if fresh:
                yield from self._fill(fresh)
            elif any(self._seats):
                yield from self._advance()

    def _admit(self) -> list[int]:
        """Seat waiting requests in the free slots; the slots newly taken."""
        fresh = []
        for slot, seat in enumerate(self._seats):
            if seat is None and self._waiting:
                index, request = self._waiting.popleft()
                transcript = Transcript(
                    request, self._model.tokenizer, self._model.cfg.eos_token_id
                )
                self._seats[slot] = _Seat(index, request, transcript, self._elapsed())
                fresh.append(slot)
        if fresh:
            self._sampling = jax.device_put(_sampling_of(self._seats))
        return fresh

    def _fill(self, fresh: Sequence[int]) -> Iterator[Update]:
        """Run the prompts of these slots, packed into as few calls as their sizes allow."""
        every = [
            (token, slot, position)
            for slot in fresh
            for position, token in enumerate(self._seat(slot).request.tokens)
        ]
        done = 0
        while done < len(every):
            size = prefill_rows(len(every) - done)
            part = every[done : done + size]
            done += size
            model = self._model
            sampled, self._cache = prefill_program(
                model.params, model.tables, make_rows(part, size), self._cache, self._sampling,
                model.cfg, model.numerics,
            )  # fmt: skip
            complete = [
                slot
                for _, slot, position in part
                if position + 1 == len(self._seat(slot).request.tokens)
            ]
            if complete:
                yield from self._accept(_first(jax.device_get(sampled), complete))

    def _advance(self) -> Iterator[Update]:
        """Some rounds of all seated slots; fewer where a free slot is waited for."""
        seats, model = self._seats, self._model
        running = Running(
            tokens=jnp.array([s.transcript.tokens[-1] if s else 0 for s in seats], jnp.int32),
            active=jnp.array([s is not None for s in seats]),
            left=jnp.array([_left(s) if s else 0 for s in seats], jnp.int32),
            stops=jnp.array([self._ends(s) for s in seats], jnp.int32),
        )
        move = self._policy.move(self._memory, sum(seat is not None for seat in seats))
        limit = self._limit if move.rounds is None else min(self._limit, move.rounds)
        made, _, self._cache = decode_program(
            model.params, model.tables, running, self._cache, self._sampling, model.cfg,
            model.numerics, steps=MOST_STEPS, limit=np.int32(limit),
            leave=np.bool_(bool(self._waiting)), size=move.size, rows=move.rows,
            schedule=move.schedule, mode="coupled",
        )  # fmt: skip
        self._limit = min(2 * self._limit, MOST_STEPS)
        made, left = jax.device_get((made, running.left))
        self._memory = self._policy.learn(self._memory, move, *_shown(made, left))
        yield from self._accept(made)

    def _accept(self, made: Round) -> Iterator[Update]:
        """Hand what rounds emitted to the seats; a finished seat is given up."""
        for slot in np.flatnonzero(made.emitted.any(axis=(0, 2))).tolist():
            seat, text = self._seat(slot), ""
            for step, place in np.argwhere(made.emitted[:, slot]).tolist():
                numbers = [float(x[step, slot, place]) for x in _numbers(made.sampled)]
                if not all(map(math.isfinite, numbers)):
                    raise FloatingPointError(
                        f"request {seat.request.id!r}: the log-probability of token "
                        f"{len(seat.raw)} is not finite (raw {numbers[0]}, processed "
                        f"{numbers[1]}, kept mass {numbers[2]}); are the weights damaged?"
                    )
                text += seat.transcript.push(int(made.sampled.token[step, slot, place]))
                for numbered, number in zip((seat.raw, seat.processed, seat.kept), numbers,
                                            strict=True):  # fmt: skip
                    numbered.append(number)
                seat.count(made, step, slot, place)
                if seat.transcript.finished:
                    break
            now = self._elapsed()
            if math.isnan(seat.first_token):
                seat.first_token = now
            finished = seat.transcript.finished
            result = _result(seat, self._model.numerics.fingerprint(), now) if finished else None
            if result:
                self._seats[slot] = None
            yield Update(seat.index, text, len(seat.raw), result)

    def _seat(self, slot: int) -> _Seat:
        seat = self._seats[slot]
        assert seat is not None, "an empty slot produced tokens"
        return seat

    def _ends(self, seat: _Seat | None) -> list[int]:
        """The stop ids of a slot, padded with -1."""
        ends = [self._model.cfg.eos_token_id, *seat.request.options.stop_token_ids] if seat else []
        return ends + [-1] * (self._stop_ids - len(ends))

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start


def _numbers(sampled: Sampled) -> tuple[jax.Array, jax.Array, jax.Array]:
    return sampled.logprob_raw, sampled.logprob_processed, sampled.kept_mass


def _first(sampled: Sampled, slots: Sequence[int]) -> Round:
    """What a prefill says of the prompts that ended in it, in the form of rounds: [1, B, 1]."""
    b = len(sampled.token)
    emitted = np.isin(np.arange(b), slots)[None, :, None]
    nothing = {
        "drafts": np.zeros((1, b, 0), np.int32),
        "confidence": np.zeros((1, b, 0), np.float32),
        "scheduled": np.zeros((1, b), np.int32),
        "accepted": np.zeros((1, b), np.int32),
    }
    first: Any = jax.tree.map(lambda x: x[None, :, None], sampled)
    return Round(sampled=first, emitted=emitted, **nothing)  # pyright: ignore[reportArgumentType]


def _shown(made: Any, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(confidence [rounds, B, N], most [rounds, B]) of the rounds that were run.

    most: drafts that could have become part of a reply, of slots with `left` [B] tokens before.
    """
    count = np.count_nonzero(made.emitted, axis=2)  # a slot that takes part emits
    done = count.any(axis=1)
    count, confidence = count[done], made.confidence[done]
    before = np.cumsum(count, axis=0) - count
    most = np.clip(left - before - 1, 0, confidence.shape[2])
    return confidence, np.where(count > 0, most, 0)


def _left(seat: _Seat) -> int:
    return seat.request.options.max_tokens - len(seat.raw)


def _stop_width(requests: Sequence[Request]) -> int:
    most = max(1 + len(request.options.stop_token_ids) for request in requests)
    return max(STOP_IDS, _power_of_two(most))


def make_rows(part: Sequence[tuple[int, int, int]], size: int) -> Rows:
    """Rows of (token, slot, position), padded to `size`."""
    table = np.full((size, 3), (0, -1, 0), np.int32)
    table[: len(part)] = part
    tokens, slots, positions = (jnp.asarray(column) for column in table.T)
    return Rows(tokens, slots, positions, image=jnp.asarray(np.zeros(size, bool)))


def _sampling_of(seats: Sequence[_Seat | None]) -> Sampling:
    """Sampling parameters of every slot; an empty one is greedy, which costs nothing."""
    options = [seat.request.options if seat else None for seat in seats]
    return sampling.make_sampling(
        len(seats),
        [o.temperature if o else 0.0 for o in options],
        [o.top_p if o else 1.0 for o in options],
        [o.top_k if o else -1 for o in options],
        [o.min_p if o else 0.0 for o in options],
        seeds=[seat.request.seed if seat else 0 for seat in seats],
    )


def _result(seat: _Seat, numerics: str, now: float) -> Result:
    transcript, request = seat.transcript, seat.request
    assert transcript.finished is not None, "the reply has not ended"
    return Result(
        id=request.id,
        prompt=request.prompt,
        text=transcript.text,
        tokens=tuple(transcript.tokens),
        logprobs=tuple(seat.raw),
        logprobs_processed=tuple(seat.processed),
        kept_mass=tuple(seat.kept),
        pieces=tuple(transcript.pieces),
        finish_reason=transcript.finished,
        prompt_tokens=len(request.tokens),
        seed=request.seed,
        numerics=numerics,
        timing=Timing(
            seat.admitted, seat.first_token, now, seat.rounds, seat.verified, seat.accepted
        ),
    )
