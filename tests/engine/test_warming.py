"""Programs compiled ahead: all that a run needs, found by its calls, and told of otherwise."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import planning
from deepinfer_jax.engine import Engine, RecompileWarning, Sizes, warming
from deepinfer_jax.engine.sizes import prefill_rows
from deepinfer_jax.engine.warming import Planned, compiled, needs
from deepinfer_jax.engine.watch import Watch, compilations, signature
from deepinfer_jax.requests import Options, Request
from tests import tiny_model
from tests.engine import test_engine

SIZES = test_engine.SIZES


def asking(length: int, new: int = 5, head: int = 0, **options) -> Request:
    tokens = tuple((head + i) % 99 for i in range(length))
    return Request("r", tokens, tokens, 0, Options(max_tokens=new, **options))


# -- what is needed --------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=9),
    slots=st.integers(1, 4),
    pages=st.integers(1, 9),
)
def test_every_size_of_a_call_with_prompts_is_foreseen(lengths, slots, pages):
    """Rows of any step: of as many prompts as there are slots, and of replies where pages lack."""
    sizes = Sizes(
        slots=slots, capacity=240, pages=pages * slots, page_tokens=30, prefill=(8, 64, 256)
    )
    found = needs([asking(n, 7) for n in lengths], sizes).prompt_rows
    again = 7 if pages < sizes.table else 0
    most = min(sum(sorted(n + again for n in lengths)[-slots:]), sizes.step_rows)
    assert {*found} == {prefill_rows(waiting, sizes) for waiting in range(1, most + 1)}


def test_what_no_request_needs_is_not_compiled():
    rule = {"grammar": {"kind": "regex", "schema": "a+"}}
    apart, alike = [asking(20, head=1), asking(20, head=2)], [asking(20), asking(21)]
    assert not needs(apart, SIZES).shared
    assert needs(alike, SIZES).shared
    assert not needs(alike, dataclasses.replace(SIZES, snapshots=0)).shared
    assert not needs([asking(16), asking(16)], SIZES).shared  # no whole page before the last token
    kinds = [
        ([asking(3, 1)], (False, False, False)),
        ([asking(3, 2)], (True, False, False)),
        ([asking(3, 2, **rule)], (False, True, True)),
        ([asking(3, 1, **rule)], (False, False, True)),
        ([asking(3, 2, **rule), asking(3, 2)], (True, True, True)),
    ]
    for asked, want in kinds:
        found = needs(asked, SIZES)
        assert (found.free, found.ruled, found.masked) == want


@pytest.mark.parametrize(
    ("policy", "ruled", "labels"),
    [
        (planning.OFF, False, ["decode 3 slots"]),
        (planning.Fixed(2), False, ["decode 3 slots, 2 drafts"]),
        (planning.OFF, True, ["decode 3 slots", "decode 3 under grammars"]),
        (
            planning.Fixed(2),
            True,
            ["decode 3 slots, 2 drafts", "2 drafts under grammars", "verify 2 drafts under"],
        ),
    ],
)
def test_the_list_of_programs(policy, ruled, labels):
    """Prompts, rounds by the policy's moves, snapshots, seats; nothing is compiled by listing."""
    running = Engine(tiny_model.model(), SIZES, policy=policy)
    wanted = warming.Needs((32, 256), True, True, ruled, ruled)
    moves = policy.moves(policy.start(3, 5))
    every = warming.planned(tiny_model.model(), SIZES, wanted, moves, running._device.state())
    found = [each.label for each in every]
    prompts = [
        f"prompts, {n} rows{m}" for n in (32, 256) for m in ("", " under grammars")[: 1 + ruled]
    ]
    want = [*prompts, *labels, "snapshots", "beginnings", "edits", "seats"]
    assert [a[: len(b)] for a, b in zip(found, want, strict=True)] == want


def test_the_planner_names_every_size_that_it_can_take():
    rows = (3, 6, 18)
    table = planning.CostTable(
        "m", "h", "n", "0", "0", (planning.Curve(3, rows, (1.0, 2.0, 3.0), 1.0),)
    )
    policy = planning.Planner(table, (1.0,) * 5)
    memory = policy.start(3, 5)
    found = {(move.size, move.rows) for move in policy.moves(memory)}
    assert found == {(0, 3), (5, 3), (5, 6), (5, 18)}
    for seen in (None, *rows):
        for plain in (0, 10_000):
            given = dataclasses.replace(
                memory, rows=seen, plain=plain, survivals=np.zeros((1, 3, 5))
            )
            move = policy.move(given, 3)
            assert (move.size, move.rows) in found


# -- compiling -------------------------------------------------------------------------------------


@jax.jit
def doubled(x, y=None):
    return 2 * x if y is None else x + y


def test_a_call_finds_what_was_compiled_ahead():
    """What the engine relies on, with the shapes of a call and none of its values."""
    told = []
    given = jnp.zeros((3, 5)), jnp.zeros((3, 7))
    every = [Planned(f"{x.shape}", doubled, (x,)) for x in given]
    known, seconds, count = compiled(every, told.append)
    assert count == 2
    assert seconds > 0
    assert {told_of.total for told_of in told} <= {2}  # none where all was done by then
    assert {told_of.label for told_of in told} <= {"(3, 5)", "(3, 7)"}
    assert known["doubled"] == [{"x": "float32[3, 5]"}, {"x": "float32[3, 7]"}]
    with compilations() as found:
        made = doubled(np.ones((3, 5), np.float32))
        assert compiled(every)[2] == 0
        assert found.count == 0
        doubled(np.zeros((3, 11), np.float32))
        assert found.count == 1
    assert np.asarray(made).tolist() == [[2.0] * 5] * 3


def test_what_cannot_be_compiled_is_raised():
    with pytest.raises(TypeError, match="abstract array"):
        compiled([Planned("wrong", doubled, (np.array("text"),))])


def test_a_compilation_in_the_middle_is_warned_of_with_its_reason():
    watch = Watch()
    watch.ask(doubled, jnp.zeros((2, 5)))  # nothing was foreseen: nothing is said
    known, *rest = compiled([Planned("a", doubled, (jnp.zeros((4, 5)),))])
    watch.warmed(known, *rest)
    watch.ask(doubled, jnp.zeros((4, 5)))
    with pytest.warns(
        RecompileWarning, match=r"doubled .* x is float32\[4, 9\], not float32\[4, 5"
    ):
        watch.ask(doubled, jnp.zeros((4, 9)))
    with pytest.warns(RecompileWarning, match=r"y is float32\[4, 5\], not missing"):
        watch.ask(doubled, jnp.zeros((4, 5)), jnp.zeros((4, 5)))
    assert watch.recompiled == 2
    assert watch.compiled == 4
    assert watch.compile_s > 0


def test_a_signature_tells_arrays_bound_to_a_device_apart():
    x = jnp.zeros(3)
    free, bound = (
        signature(doubled, (x,), {}),
        signature(doubled, (jax.device_put(x, jax.devices()[0]),), {}),
    )
    assert free == {"x": "float32[3]"}
    assert bound["x"].startswith("float32[3] on ")


def test_a_program_of_which_nothing_was_foreseen_is_said():
    watch = Watch()
    watch.warmed({}, 0.0, 0)
    with pytest.warns(RecompileWarning, match="nothing like it was foreseen"):
        watch.ask(doubled, np.zeros((13, 2), np.float32))
