"""Any schedule at all: hypothesis draws calls and shrinks to the shortest one that fails."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.determinism import Move, Table, Turn, equality, feeding, serving
from tests.invariance import setups

SEQUENCES = setups.COUNT
SPARE = serving.SLOTS - 1  # where sequences go that lose their slot; several may pass through


def moves(seat: int) -> st.SearchStrategy[Move]:
    """One token, a chunk, or a verification of 2 to 6 rows of which some are right and kept."""
    single = st.just(Move(seat, 1))
    chunk = st.builds(Move, st.just(seat), st.integers(1, 20))
    verification = st.integers(2, 6).flatmap(
        lambda rows: st.integers(1, rows).flatmap(
            lambda good: st.builds(
                Move, st.just(seat), st.just(rows), st.just(good), st.integers(1, good)
            )
        )
    )
    return single | chunk | verification


@st.composite
def turns(draw) -> Turn:
    seats = draw(st.lists(st.integers(0, SEQUENCES - 1), min_size=1, unique=True))
    size = draw(st.sampled_from([None, serving.MANY]))
    gaps = tuple(draw(st.integers(0, 2)) for _ in seats)
    return Turn(tuple(draw(moves(seat)) for seat in seats), gaps, size)


def table(setup, slots) -> Table:
    """Sequences in these slots, in the programs of the checks."""
    capacity = 2 * setup.capacity
    cache = feeding.garbage(setup.model, serving.SLOTS, capacity)
    programs = {serving.FEW: serving.donated, serving.MANY: feeding.step}
    return Table(setup, range(SEQUENCES), slots, cache, programs)


def differences(pairs):
    return [(p.where, names) for p in pairs if (names := equality.different(p.got, p.want))]


SLOTS = st.permutations(range(SEQUENCES + 2)).map(lambda order: order[:SEQUENCES])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", setups.TWINS)
@given(schedule=st.lists(turns(), min_size=1, max_size=12), slots=SLOTS)
@settings(max_examples=20)
def test_any_schedule_gives_the_bits_of_one_token_at_a_time(dtype, schedule, slots):
    playing = table(setups.illustrated(dtype), slots)
    assert not differences(playing.play(schedule))
    assert not differences(playing.finish(19))


@pytest.mark.parametrize("dtype", setups.TWINS)
@given(
    schedule=st.lists(turns(), min_size=1, max_size=6),
    rest=st.lists(turns(), min_size=1, max_size=6),
    victim=st.integers(0, SEQUENCES - 1),
    chunk=st.integers(1, 20),
)
@settings(max_examples=12)
def test_preemption_at_any_step(dtype, schedule, rest, victim, chunk):
    """One sequence loses its slot and cache, starts again in another slot, and all go on."""
    playing = table(setups.illustrated(dtype), range(SEQUENCES))
    assert not differences(playing.play(schedule))
    evicted = Turn((Move(victim, chunk, to=SPARE),))
    assert not differences(playing.play([evicted, *rest]))
    assert not differences(playing.finish(chunk))
