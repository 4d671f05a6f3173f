"""Who goes first: orders of jobs, as functions from a job and its arrival number to a rank.

The lower rank goes first, and of equal ranks the earlier arrival. A rank does not change while a
job waits. Ageing needs no clock: what makes up for a disadvantage is the number of jobs that came
later, so a schedule can be repeated, and `overtaken` bounds how many of them can go first.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from deepinfer_jax.scheduling.jobs import MOST_URGENT, Job, check_integer


class Order(Protocol):
    """An order without starvation. The scheduler uses it for slots, prompt rows and pages alike."""

    def rank(self, job: Job, arrival: int) -> int:
        """Where `job` stands; `arrival` is the number of jobs that came before it."""
        ...

    def overtaken(self, job: Job) -> int:
        """Most jobs that can arrive after `job` and still stand before it."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class FirstCome:
    """First come, first served."""

    def rank(self, job: Job, arrival: int) -> int:
        """The arrival itself."""
        return arrival

    def overtaken(self, job: Job) -> int:
        """None."""
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class ShortestFirst:
    """The fewest tokens first, which lowers the mean time to a reply.

    `ageing`: tokens that each later arrival adds; a longer job goes before those that come
    difference / ageing arrivals later.
    """

    ageing: int = 64

    def __post_init__(self) -> None:
        check_integer("ageing", self.ageing, 1)

    def rank(self, job: Job, arrival: int) -> int:
        """Tokens of prompt and reply at most, and ageing."""
        return _size(job) + self.ageing * arrival

    def overtaken(self, job: Job) -> int:
        """As many as the ageing takes to exceed the difference from the smallest job, 2 tokens."""
        return max(_size(job) - 3, 0) // self.ageing


@dataclasses.dataclass(frozen=True, slots=True)
class Priority:
    """The highest priority first.

    `ageing`: arrivals that make up for one step of priority.
    """

    ageing: int = 64

    def __post_init__(self) -> None:
        check_integer("ageing", self.ageing, 1)

    def rank(self, job: Job, arrival: int) -> int:
        """The arrival, brought forward by the priority."""
        return arrival - self.ageing * job.priority

    def overtaken(self, job: Job) -> int:
        """As many as the ageing takes to make up for all steps above this priority."""
        return max(self.ageing * (MOST_URGENT - job.priority) - 1, 0)


def _size(job: Job) -> int:
    return len(job.tokens) + job.max_tokens
