"""A scheduler for each of several devices, seen as one.

Every device has slots, pages and snapshots of its own, which no other can read. So a job stays on
the device that it was given to, and beginnings are shared among the jobs of one device. All devices
take every step together: one that has nothing to do has a step without rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

from deepinfer_jax.scheduling.jobs import Job, Limits, check_integer
from deepinfer_jax.scheduling.orders import Order
from deepinfer_jax.scheduling.scheduler import Scheduler, Usage
from deepinfer_jax.scheduling.step import Step


class Fleet:
    """As `Scheduler`, over `parts` devices with `limits` each.

    Slots are numbered device by device: slot s is on device s // limits.slots. Numbers of pages and
    snapshots in a step are those of the slot's own device.
    """

    def __init__(
        self, limits: Limits, parts: int, order: Order | None = None, salt: str = ""
    ) -> None:
        check_integer("parts", parts, 1)
        self.limits = limits
        self._each = [Scheduler(limits, order, salt) for _ in range(parts)]
        self._home: dict[Hashable, tuple[int, int]] = {}  # id -> device, tokens it may come to
        self._load = [0] * parts  # tokens of the unfinished jobs of each device

    def submit(self, job: Job) -> None:
        """Let `job` wait for a slot of the device whose jobs have the fewest tokens (the first of
        several). Raises as `Scheduler.submit`.
        """
        if job.id in self._home:
            raise ValueError(f"job id {job.id!r} is taken by an unfinished job; ids must differ")
        part = self._load.index(min(self._load))
        self._each[part].submit(job)
        tokens = len(job.tokens) + job.max_tokens
        self._home[job.id] = part, tokens
        self._load[part] += tokens

    def advance(self, slot: int, tokens: int) -> None:
        """`Scheduler.advance` of the slot's device."""
        part, own = divmod(slot, self.limits.slots)
        self._each[part].advance(own, tokens)

    def finish(self, slot: int) -> None:
        """`Scheduler.finish` of the slot's device."""
        part, own = divmod(slot, self.limits.slots)
        self._forget(self._each[part].finish(own))

    def cancel(self, job: Hashable) -> int | None:
        """`Scheduler.cancel`, wherever the job is."""
        if job not in self._home:
            raise ValueError(f"there is no unfinished job {job!r}")
        part = self._home[job][0]
        own = self._each[part].cancel(job)
        self._forget(job)
        return None if own is None else part * self.limits.slots + own

    def _forget(self, job: Hashable) -> None:
        part, tokens = self._home.pop(job)
        self._load[part] -= tokens

    def renew(self, salt: str) -> None:
        """`Scheduler.renew` of all."""
        for each in self._each:
            each.renew(salt)

    def restart(self) -> None:
        """`Scheduler.restart` of all."""
        for each in self._each:
            each.restart()

    def usage(self) -> Usage:
        """What is in use, of all together."""
        found = [dataclasses.astuple(each.usage()) for each in self._each]
        return Usage(*map(sum, zip(*found, strict=True)))

    @property
    def filling(self) -> bool:
        """Whether a running job has prompt tokens to compute."""
        return any(each.filling for each in self._each)

    def step(self, lookahead: int = 1, unreported: int = 0) -> Step:
        """The steps of all devices as one; see `Scheduler.step`.

        Where one device has prompt rows, the others' slots decode one token beside them.
        """
        size = self.limits.slots
        made = [each.step(lookahead, unreported) for each in self._each]
        ahead = [each.ahead for each in made if not each.idle]
        return Step(
            **{name: _numbered([getattr(each, name) for each in made], size) for name in _OF_SLOTS},
            decode=tuple(
                part * size + slot for part, each in enumerate(made) for slot in each.decode
            ),
            ahead=min(ahead, default=1),
        )


_OF_SLOTS = ("preempted", "seated", "grants", "chunks", "saved")


def _numbered(every: Iterable[Iterable[Any]], size: int) -> tuple[Any, ...]:
    """Entries of all devices' steps with the slots of one numbering."""
    return tuple(
        dataclasses.replace(entry, slot=part * size + entry.slot)
        for part, entries in enumerate(every)
        for entry in entries
    )
