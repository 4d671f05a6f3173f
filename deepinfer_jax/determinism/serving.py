"""What serving does to a request: batches, padding, chunks, drafts, company, preemption."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from deepinfer_jax.determinism import feeding
from deepinfer_jax.determinism.reference import Setup, refer
from deepinfer_jax.determinism.schedules import Move, Pair, Table, Turn

SLOTS = 64
FEW, MANY, LONG = 8, 64, 160  # rows of the programs; LONG is beyond `Numerics.long_rows`
TURNS = 40  # calls of a random schedule

donated = feeding.compiled(donate=True)


def table(
    setup: Setup, seats: int, rng: np.random.Generator, programs: Mapping[int, Any] | None = None
) -> Table:
    """`seats` sequences at random slots of a spoiled cache, twice as long as any needs."""
    model = setup.model
    capacity = min(2 * setup.capacity, model.max_length)
    numbers = [i % len(setup.references) for i in range(seats)]
    slots = rng.permutation(SLOTS)[:seats].tolist()
    cache = feeding.garbage(model, SLOTS, capacity)
    return Table(setup, numbers, slots, cache, programs or {MANY: feeding.step})


def repetition(setup: Setup) -> Iterator[Pair]:
    """The same calls again: what is left when nothing is varied."""
    for number, reference in enumerate(setup.references[:2]):
        prompt = reference.text[: reference.prompt]
        again = refer(setup.model, reference.request, setup.capacity, prompt)
        yield Pair(f"request {number}, rows", again.rows, reference.rows)
        yield Pair(f"request {number}, cache", again.state, reference.state)


def batch(setup: Setup) -> Iterator[Pair]:
    """Every number of sequences from 1 to 64 decodes together once, in any order and slots.

    A sequence that has ended starts again.
    """
    rng = setup.rng("batch")
    playing = table(setup, SLOTS, rng)
    for count in (rng.permutation(SLOTS) + 1).tolist():
        chosen = rng.permutation(SLOTS)[:count].tolist()
        again = [None if playing.left(seat) else playing.slot(seat) for seat in chosen]
        moves = tuple(Move(seat, 1, to=to) for seat, to in zip(chosen, again, strict=True))
        yield from playing.play([Turn(moves)])
    yield from playing.finish(MANY)


def padding(setup: Setup) -> Iterator[Pair]:
    """A few rows alone in calls of 8, 64 and 160, padding between and around them."""
    rng = setup.rng("padding")
    sizes = (FEW, MANY, LONG)
    programs = {FEW: donated, MANY: feeding.step, LONG: feeding.step}
    playing = table(setup, len(sizes), rng, programs)
    for seat, size in enumerate(sizes):
        while playing.left(seat):
            rows = int(rng.integers(1, 5))
            gap = int(rng.integers(0, size - rows + 1))
            yield from playing.play([Turn((Move(seat, rows),), (gap,), size)])
    yield from playing.finish(1)


def chunks(setup: Setup) -> Iterator[Pair]:
    """Prompts whole, and cut anywhere into chunks of any length, several in a call."""
    rng = setup.rng("chunks")
    copies = 3
    seats = copies * len(setup.references)
    playing = table(setup, seats, rng, {MANY: feeding.step, LONG: feeding.step})
    longest = max(setup.capacity, 2)
    for seat in range(len(setup.references)):  # the first copies in one piece
        yield from playing.play([Turn((Move(seat, longest),))])
    while waiting := [seat for seat in range(seats) if playing.left(seat)]:
        order = rng.permutation(waiting).tolist()
        moves = tuple(Move(seat, int(rng.integers(1, 24))) for seat in order)
        yield from playing.play([Turn(moves, size=LONG if rng.random() < 0.5 else MANY)])
    yield from playing.finish(1)


def drafts(setup: Setup) -> Iterator[Pair]:
    """Verification of 2 rows up to the draft block, drafts wrong from any place on."""
    rng = setup.rng("drafts")
    widest = setup.model.cfg.dspark_block_size + 1
    seats = 2 * len(setup.references)
    playing = table(setup, seats, rng)
    for _ in range(TURNS):
        moves = []
        for seat in rng.permutation(seats).tolist():
            rows = int(rng.integers(2, max(widest, 2) + 1))
            good = int(rng.integers(1, rows + 1))
            moves.append(Move(seat, rows, good, int(rng.integers(1, good + 1))))
        yield from playing.play([Turn(tuple(moves))])
    yield from playing.finish(widest)


def neighbours(setup: Setup) -> Iterator[Pair]:
    """Single tokens beside long chunks; sequences come, go, and leave their slots to others."""
    rng = setup.rng("neighbours")
    seats = 2 * len(setup.references)
    playing = table(setup, seats, rng)
    present: list[int] = []
    absent = list(range(seats))
    for _ in range(TURNS):
        if absent and rng.random() < 0.6:
            present.append(absent.pop(int(rng.integers(len(absent)))))
        rng.shuffle(present)
        moves = tuple(Move(s, int(rng.choice((0, 1, 1, 1, 2, 19)))) for s in present)
        gaps = tuple(rng.integers(0, 3, len(moves)).tolist())
        yield from playing.play([Turn(moves, gaps)])
        present = [seat for seat in present if playing.left(seat)]
    yield from playing.finish(23)


def preemption(setup: Setup) -> Iterator[Pair]:
    """Every sequence loses its slot once, each at another step, and is recomputed in another one.

    The others go on meanwhile. The slot it left, with all that is in it, goes to the next.
    """
    rng = setup.rng("preemption")
    seats = SLOTS - 1
    playing = table(setup, seats, rng)
    (free,) = set(range(SLOTS)) - {playing.slot(seat) for seat in range(seats)}
    steps = max(setup.capacity - 2, 1)
    when = [1 + seat * steps // seats for seat in range(seats)]
    for step in range(setup.capacity):
        moves = []
        for seat in rng.permutation(seats).tolist():
            if step == when[seat] and playing.left(seat):
                moves.insert(0, Move(seat, int(rng.integers(2, 20)), to=free))
                free = playing.slot(seat)
            else:
                moves.append(Move(seat, 1 if step < when[seat] else int(rng.integers(2, 20))))
        yield from playing.play([Turn(tuple(moves))])
    yield from playing.finish(11)


def donation(setup: Setup) -> Iterator[Pair]:
    """The cache given up to every call, so that it is updated where it lies."""
    rng = setup.rng("donation")
    seats = len(setup.references)
    playing = table(setup, seats, rng, {FEW: donated})
    for _ in range(TURNS // 2):
        moves = tuple(Move(seat, 1) for seat in rng.permutation(seats).tolist())
        yield from playing.play([Turn(moves)])
    yield from playing.finish(FEW)
