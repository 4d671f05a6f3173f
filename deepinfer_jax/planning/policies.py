"""Policies: how a run of the engine uses its drafter. Host side; nothing here holds an array.

A policy is a frozen value. Before the engine goes to the device for some rounds it asks `move`, and
afterwards it tells `learn` what the drafter's confidences were; what a policy remembers is a value
too. No policy can change a token. Legend: B slots, N drafts made in a round, D block of the
drafter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal, Protocol, get_args

import jax
import numpy as np

from deepinfer_jax.planning.cost import make_cost
from deepinfer_jax.planning.cost_table import CostTable, Curve, curve_for
from deepinfer_jax.planning.plan import plan
from deepinfer_jax.planning.schedules import Confident, Fill, Lengths
from deepinfer_jax.planning.threshold import TauRamp, tau_for

# How drafts are judged: "coupled" gives the bits of decoding without drafts, "rejection" only its
# distribution (module `rejection`).
Mode = Literal["coupled", "rejection"]

# Calls without drafts before the drafter is asked again: few at first, more while it stays useless.
FIRST_PATIENCE, LAST_PATIENCE = 4, 64
PLANNED_ROUNDS = 16  # planned together; fewer are padded, so that one program serves

_plan = jax.jit(plan)


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """How to run the next rounds: drafts made, rows of a verification, which drafts are verified
    (`rounds.Schedule`), how they are judged, and the most rounds, None for as many as the engine
    likes.
    """

    size: int
    rows: int
    schedule: Any
    mode: Mode = "coupled"
    rounds: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What a policy knows between moves: slots and block; `survivals` [rounds, B, N] as learnt
    last; calls without drafts since, and how many until it looks again.
    """

    slots: int
    block: int
    survivals: np.ndarray | None = None
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


def _check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")


def _check_temperatures(temperatures: tuple[float, ...], block: int) -> None:
    if len(temperatures) != block:
        raise ValueError(
            f"temperatures must be {block} numbers for this model, one for each draft of its "
            f"block, got {len(temperatures)}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """Make `count` drafts in every round and verify them all; 0 decodes one by one."""

    count: int
    mode: Mode = "coupled"

    def __post_init__(self) -> None:
        _check_mode(self.mode)
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
        every = Lengths(np.int32(self.count))
        return Move(self.count, memory.slots * (self.count + 1), every, self.mode)

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
    mode: Mode = "coupled"

    def __post_init__(self) -> None:
        _check_mode(self.mode)
        if not isinstance(self.tau, TauRamp) and not 0 <= self.tau <= 1:
            raise ValueError(f"tau must lie in [0, 1] or be a TauRamp, got {self.tau!r}")

    def start(self, slots: int, block: int) -> Memory:
        """Raises ValueError where `temperatures` is not of this model."""
        _check_temperatures(self.temperatures, block)
        return Memory(slots, block)

    def move(self, memory: Memory, running: int) -> Move:
        """Room for every draft: how many are verified is known on the device only."""
        tau = tau_for(self.tau, running) if isinstance(self.tau, TauRamp) else self.tau
        schedule = Confident(np.float32(tau), np.asarray(self.temperatures, np.float32))
        return Move(memory.block, memory.slots * (memory.block + 1), schedule, self.mode)

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
    mode: Mode = "coupled"

    def __post_init__(self) -> None:
        _check_mode(self.mode)

    def start(self, slots: int, block: int) -> Memory:
        """Raises MissingCostTable or ValueError where the table or temperatures are of others."""
        curve_for(self.table, slots)
        _check_temperatures(self.temperatures, block)
        return Memory(slots, block)

    def move(self, memory: Memory, running: int) -> Move:
        """The best size; a look at the drafter (one round) when it has long not been asked."""
        schedule = Fill(np.asarray(self.temperatures, np.float32))
        if memory.survivals is None:
            return Move(memory.block, memory.slots, schedule, self.mode, rounds=1)
        curve = curve_for(self.table, memory.slots)
        rows = best_rows(memory.survivals, curve)
        if rows is not None:
            return Move(memory.block, rows, schedule, self.mode)
        if memory.waited >= memory.patience:
            return Move(memory.block, memory.slots, schedule, self.mode, rounds=1)
        return Move(0, memory.slots, Lengths(np.int32(0)))

    def learn(self, memory: Memory, move: Move, survivals: np.ndarray) -> Memory:
        """Remember the confidences of these rounds, or that there were none."""
        if not move.size:
            return dataclasses.replace(memory, waited=memory.waited + 1)
        useless = memory.waited >= memory.patience
        patience = min(2 * memory.patience, LAST_PATIENCE) if useless else FIRST_PATIENCE
        return dataclasses.replace(memory, survivals=survivals, waited=0, patience=patience)


def best_rows(survivals: np.ndarray, curve: Curve) -> int | None:
    """The size of a verification that `plan` would have liked best in past rounds, all of one size.

    survivals [rounds, B, N], 0 where a slot took no part. None where decoding without drafts gives
    as many tokens per millisecond. The rounds are planned as one, of as many times the rows and the
    time, so that chance in a single round does not decide.
    """
    rounds, _, n = survivals.shape
    padded = max(PLANNED_ROUNDS, 1 << (rounds - 1).bit_length())
    alive = np.pad(survivals, ((0, padded - rounds), (0, 0), (0, 0))).reshape(-1, n)
    active = alive[:, 0] > 0
    sizes = [rounds * rows for rows in curve.rows]
    cost = make_cost(sizes, [rounds * ms for ms in curve.ms])
    with _on_the_host():
        best = jax.device_get(_plan(alive, alive, active, cost))
    if best.objective <= np.count_nonzero(active) / (rounds * curve.plain_ms):
        return None
    return next(rows for rows, size in zip(curve.rows, sizes, strict=True) if size >= best.rows)


def _on_the_host() -> contextlib.AbstractContextManager:
    """The addition of survivals is a long chain of tiny steps, which an accelerator is bad at."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # this process was told to have no CPU device
        return contextlib.nullcontext()
