"""The slots: who sits where, with which pages, and who has to leave when pages run short."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from deepinfer_jax.scheduling.jobs import Limits
from deepinfer_jax.scheduling.pages import Pages
from deepinfer_jax.scheduling.prefixes import Beginning, Entry, Prefixes
from deepinfer_jax.scheduling.tickets import Ticket


@dataclasses.dataclass(eq=False, slots=True)
class Seat:
    """A job in a slot.

    Attributes:
      pages: its page table.
      prompt: tokens to compute before one is sampled: the prompt, and what the job had emitted
        before it was seated.
      done: how many of them are computed.
      cuts: the beginnings ahead that are to become entries of the prefix cache.
    """

    ticket: Ticket
    slot: int
    pages: list[int]
    prompt: int
    done: int
    cuts: collections.deque[Beginning] = dataclasses.field(default_factory=collections.deque)

    @property
    def rank(self) -> tuple[int, int]:
        """Of its job."""
        return self.ticket.rank

    @property
    def filling(self) -> bool:
        """Whether prompt rows are left to run."""
        return self.done < self.prompt

    @property
    def cached(self) -> int:
        """Tokens in the cache. The newest one of a reply is not: the next round feeds it."""
        return self.done if self.filling else max(self.prompt, self.ticket.length - 1)


class Seats:
    """All slots, the pages and the prefix cache that they share."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pages = Pages(limits.pages)
        self.prefixes = Prefixes(self.pages, limits.snapshots)
        self._slots: list[Seat | None] = [None] * limits.slots

    def __len__(self) -> int:
        return sum(seat is not None for seat in self._slots)

    def __iter__(self) -> Iterator[Seat]:
        """Seats in the order of their ranks; slots may change meanwhile."""
        taken = [seat for seat in self._slots if seat is not None]
        return iter(sorted(taken, key=lambda seat: seat.rank))

    def __contains__(self, seat: Seat) -> bool:
        return self._slots[seat.slot] is seat

    def at(self, slot: int) -> Seat:
        """The seat in `slot`. Raises ValueError where there is none."""
        seat = self._slots[slot] if 0 <= slot < len(self._slots) else None
        if seat is None:
            raise ValueError(f"slot {slot} has no job")
        return seat

    def free(self) -> list[int]:
        """Numbers of the slots without a job."""
        return [slot for slot, seat in enumerate(self._slots) if seat is None]

    def enter(self, ticket: Ticket, entry: Entry | None, slot: int) -> Seat | None:
        """Seat `ticket` in a free slot with pages for all it has to compute, beginning at `entry`.

        None where pages are short. One for each running slot must remain, so that the next tokens
        of those do not cost a preemption at once.
        """
        kept, reused = (entry.pages, entry.tokens) if entry else ((), 0)
        if entry:
            self.prefixes.pin(entry)
        count = self.limits.pages_for(ticket.length) - len(kept)
        if not self._evict(count + len(self)):
            return None
        self.pages.share(kept)
        seat = Seat(ticket, slot, [*kept, *self._take(count)], ticket.length, reused)
        self._slots[slot] = seat
        return seat

    def leave(self, seat: Seat) -> None:
        """Free the slot and give up its pages."""
        self.pages.release(seat.pages)
        self._slots[seat.slot] = None

    def grow(self, seat: Seat, tokens: int) -> tuple[tuple[int, ...] | None, list[Seat]]:
        """Give `seat` the pages it lacks for `tokens` more tokens in the cache.

        Idle prefixes go first, then the seats that stand behind it, the last one before others:
        nobody before that one waits for it, and it has probably computed least. Nothing is given up
        in vain.

        Returns (new pages, or None where even all that would not do; the seats that had to leave).
        """
        end = min(seat.cached + tokens, seat.ticket.most)
        count = max(self.limits.pages_for(end) - len(seat.pages), 0)
        left: list[Seat] = []
        if self.pages.free < count:
            behind = [other for other in self if other.rank > seat.rank]
            tables = [other.pages for other in behind]
            if self.pages.free + self.pages.freed_by([*self._idle(), *tables]) < count:
                return None, left
            while not self._evict(count):
                left.append(behind.pop())
                self.leave(left[-1])
        pages = self._take(count)
        seat.pages.extend(pages)
        return pages, left

    def _evict(self, count: int) -> bool:
        """Have `count` pages free at the cost of idle prefixes, or none of them, and say False."""
        short = count - self.pages.free
        if short > 0 and self.pages.freed_by(self._idle()) < short:
            return False
        while self.pages.free < count:
            self.prefixes.evict()
        return True

    def _idle(self) -> list[tuple[int, ...]]:
        return [entry.pages for entry in self.prefixes.idle()]

    def _take(self, count: int) -> tuple[int, ...]:
        pages = self.pages.take(count)
        assert pages is not None, "room was made for them"
        return pages
