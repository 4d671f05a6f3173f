"""Rounds: packing, and replies that no use of the drafter changes."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepinfer_jax as di
from deepinfer_jax import engine, planning, rounds
from deepinfer_jax.planning.policies import Memory, Move, Policy
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import Options
from tests import tiny_model

SLOTS, SIZE, ROWS = 5, 3, 11  # slots as in test_generation, whose programs serve here too

# -- packing ---------------------------------------------------------------------------------------


@given(
    scheduled=st.lists(st.integers(-1, 5), min_size=4, max_size=4),
    active=st.lists(st.booleans(), min_size=4, max_size=4),
    rows=st.integers(4, 16),
)
def test_lengths_fit_the_call(scheduled, active, rows):
    """Every active slot keeps its row; drafts are cut from the last slots, where there is need."""
    most = jnp.where(jnp.array(active), 3, -1)
    cut = rounds.fitting(jnp.array(scheduled), most, rows).tolist()
    wanted = [min(max(s, 0), 3) if a else 0 for s, a in zip(scheduled, active, strict=True)]
    room = rows - sum(active)
    for got, want in zip(cut, wanted, strict=True):
        assert got == min(want, room)
        room -= got


# -- replies ---------------------------------------------------------------------------------------


@functools.cache
def prompts() -> list[dict]:
    """Nine prompts. The random model's drafts are right where noise decides: at a high temperature,
    or where little is left to draw from.
    """
    rng = np.random.default_rng(5)
    kinds = [{"temperature": 30.0}, {"temperature": 0}, {"temperature": 0.7, "top_k": 2}]
    return [
        {
            "tokens": rng.integers(3, 2048, 4 + 3 * n).tolist(),
            "id": str(n),
            "max_tokens": 3 + 5 * n % 17,
            **kinds[n % 3],
        }
        for n in range(9)
    ]


def replies(policy, batch_size: int = SLOTS, **more) -> list[di.Result]:
    return di.generate(
        tiny_model.model(), prompts(), seed=8, batch_size=batch_size, speculative=policy, **more
    )


@functools.cache
def plain() -> list[di.Result]:
    return replies(planning.OFF)


@dataclasses.dataclass(frozen=True)
class Drawn(Policy):
    """A policy that repeats given moves: lengths of each slot, or None for no drafts."""

    moves: tuple[tuple[int, ...] | None, ...]

    def move(self, memory: Memory, running: int) -> Move:
        lengths = self.moves[memory.plain % len(self.moves)]
        if lengths is None:
            return Move(0, SLOTS, planning.Lengths(np.int32(0)), rounds=2)
        return Move(SIZE, ROWS, planning.Lengths(np.array(lengths, np.int32)), rounds=2)

    def learn(self, memory: Memory, move: Move, confidence: np.ndarray, most: np.ndarray) -> Memory:
        assert confidence.shape == (len(most), SLOTS, move.size)
        assert most.shape[0] <= 2
        assert (most <= move.size).all()
        return dataclasses.replace(memory, plain=memory.plain + 1)


MOVES = st.lists(
    st.one_of(st.none(), st.tuples(*[st.integers(0, SIZE)] * SLOTS)), min_size=1, max_size=5
).map(tuple)


@pytest.mark.slow
@given(moves=MOVES, order=st.permutations(range(9)))
@settings(max_examples=5)
def test_no_use_of_the_drafter_changes_a_bit(moves, order):
    """Any lengths cut to eleven rows, with pauses, in any order of requests: tokens and numbers."""
    model = tiny_model.model()
    asked = make_requests(
        [prompts()[n] for n in order], Options(seed=8), model.tokenizer, model.cfg,
        model.max_length,
    )  # fmt: skip
    made = engine.run(model, asked, batch_size=SLOTS, policy=Drawn(moves))
    found = {update.index: update.result for update in made if update.result}
    assert [found[place] for place in range(9)] == [plain()[n] for n in order]


def test_drafts_are_accepted_and_counted():
    """The property above would hold of a drafter that is always wrong, too."""
    made = replies(Drawn(((SIZE,) * SLOTS,)))
    assert made == plain()
    spent = [result.timing for result in made]
    assert sum(timing.accepted for timing in spent) > 10
    for result in made:
        check_counts(result)


def check_counts(result: di.Result):
    """Of the passes and drafts that made this reply, no other: a token more or less is seen."""
    timing = result.timing
    assert timing.accepted <= timing.verified
    # A reply may end with a draft; else every pass adds the model's own token to its drafts.
    assert 0 <= 1 + timing.rounds + timing.accepted - len(result.tokens) <= 1


def test_a_stop_string_leaves_nothing_uncounted():
    """Rounds that ran on behind a stop string, in the same look of the host, are in no count."""
    asked = [{**prompt, "stop": [plain()[n].pieces[1]]} for n, prompt in enumerate(prompts())
             if plain()[n].pieces[1]]  # fmt: skip
    policy = Drawn(((SIZE,) * SLOTS,))
    made = di.generate(tiny_model.model(), asked, seed=8, batch_size=SLOTS, speculative=policy)
    assert {result.finish_reason for result in made} >= {"stop"}
    for result in made:
        check_counts(result)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["planner", "threshold"])
def test_the_policies_of_users_change_no_bit_either(kind):
    """The same property with the device's own ways to choose lengths."""
    heat = tiny_model.model().confidence_temperatures
    curve = planning.Curve(SLOTS, (SLOTS, 2 * SLOTS), (1.0, 1.2), 0.9)
    table = planning.CostTable("m", "d", "n", "0", "0", (curve,))
    policies = {
        "planner": planning.Planner(table, heat), "threshold": planning.Threshold(0.3, heat),
    }  # fmt: skip
    made = replies(policies[kind])
    assert made == plain()
    assert sum(result.timing.verified for result in made)


# -- one round -------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused():
    model = tiny_model.model()
    cache = di.init_cache(model.cfg, model.numerics, SLOTS, 64)
    zeros = jnp.zeros((SLOTS,), jnp.int32)
    running = di.Running(zeros, zeros > 0, zeros, zeros[:, None])
    sampling = di.make_sampling(SLOTS, seeds=range(SLOTS))
    for more, message in (
        ({"mode": "both"}, "mode must be one of coupled, rejection, got 'both'"),
        ({"rows": 2}, r"rows .* must lie in 5\.\.20 for 5 slots and 3 drafts, got 2"),
        ({"rows": 21}, r"rows .* must lie in 5\.\.20 for 5 slots and 3 drafts, got 21"),
    ):
        with pytest.raises(ValueError, match=message):
            rounds.speculate(
                model.params, model.tables, running, cache, sampling,
                planning.Lengths(np.int32(1)), model.cfg, model.numerics, size=SIZE, **more,
            )  # fmt: skip
