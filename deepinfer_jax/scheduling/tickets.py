"""Unfinished jobs: what is remembered of each, and the queue of those that wait."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterator

from deepinfer_jax.scheduling.jobs import Job
from deepinfer_jax.scheduling.prefixes import Beginning


@dataclasses.dataclass(eq=False, slots=True)
class Ticket:
    """An unfinished job, waiting or running.

    Attributes:
      rank: its place among all jobs, (rank of the order, arrival); no two are equal.
      beginnings: of its prompt (`prefixes.beginnings`); none if it takes no part in sharing.
      emitted: tokens of its reply so far; they survive preemption.
    """

    job: Job
    rank: tuple[int, int]
    beginnings: tuple[Beginning, ...]
    emitted: int = 0

    @property
    def length(self) -> int:
        """Tokens of prompt and reply so far."""
        return len(self.job.tokens) + self.emitted

    @property
    def most(self) -> int:
        """Tokens of prompt and reply at most."""
        return len(self.job.tokens) + self.job.max_tokens


class Waiting:
    """Tickets in the order of their ranks, and how many of them have which beginnings."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._beginnings: collections.Counter[Beginning] = collections.Counter()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Put `ticket` in its place."""
        bisect.insort(self._tickets, ticket, key=_rank)
        self._beginnings.update(ticket.beginnings)

    def remove(self, ticket: Ticket) -> None:
        """Take `ticket` out."""
        place = bisect.bisect_left(self._tickets, ticket.rank, key=_rank)
        assert self._tickets[place] is ticket, "the ticket does not wait"
        del self._tickets[place]
        for beginning in ticket.beginnings:
            self._beginnings[beginning] -= 1
            if not self._beginnings[beginning]:
                del self._beginnings[beginning]

    def ends_at(self, every: tuple[Beginning, ...], number: int) -> bool:
        """Whether what some ticket here has in common with `every` ends with its `number`."""
        common = self._beginnings[every[number]]
        return common > (self._beginnings[every[number + 1]] if number + 1 < len(every) else 0)


def _rank(ticket: Ticket) -> tuple[int, int]:
    return ticket.rank
