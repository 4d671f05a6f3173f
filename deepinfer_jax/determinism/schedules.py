"""Schedules: which rows of which sequence run in which call, and what must come out of them.

A schedule is data. `play` runs one on a batch of sequences that started in spoiled caches, and
pairs everything that came out with the references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.cache import Cache
from deepinfer_jax.determinism import feeding
from deepinfer_jax.determinism.reference import ROW, Reference, Setup


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """Arrays that must agree in every bit, and where they come from."""

    where: str
    got: Mapping[str, np.ndarray]
    want: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Move:
    """What one sequence does in one call.

    Attributes:
      seat: number of the sequence.
      rows: how many of its next tokens run.
      good: how many of them carry right tokens, the others wrong ones; default all.
      kept: how many stay; default all good ones. The next move starts after them.
      to: slot that the sequence moves to first, losing everything: its next row is its first.
    """

    seat: int
    rows: int
    good: int | None = None
    kept: int | None = None
    to: int | None = None


@dataclasses.dataclass(frozen=True)
class Turn:
    """One call: the moves in the order of their rows, gaps[i] padding rows before move i.

    size: rows of the call; default the smallest of the sizes at hand.
    """

    moves: tuple[Move, ...]
    gaps: tuple[int, ...] = ()
    size: int | None = None


@dataclasses.dataclass
class _Seat:
    """A sequence on its way: its reference, slot and number of committed tokens."""

    reference: Reference
    number: int
    slot: int
    done: int = 0


class Table:
    """Sequences in the slots of one cache.

    `numbers[i]` is the reference of sequence i and `slots[i]` its slot; several sequences may have
    one reference. `programs` maps sizes to jitted `feeding.observe`.
    """

    def __init__(
        self,
        setup: Setup,
        numbers: Sequence[int],
        slots: Sequence[int],
        cache: Cache,
        programs: Mapping[int, Any],
    ):
        self._setup, self.cache = setup, cache
        self._programs = dict(sorted(programs.items()))
        self._seats = [
            _Seat(setup.references[n], n, s) for n, s in zip(numbers, slots, strict=True)
        ]

    def left(self, seat: int) -> int:
        """Tokens of a sequence that have not run."""
        return len(self._seats[seat].reference.text) - self._seats[seat].done

    def slot(self, seat: int) -> int:
        """Where a sequence is."""
        return self._seats[seat].slot

    def play(self, turns: Iterable[Turn]) -> Iterator[Pair]:
        """Run turns; moves beyond the end of a sequence or of the largest call are cut."""
        for turn in turns:
            yield from self._call(turn)

    def finish(self, rows: int) -> Iterator[Pair]:
        """Run what is left, at most `rows` of a sequence per call, then compare all caches."""
        while waiting := [number for number in range(len(self._seats)) if self.left(number)]:
            yield from self._call(Turn(tuple(Move(number, rows) for number in waiting)))
        for seat in self._seats:
            length = len(seat.reference.text)
            got = feeding.visible(self._setup.model, self.cache, seat.slot, length)
            where = f"request {seat.number}, cache of slot {seat.slot}"
            yield Pair(where, got, seat.reference.state)

    def _call(self, turn: Turn) -> Iterator[Pair]:
        pieces, gaps, claims, total = [], [], [], 0
        most = turn.size or max(self._programs)
        for move, gap in zip(turn.moves, [*turn.gaps, *[0] * len(turn.moves)], strict=False):
            seat = self._seats[move.seat]
            if move.to is not None:
                seat.slot, seat.done = move.to, 0
            start = seat.done
            rows = min(move.rows, self.left(move.seat), most - total - gap)
            if rows < 1:  # nothing left to run, or no room in this call
                continue
            good = rows if move.good is None else min(move.good, rows)
            part = feeding.piece(seat.slot, seat.reference.text, start, start + rows)
            pieces.append(feeding.wrong(part, good, self._setup.model.cfg.vocab_size))
            gaps.append(gap)
            total += rows + gap
            claims.append((seat, start, start + good))
            seat.done = start + (good if move.kept is None else min(move.kept, good))
        if not pieces:
            return
        size = turn.size or next(size for size in self._programs if size >= total)
        fed = self._feed(pieces, size, gaps)
        for claim, at in zip(claims, feeding.places(pieces, size, gaps), strict=True):
            yield _pair(fed, *claim, first=at.start, size=size)

    def _feed(self, pieces: list[feeding.Piece], size: int, gaps: list[int]) -> feeding.Fed:
        seated = {seat.slot: seat.number for seat in self._seats}
        fed, self.cache = feeding.feed(
            self._setup.model, self.cache, pieces, size, gaps, program=self._programs[size],
            sampling=self._setup.sampling(seated, self.cache.slots), names=ROW,
        )  # fmt: skip
        return fed


def _pair(fed: feeding.Fed, seat: _Seat, start: int, stop: int, *, first: int, size: int) -> Pair:
    """Rows start..stop of a sequence, which stand at row `first` of a call of `size` rows."""
    want = {name: seat.reference.row(name, start, stop) for name in ROW}
    got = {name: fed.seen[name][first : first + len(rows)] for name, rows in want.items()}
    return Pair(f"request {seat.number}, positions {start}..{stop - 1}, {size} rows", got, want)
