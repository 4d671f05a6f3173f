"""Policies: how a run of the engine uses its drafter. They live on the host.

A policy is a frozen value. Before the engine goes to the device for some rounds (a look) it asks
`move`, and afterwards it tells `learn` what the drafter's confidences were; what a policy remembers
is a value too. No policy can change a token: drafts are accepted when they are what the model says
anyway. Legend: B slots, N drafts made in a round.
"""

from __future__ import annotations

import abc
import dataclasses
import reprlib

import numpy as np

from deepinfer_jax.planning.confidence import probabilities, survival
from deepinfer_jax.planning.cost_table import CostTable, Curve, curve_for
from deepinfer_jax.planning.schedules import Confident, Fill, Lengths, Schedule, useful
from deepinfer_jax.planning.threshold import TauRamp, tau_for

LOOK_ROUNDS = 4  # rounds that tell whether the drafter is worth asking
FREE = 1.05  # more rows than the fewest cost a look nothing while they take at most so many times
# Rounds without drafts before it is asked again: few at first, more while it stays useless.
FIRST_PATIENCE, LAST_PATIENCE = 64, 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """How to run the next rounds: drafts made, rows of a verification, which drafts are verified,
    and the most rounds, None for as many as the engine likes.
    """

    size: int
    rows: int
    schedule: Schedule
    rounds: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What a policy knows between moves.

    slots, block  of the run: B, and the most drafts of a round
    survivals     [rounds, B, N] of the latest rounds with drafts, 0 where nothing could come of one
    rows          the best size of a verification for those; None: drafts are not worth it
    plain         rounds without drafts since then
    patience      how many of those until it looks again
    """

    slots: int
    block: int
    survivals: np.ndarray | None = None
    rows: int | None = None
    plain: int = 0
    patience: int = FIRST_PATIENCE


class Policy(abc.ABC):
    """See the module. A policy that remembers and refuses nothing only needs `move`."""

    def start(self, slots: int, block: int) -> Memory:
        """What is known at first. Raises ValueError or FileNotFoundError where the policy is not
        made for this model (`block` 0: it has no drafter) or number of slots.
        """
        return Memory(slots, block)

    @abc.abstractmethod
    def move(self, memory: Memory, running: int) -> Move:
        """The next rounds of `running` requests."""

    def moves(self, memory: Memory) -> tuple[Move, ...]:
        """A move of every size and number of rows that it can make: each is a program to compile.

        The default suits policies whose moves are all of one size.
        """
        return (self.move(memory, memory.slots),)

    def learn(self, memory: Memory, move: Move, confidence: np.ndarray, most: np.ndarray) -> Memory:
        """Memory after `move`: confidence [rounds, B, N] raw, most [rounds, B] as in a schedule."""
        return memory


def check_policy(policy: object) -> None:
    """Raise TypeError for what is no policy, as a number or a name."""
    if not isinstance(policy, Policy):
        raise TypeError(
            "speculative must be a policy of `planning`, such as Fixed(3) or OFF, got "
            f"{reprlib.repr(policy)}"
        )


@dataclasses.dataclass(frozen=True)
class Fixed(Policy):
    """Make `count` drafts in every round and verify them all; 0 decodes one by one."""

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise ValueError(f"count must be an integer of at least 0, got {self.count!r}")

    def start(self, slots: int, block: int) -> Memory:
        """Raises ValueError where the model's block is smaller."""
        if self.count > block:
            raise ValueError(
                f"count must be at most {block} for this model (its block of drafts), "
                f"got {self.count}"
            )
        return Memory(slots, block)

    def move(self, memory: Memory, running: int) -> Move:
        """Always the same."""
        return Move(self.count, memory.slots * (self.count + 1), Lengths(np.int32(self.count)))


OFF = Fixed(0)


@dataclasses.dataclass(frozen=True)
class Threshold(Policy):
    """Verify leading drafts that are accepted with probability `tau` or more; it may rise with the
    number of running requests (`TauRamp`). `temperatures`: one per draft, from calibration.

    A call has room for every draft, since how many are verified is known on the device only: it
    saves less than a smaller call would (`Planner`).
    """

    tau: float | TauRamp
    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tau, TauRamp) and not 0 <= self.tau <= 1:
            raise ValueError(f"tau must lie in [0, 1] or be a TauRamp, got {self.tau!r}")

    def start(self, slots: int, block: int) -> Memory:
        """Raises ValueError where `temperatures` is not of this model."""
        _check_drafter(self.temperatures, block)
        return Memory(slots, block)

    def move(self, memory: Memory, running: int) -> Move:
        """The whole block, cut on the device."""
        tau = tau_for(self.tau, running) if isinstance(self.tau, TauRamp) else self.tau
        schedule = Confident(np.float32(tau), np.asarray(self.temperatures, np.float32))
        return Move(memory.block, memory.slots * (memory.block + 1), schedule)


