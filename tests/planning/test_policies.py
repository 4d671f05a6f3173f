"""Policies and schedules: what they ask for, without a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import planning
from deepinfer_jax.planning import CostTable, Curve, Fixed, Planner, TauRamp, Threshold
from deepinfer_jax.planning.policies import (
    FIRST_PATIENCE,
    LAST_PATIENCE,
    LOOK_ROUNDS,
    best_rows,
    look_rows,
)

SLOTS, BLOCK = 3, 4
HEAT = (1.0, 1.5, 0.5, 2.0)
# Twice the rows for a fifth more time; all of them for twice the time.
CURVE = Curve(SLOTS, (3, 6, 15), (12.0, 14.0, 24.0), 10.0)
TABLE = CostTable("model", "device", "numerics", "0", "0", (CURVE,))


def seen(*survivals: float, rounds: int = 2) -> np.ndarray:
    """The same survivals of every slot in every round."""
    return np.broadcast_to(np.float32(survivals), (rounds, SLOTS, len(survivals))).copy()


def by_hand(survivals: np.ndarray, curve: Curve) -> int | None:
    """All sizes, round by round, one draft after another."""
    rates = {None: np.count_nonzero(survivals[:, :, 0]) / curve.plain_ms}
    fastest = curve.plain_ms
    for rows, ms in zip(curve.rows, curve.ms, strict=True):
        fastest, tokens = max(fastest, ms), 0.0
        for each in survivals:
            active = np.count_nonzero(each[:, 0])
            tokens += active + sum(sorted(each.ravel().tolist(), reverse=True)[: rows - active])
        rates[rows] = tokens / fastest
    return max(rates, key=rates.__getitem__)  # the first of equals


@pytest.mark.parametrize(
    ("survivals", "rows"),
    [
        ((0.9, 0.8, 0.7, 0.6), 15),
        ((0.9, 0.3, 0.1, 0.1), 6),
        ((0.3, 0.1, 0.05, 0.01), None),
    ],
)
@pytest.mark.parametrize("rounds", [1, 5])
def test_the_best_size(survivals, rows, rounds):
    alive = seen(*survivals, rounds=rounds)
    assert best_rows(alive, CURVE) == by_hand(alive, CURVE) == rows


TIMES = st.lists(st.integers(1, 40), min_size=4, max_size=4)


@given(seed=st.integers(0, 999), times=TIMES, rounds=st.integers(1, 6))
def test_the_best_size_of_unequal_rounds(seed, times, rounds):
    """Good rounds cannot lend their drafts to bad ones; noise in the times is not believed."""
    rng = np.random.default_rng(seed)
    step = rng.random((rounds, SLOTS, BLOCK)) ** rng.integers(1, 6, (rounds, 1, 1))
    alive = np.cumprod(step, axis=2, dtype=np.float32)
    alive[rng.random((rounds, SLOTS)) < 0.3] = 0  # slots that take no part
    plain, *ms = (float(each) for each in times)
    curve = Curve(SLOTS, (3, 6, 15), tuple(ms), plain)
    assert best_rows(alive, curve) == by_hand(alive, curve)


@given(seed=st.integers(0, 999))
@settings(max_examples=30)
def test_a_single_round_is_what_the_plan_says(seed):
    """The rule of the recorded vectors, which looks at every number of rows."""
    rng = np.random.default_rng(seed)
    alive = np.cumprod(rng.random((1, SLOTS, BLOCK)), axis=2, dtype=np.float32)
    rows = tuple(range(SLOTS, SLOTS * (BLOCK + 1) + 1))
    ms = tuple(np.sort(rng.uniform(5.0, 9.0, len(rows))).tolist())
    want = _plan(alive[0], alive[0], np.ones(SLOTS, bool), planning.make_cost(rows, ms))
    found = best_rows(alive, Curve(SLOTS, rows, ms, ms[0]))  # a pass without drafts is as dear
    assert (SLOTS if found is None else found) == int(want.rows)


_plan = jax.jit(planning.plan)


def logits(survivals: np.ndarray) -> np.ndarray:
    """Raw confidences that HEAT turns into these survivals."""
    before = np.concatenate([np.ones_like(survivals[..., :1]), survivals[..., :-1]], axis=-1)
    p = survivals / before
    return np.log(p / (1 - p)) * np.float32(HEAT)


def play(policy: Planner, *shown: np.ndarray, rounds: int = 16):
    """Moves of a policy whose looks show these survivals, the last for ever."""
    memory, queue = policy.start(SLOTS, BLOCK), list(shown)
    while True:
        move = policy.move(memory, SLOTS)
        yield move
        count = min(move.rounds or rounds, rounds)
        what, most = np.zeros((count, SLOTS, 0), np.float32), np.full((count, SLOTS), BLOCK)
        if move.size:
            what = np.repeat(logits(queue.pop(0) if len(queue) > 1 else queue[0])[:1], count, 0)
        memory = policy.learn(memory, move, what, most)


def test_the_planner_looks_first_and_then_decides():
    moves = play(Planner(TABLE, HEAT), seen(0.9, 0.8, 0.7, 0.6), seen(0.9, 0.3, 0.1, 0.05))
    look, first, second = (next(moves) for _ in range(3))
    assert (look.size, look.rows, look.rounds) == (BLOCK, SLOTS, LOOK_ROUNDS)
    assert (first.size, first.rows, first.rounds) == (BLOCK, 15, None)
    assert (second.size, second.rows) == (BLOCK, 6)


@pytest.mark.parametrize(
    ("ms", "rows"), [((12.0, 14.0, 24.0), 3), ((12.0, 12.5, 24.0), 6), ((12.0, 9.0, 12.1), 15)]
)
def test_a_look_takes_the_rows_that_are_free(ms, rows):
    """A larger size measured faster is noise."""
    assert look_rows(Curve(SLOTS, (3, 6, 15), ms, 10.0)) == rows


def test_a_useless_drafter_is_asked_ever_more_rarely():
    """And for a few rounds only."""
    moves = play(Planner(TABLE, HEAT), seen(0.2, 0.1, 0.05, 0.01))
    next(moves)
    waits, plain = [], 0
    while len(waits) < 7:
        move = next(moves)
        if move.size:
            assert (move.rows, move.rounds) == (SLOTS, LOOK_ROUNDS)
            waits.append(plain)
            plain = 0
        else:
            assert move.rows == SLOTS
            plain += 16
    assert waits == [FIRST_PATIENCE, 128, 256, 512, LAST_PATIENCE, LAST_PATIENCE, LAST_PATIENCE]


def test_a_short_look_does_not_decide_alone():
    """Rounds that end early, because a slot is waited for, are judged with those before."""
    policy = Planner(TABLE, HEAT)
    good, bad = logits(seen(0.9, 0.8, 0.7, 0.6)), logits(seen(0.2, 0.1, 0.05, 0.01))
    most = np.full((2, SLOTS), BLOCK)
    memory = policy.start(SLOTS, BLOCK)
    move = policy.move(memory, SLOTS)
    memory = policy.learn(memory, move, np.concatenate([good, good]), np.concatenate([most, most]))
    memory = policy.learn(memory, policy.move(memory, SLOTS), bad[:1], most[:1])
    assert memory.survivals.shape[0] == LOOK_ROUNDS
    assert policy.move(memory, SLOTS).size == BLOCK
    for _ in range(3):
        memory = policy.learn(memory, policy.move(memory, SLOTS), bad[:1], most[:1])
    assert policy.move(memory, SLOTS).size == 0


def test_drafts_that_nobody_needs_count_for_nothing():
    policy, good = Planner(TABLE, HEAT), logits(seen(0.9, 0.8, 0.7, 0.6))
    memory = policy.start(SLOTS, BLOCK)
    last = np.zeros((2, SLOTS), int)
    last[:, 0] = 1
    memory = policy.learn(memory, policy.move(memory, SLOTS), good, last)
    np.testing.assert_allclose(memory.survivals[:, 0], [[0.9, 0, 0, 0]] * 2, rtol=1e-5)
    assert not memory.survivals[:, 1:].any()


def test_fixed_and_threshold_ask_for_room_for_all():
    fixed = Fixed(3).move(Fixed(3).start(SLOTS, BLOCK), 2)
    assert (fixed.size, fixed.rows) == (3, 12)
    ramp = Threshold(TauRamp((1, 4), (0.2, 0.6)), HEAT)
    move = ramp.move(ramp.start(SLOTS, BLOCK), 2)
    assert (move.size, move.rows) == (BLOCK, 15)
    assert move.schedule.tau == pytest.approx(0.4)


CONFIDENCE = jnp.array([[2.0, -1.0, 3.0, 0.0], [4.0, 4.0, 0.5, -3.0], [9.0, 9.0, 9.0, 9.0]])


def lengths(schedule, room: int = 5, most=(4, 4, 0)) -> list[int]:
    return schedule.lengths(CONFIDENCE, jnp.array(most), jnp.int32(room)).tolist()


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
    # A slot with two tokens left wants one draft; its places go to the other.
    assert lengths(planning.Fill(heat), 4, (4, 1, 0))[0] == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(-1), "count must be an integer of at least 0, got -1"),
        (lambda: Fixed(True), "count must be an integer of at least 0, got True"),
        (lambda: Threshold(0.5, ()).start(SLOTS, 0), "this model has no drafter"),
        (lambda: Planner(TABLE, ()).start(SLOTS, 0), "this model has no drafter"),
        (lambda: Planner(TABLE, HEAT[:3]).start(SLOTS, 3), r"must be of 3 to 12 rows .* 15"),
        (lambda: Threshold(1.5, HEAT), r"tau must lie in \[0, 1\] or be a TauRamp, got 1.5"),
        (lambda: Fixed(5).start(SLOTS, BLOCK), "count must be at most 4 for this model"),
        (lambda: Planner(TABLE, HEAT[1:]).start(SLOTS, BLOCK), "must be 4 numbers .* got 3"),
        (lambda: Planner(TABLE, HEAT).start(5, BLOCK), "no step times for 5 slots, only for 3"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make()
