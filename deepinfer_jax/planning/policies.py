"""Policies: how a run of the engine uses its drafter. Host side; nothing here holds an array.

A policy is a frozen value. Before the engine goes to the device for some rounds it asks `move`, and
afterwards it tells `learn` what the drafter's confidences were; what a policy remembers is a value
too. No policy can change a token. Legend: B slots, N drafts made in a round, D block of the
drafter.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from deepinfer_jax.planning.cost_table import CostTable, Curve, curve_for
from deepinfer_jax.planning.schedules import Confident, Fill, Lengths
from deepinfer_jax.planning.threshold import TauRamp, tau_for

# Calls without drafts before the drafter is asked again: few at first, more while it stays useless.
FIRST_PATIENCE, LAST_PATIENCE = 4, 64


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """How to run the next rounds: drafts made, rows of a verification, which drafts are verified
    (`rounds.Schedule`), and the most rounds, None for as many as the engine likes.
    """

    size: int
    rows: int
    schedule: Any
    rounds: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What a policy knows between moves: slots and block; survivals [n] of drafts in the latest
    rounds, best first, and how many rounds they are of; calls since and until the next look.
    """

    slots: int
    block: int
    survivals: np.ndarray | None = None
    rounds: int = 0
    waited: int = 0
    patience: int = FIRST_PATIENCE


class Policy(Protocol):
    """See the module. `temperatures`: of the confidence head, one per draft made."""

    @property
    def temperatures(self) -> tuple[float, ...]: ...

    def start(self, slots: int, block: int) -> Memory:
        """What is known at first. Raises ValueError for a model or batch it is not made for."""
        ...

    def move(self, memory: Memory, running: int) -> Move:
        """The next rounds of `running` requests."""
        ...

    def learn(self, memory: Memory, move: Move, survivals: np.ndarray) -> Memory:
        """Memory after `move`, whose rounds showed `survivals` [rounds, B, N], 0 where inactive."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """Make `count` drafts in every round and verify them all; 0 decodes one by one."""

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise ValueError(f"count must be an integer of at least 0, got {self.count!r}")

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Ones: no confidence is looked at."""
        return (1.0,) * self.count

    def start(self, slots: int, block: int) -> Memory:
        """Raises ValueError where the model's block is smaller."""
        if self.count > block:
            raise ValueError(
                f"count must be at most {block} for this model (its block), got {self.count}"
            )
        return Memory(slots, block)

    def move(self, memory: Memory, running: int) -> Move:
        """Always the same."""
        return Move(self.count, memory.slots * (self.count + 1), Lengths(np.int32(self.count)))

    def learn(self, memory: Memory, move: Move, survivals: np.ndarray) -> Memory:
        """Nothing to learn."""
        return memory


OFF = Fixed(0)


@dataclasses.dataclass(frozen=True, slots=True)
class Threshold:
    """Verify leading drafts that are accepted with probability `tau` or more; it may rise with the
    number of running requests (`TauRamp`). `temperatures`: one per draft, from calibration.
    """

    tau: float | TauRamp
    temperatures: tuple[float, ...]

    def start(self, slots: int, block: int) -> Memory:
        """Raises ValueError where `temperatures` is not of this model."""
        _check_temperatures(self.temperatures, block)
        return Memory(slots, block)

    def move(self, memory: Memory, running: int) -> Move:
        """Room for every draft: how many are verified is known on the device only."""
        tau = tau_for(self.tau, running) if isinstance(self.tau, TauRamp) else self.tau
        schedule = Confident(np.float32(tau), np.asarray(self.temperatures, np.float32))
        return Move(memory.block, memory.slots * (memory.block + 1), schedule)

    def learn(self, memory: Memory, move: Move, survivals: np.ndarray) -> Memory:
        """Nothing to learn."""
        return memory


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """Choose the size of a verification that gives the most tokens in the measured time, or no
    drafts at all; the rows are then filled with the drafts most likely to survive.

    Sizes come from earlier rounds and the filling from this one (engine spec 2.5), so it may serve
    rejection sampling too. `table`: from `deepinfer-jax profile`; `temperatures`: one per draft.
    """

    table: CostTable
    temperatures: tuple[float, ...]

    def start(self, slots: int, block: int) -> Memory:
        """Raises MissingCostTable or ValueError where the table or temperatures are of others."""
        curve_for(self.table, slots)
        _check_temperatures(self.temperatures, block)
        return Memory(slots, block)

    def move(self, memory: Memory, running: int) -> Move:
        """The best size; a look at the drafter (one round) when it has long not been asked."""
        schedule = Fill(np.asarray(self.temperatures, np.float32))
        if memory.survivals is None:
            return Move(memory.block, memory.slots, schedule, rounds=1)
        curve = curve_for(self.table, memory.slots)
        rows = best_rows(memory.survivals, memory.rounds, running, curve)
        if rows is not None:
            return Move(memory.block, rows, schedule)
        if memory.waited >= memory.patience:
            return Move(memory.block, memory.slots, schedule, rounds=1)
        return Move(0, memory.slots, Lengths(np.int32(0)))

    def learn(self, memory: Memory, move: Move, survivals: np.ndarray) -> Memory:
        """Remember the confidences of these rounds, or that there were none."""
        if not move.size:
            return dataclasses.replace(memory, waited=memory.waited + 1)
        rounds = survivals.shape[0]
        useless = memory.waited >= memory.patience
        patience = min(2 * memory.patience, LAST_PATIENCE) if useless else FIRST_PATIENCE
        return dataclasses.replace(
            memory,
            survivals=-np.sort(-survivals[survivals > 0], kind="stable"),
            rounds=rounds, waited=0, patience=patience,
        )  # fmt: skip


def best_rows(survivals: np.ndarray, rounds: int, running: int, curve: Curve) -> int | None:
    """The rows of a verification with the most expected tokens per millisecond, fewest on ties.

    None where decoding without drafts is at least as good. `survivals` [n], best first, are those
    of `rounds` rounds: a verification with room for k drafts of each is expected to accept the
    k * rounds best of them, spread over the rounds.
    """
    gained = np.concatenate([[0.0], np.cumsum(survivals, dtype=np.float64)]) / max(rounds, 1)
    best, most = None, running / curve.plain_ms
    for rows, ms in zip(curve.rows, curve.ms, strict=True):
        room = min(max(rows - running, 0) * rounds, len(survivals))
        rate = (running + gained[room]) / ms
        if rows >= running and rate > most:
            best, most = rows, rate
    return best


def _check_temperatures(temperatures: tuple[float, ...], block: int) -> None:
    if len(temperatures) != block:
        raise ValueError(
            f"temperatures must be {block} numbers for this model, one for each draft of its "
            f"block, got {len(temperatures)}"
        )