@dataclasses.dataclass(frozen=True)
class Planner(Policy):
    """Choose the size of a verification that gives the most tokens in the measured time, or no
    drafts at all; the rows are then filled with the drafts most likely to survive.

    Sizes come from earlier rounds and the filling from this one. `table`: from
    `deepinfer-jax profile`; `temperatures`: one per draft, from calibration.
    """

    table: CostTable
    temperatures: tuple[float, ...]

    def start(self, slots: int, block: int) -> Memory:
        """Raises MissingCostTable or ValueError where table or temperatures are of others."""
        _check_drafter(self.temperatures, block)
        rows = curve_for(self.table, slots).rows
        if rows[0] < slots or rows[-1] > slots * (block + 1):
            raise ValueError(
                f"the step times for {slots} slots must be of {slots} to {slots * (block + 1)} "
                f"rows for this model, got {list(rows)}; run `deepinfer-jax profile` again"
            )
        return Memory(slots, block)

    def move(self, memory: Memory, running: int) -> Move:
        """The best size; a look at the drafter when it has long not been asked."""
        if memory.rows is not None:
            return self._drafted(memory, memory.rows)
        if memory.survivals is None or memory.plain >= memory.patience:
            rows = look_rows(curve_for(self.table, memory.slots))
            return self._drafted(memory, rows, LOOK_ROUNDS)
        return Move(0, memory.slots, Lengths(np.int32(0)))

    def moves(self, memory: Memory) -> tuple[Move, ...]:
        """Without drafts, the look at the drafter, and all sizes that were timed."""
        curve = curve_for(self.table, memory.slots)
        rows = {look_rows(curve), *curve.rows}
        plain = Move(0, memory.slots, Lengths(np.int32(0)))
        return (plain, *(self._drafted(memory, count) for count in sorted(rows)))

    def _drafted(self, memory: Memory, rows: int, rounds: int | None = None) -> Move:
        fill = Fill(np.asarray(self.temperatures, np.float32))
        return Move(memory.block, rows, fill, rounds)

    def learn(self, memory: Memory, move: Move, confidence: np.ndarray, most: np.ndarray) -> Memory:
        """Remember these rounds, with earlier ones where they are few; or that there were none."""
        if not move.size:
            return dataclasses.replace(memory, plain=memory.plain + len(most))
        heat = np.asarray(self.temperatures, np.float32)
        seen = useful(survival(probabilities(confidence, heat)), most)
        if memory.survivals is not None and not memory.plain:
            earlier = max(LOOK_ROUNDS - len(seen), 0)
            seen = np.concatenate([memory.survivals[::-1][:earlier][::-1], seen])
        rows = best_rows(seen, curve_for(self.table, memory.slots))
        if rows is not None:
            patience = FIRST_PATIENCE
        elif memory.plain >= memory.patience:  # it was asked again, in vain
            patience = min(2 * memory.patience, LAST_PATIENCE)
        else:
            patience = memory.patience
        return dataclasses.replace(memory, survivals=seen, rows=rows, plain=0, patience=patience)


def look_rows(curve: Curve) -> int:
    """Verification size of rounds that are to tell whether drafts are worth it: the fewest rows,
    or more where these take no longer, so that good drafts are not lost meanwhile.
    """
    times = np.maximum.accumulate(curve.ms)
    return curve.rows[int(np.count_nonzero(times <= FREE * times[0])) - 1]


def best_rows(survivals: np.ndarray, curve: Curve) -> int | None:
    """The verification size that would have given the most tokens per millisecond in past rounds.

    survivals [rounds, B, N], 0 where nothing could come of a draft. None where decoding without
    drafts gives as many; the fewest rows on ties. Each round is filled as `Fill` would, so that for
    a single round and a curve of these sizes this is what `plan` says. Times count as not falling
    with the rows, nor below those without drafts: where they were measured so, that was noise.
    """
    rounds, _, n = survivals.shape
    queue = -np.sort(-survivals.reshape(rounds, -1), axis=1)
    gained = np.pad(np.cumsum(queue, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
    active = np.count_nonzero(survivals[:, :, 0] > 0, axis=1) if n else np.zeros(rounds, np.int64)
    times = np.maximum.accumulate((curve.plain_ms, *curve.ms))[1:].tolist()
    best, most = None, float(np.add.reduce(active)) / curve.plain_ms
    for rows, ms in zip(curve.rows, times, strict=True):
        room = np.clip(rows - active, 0, queue.shape[1])
        tokens = np.take_along_axis(gained, room[:, None], axis=1)[:, 0] + active
        rate = float(np.add.reduce(tokens)) / ms
        if rate > most:
            best, most = rows, rate
    return best


def _check_drafter(temperatures: tuple[float, ...], block: int) -> None:
    if not block:
        raise ValueError("this model has no drafter: take planning.OFF")
    if len(temperatures) != block:
        raise ValueError(
            f"temperatures must be {block} numbers for this model, one for each draft of its "
            f"block, got {len(temperatures)}"
        )
