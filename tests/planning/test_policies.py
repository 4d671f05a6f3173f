"""Policies and schedules: what they ask for, without a model."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import planning
from deepinfer_jax.planning import CostTable, Curve, Fixed, Planner, TauRamp, Threshold
from deepinfer_jax.planning.policies import FIRST_PATIENCE, LAST_PATIENCE, best_rows

SLOTS, BLOCK = 3, 4
HEAT = (1.0, 1.5, 0.5, 2.0)
# Twice the rows for a fifth more time; all of them for twice the time.
CURVE = Curve(SLOTS, (3, 6, 15), (12.0, 14.0, 24.0), 10.0)
TABLE = CostTable("model", "device", "numerics", "0", "0", (CURVE,))


def seen(*survivals: float, rounds: int = 2) -> np.ndarray:
    """The same survivals of every slot in every round."""
    return np.broadcast_to(np.float32(survivals), (rounds, SLOTS, len(survivals))).copy()


def rate(rows: int, ms: float, *survivals: float) -> float:
    """Expected tokens per millisecond, counted by hand."""
    queue = sorted((s for s in survivals for _ in range(SLOTS)), reverse=True)
    return (SLOTS + sum(queue[: rows - SLOTS])) / ms


@pytest.mark.parametrize(
    ("survivals", "rows"),
    [
        ((0.9, 0.8, 0.7, 0.6), 15),
        ((0.9, 0.3, 0.1, 0.1), 6),
        ((0.3, 0.1, 0.0, 0.0), None),
        ((0.0, 0.0, 0.0, 0.0), None),
    ],
)
@pytest.mark.parametrize("rounds", [1, 2, 5, 16, 19])
def test_the_best_size_by_hand(survivals, rows, rounds):
    rates = {None: rate(3, CURVE.plain_ms, *survivals)}
    rates |= {n: rate(n, ms, *survivals) for n, ms in zip(CURVE.rows, CURVE.ms, strict=True)}
    assert max(rates, key=rates.__getitem__) == rows
    alive = np.maximum(seen(*survivals, rounds=rounds), 1e-9)  # of active slots
    assert best_rows(alive, CURVE) == rows


def test_slots_that_took_no_part_are_no_requests():
    """One request of three may fill a call that has a row for each slot."""
    alive = seen(0.9, 0.5, 0.1, 0.05)
    alive[:, 1:] = 0
    curve = dataclasses.replace(CURVE, ms=(11.0, 14.0, 24.0))
    assert best_rows(alive, curve) == 3


def play(policy: Planner, *shown: np.ndarray):
    """Moves of a policy whose looks show these survivals, the last for ever."""
    memory, queue = policy.start(SLOTS, BLOCK), list(shown)
    while True:
        move = policy.move(memory, SLOTS)
        yield move
        what = np.zeros((2, SLOTS, 0), np.float32)
        if move.size:
            what = queue.pop(0) if len(queue) > 1 else queue[0]
        memory = policy.learn(memory, move, what)


def test_the_planner_looks_first_and_then_decides():
    moves = play(Planner(TABLE, HEAT), seen(0.9, 0.8, 0.7, 0.6), seen(0.9, 0.3, 0.1, 0.1))
    look, first, second = (next(moves) for _ in range(3))
    assert (look.size, look.rows, look.rounds) == (BLOCK, SLOTS, 1)
    assert (first.size, first.rows, first.rounds) == (BLOCK, 15, None)
    assert (second.size, second.rows) == (BLOCK, 6)


def test_a_useless_drafter_is_asked_ever_more_rarely():
    """And never for more than a round at a time."""
    moves = play(Planner(TABLE, HEAT), seen(0.2, 0.1, 0.05, 0.01))
    next(moves)
    waits, plain = [], 0
    while len(waits) < 7:
        move = next(moves)
        if move.size:
            assert (move.rows, move.rounds) == (SLOTS, 1)
            waits.append(plain)
            plain = 0
        else:
            assert move.rows == SLOTS
            plain += 1
    assert waits == [FIRST_PATIENCE, 8, 16, 32, LAST_PATIENCE, LAST_PATIENCE, LAST_PATIENCE]


def test_fixed_and_threshold_ask_for_room_for_all():
    fixed = Fixed(3).move(Fixed(3).start(SLOTS, BLOCK), 2)
    assert (fixed.size, fixed.rows, fixed.mode) == (3, 12, "coupled")
    ramp = Threshold(TauRamp((1, 4), (0.2, 0.6)), HEAT, "rejection")
    move = ramp.move(ramp.start(SLOTS, BLOCK), 2)
    assert (move.size, move.rows, move.mode) == (BLOCK, 15, "rejection")
    assert move.schedule.tau == pytest.approx(0.4)


CONFIDENCE = jnp.array([[2.0, -1.0, 3.0, 0.0], [4.0, 4.0, 0.5, -3.0], [9.0, 9.0, 9.0, 9.0]])
ACTIVE = jnp.array([True, True, False])


def lengths(schedule, room: int = 5) -> list[int]:
    return schedule.lengths(CONFIDENCE, ACTIVE, jnp.int32(room)).tolist()


def test_schedules():
    heat = np.ones(BLOCK, np.float32)
    assert lengths(planning.Lengths(np.int32(2))) == [2, 2, 2]
    assert lengths(planning.Lengths(np.array([0, 3, 1], np.int32))) == [0, 3, 1]
    # Probabilities .88 .27 .95 .5 and .98 .98 .62 .05.
    assert lengths(planning.Confident(np.float32(0.6), heat))[:2] == [1, 3]
    assert lengths(planning.Confident(np.float32(0.6), np.float32([1, 1, 9, 1])))[:2] == [1, 2]
    # Survivals .88 .24 .23 .11 and .98 .96 .60 .03, best first.
    assert [lengths(planning.Fill(heat), room) for room in (0, 1, 3, 4, 8, 20)] == [
        [0, 0, 0], [0, 1, 0], [1, 2, 0], [1, 3, 0], [4, 4, 0], [4, 4, 0],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(-1), "count must be an integer of at least 0, got -1"),
        (lambda: Fixed(True), "count must be an integer of at least 0, got True"),
        (lambda: Fixed(1, "other"), "mode must be one of coupled, rejection, got 'other'"),
        (lambda: Threshold(1.5, HEAT), r"tau must lie in \[0, 1\] or be a TauRamp, got 1.5"),
        (lambda: Fixed(5).start(SLOTS, BLOCK), "count must be at most 4 for this model"),
        (lambda: Planner(TABLE, HEAT[1:]).start(SLOTS, BLOCK), "must be 4 numbers .* got 3"),
        (lambda: Planner(TABLE, HEAT).start(5, BLOCK), "no step times for 5 slots, only for 3"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make()
