"""Which beginnings of prompts are worth keeping, and which are worth waiting for."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from deepinfer_jax.scheduling.jobs import Limits
from deepinfer_jax.scheduling.prefixes import Beginning, Entry
from deepinfer_jax.scheduling.seats import Seat
from deepinfer_jax.scheduling.tickets import Ticket, Waiting

Rank = tuple[int, int]


def cuts(
    ticket: Ticket, known: int, waiting: Waiting, limits: Limits
) -> collections.deque[Beginning]:
    """The beginnings to keep, of a prompt whose first `known` tokens are an entry.

    Kept is where the prompt parts from one that waits: that job begins there. So n samples of a
    prompt are computed once, and so are the examples in front of a list of questions. Where
    `limits.keep` says so, the last boundary is kept for jobs to come.
    """
    every, last = ticket.beginnings, len(ticket.beginnings) - 1
    return collections.deque(
        beginning
        for number, beginning in enumerate(every)
        if beginning.tokens > known
        and (waiting.ends_at(every, number) or (number == last and limits.keep == "ends"))
    )


def promise(coming: dict[bytes, Rank], seat: Seat) -> None:
    """Note in `coming` what `seat` is going to keep: key -> rank of the first job that will."""
    for _, key in seat.cuts:
        coming[key] = min(coming.get(key, seat.rank), seat.rank)


def worth_waiting(ticket: Ticket, entry: Entry | None, coming: Mapping[bytes, Rank]) -> bool:
    """Whether a longer beginning than `entry` is coming from a job that stands before this one.

    What comes from one that stands behind is not waited for: jobs that slip past could make a job
    wait for ever.
    """
    known = entry.tokens if entry else 0
    return any(
        coming.get(key, ticket.rank) < ticket.rank
        for tokens, key in ticket.beginnings
        if tokens > known
    )
