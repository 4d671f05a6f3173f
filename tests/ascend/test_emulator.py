"""Generated AscendC, emulated: numbers of the twins, rows by themselves, no barrier too few."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest

from ascend import kernels, ops, races
from ascend.emulator import Control
from kernels_bridge import building, catalogue
from kernels_bridge.calling import call
from kernels_bridge.machine import COMPILER, Found, named
from tests.ascend import emulated
from tests.ascend.emulated import BY_ROW, OPERANDS, SOURCES, TWINS, LaunchError, bits, launch

try:
    building.find_compiler()
except building.NoKernelsError as error:
    pytest.skip(str(error), allow_module_level=True)

NAMES = tuple(SOURCES)
SCHEDULES = range(6)


@pytest.fixture(autouse=True)
def kept(tmp_path_factory, monkeypatch):
    """Built once for this file, outside the user's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "emulated"))


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["norm_rope", "select_best"])
def test_bits_are_those_of_the_twin(name):
    """Sums in one order, exact roots and quotients, one rounding: there is nothing to differ."""
    assert bits(launch(SOURCES[name], OPERANDS[name])) == bits(TWINS[name](*OPERANDS[name]))


def test_mixes_have_the_bits_of_the_twin_where_exponentials_are_exact():
    """exp of 0 and of -inf: sums, quotients and their order are all that is left."""
    raw = np.zeros((emulated.ROWS, 15), np.float32)
    raw[:, 6:] = np.where(np.random.default_rng(5).random((emulated.ROWS, 9)) < 0.5, 0, -np.inf)
    raw[:, [6, 10, 14]] = 0
    operands = raw, np.ones(3, np.float32), np.zeros(15, np.float32)
    assert bits(launch(SOURCES["stream_mixes"], operands)) == bits(TWINS["stream_mixes"](*operands))


def assert_close(name, got, want):
    """Float32 of sums in other orders (1e-6) and of other exponentials (an ulp or two of 1.2e-7,
    which quotients carry along); where that falls to the other side of a half, bfloat16 is off by a
    step, which is up to 2^-7 of a value.
    """
    atol = 3e-6 if name == "attend_rows" else 0  # its sums have terms of either sign
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        rtol = 2**-7 if other.dtype == emulated.BF16 else 2e-6
        one, other = (np.asarray(each).astype(np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["stream_mixes", "attend_rows"])
def test_numbers_are_those_of_the_twin(name):
    assert_close(name, launch(SOURCES[name], OPERANDS[name]), TWINS[name](*OPERANDS[name]))


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_a_row_do_not_depend_on_its_place_or_neighbours(name):
    """Elsewhere a row meets another core, another turn of it and other company."""
    operands, first = OPERANDS[name], launch(SOURCES[name], OPERANDS[name])
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows = rng.integers(0, emulated.ROWS, emulated.ROWS)  # some twice, some not at all
        moved = [
            each[rows] if i in BY_ROW[name] else each for i, each in enumerate(operands)
        ]  # fmt: skip
        assert bits(launch(SOURCES[name], moved)) == bits(each[rows] for each in first)


@pytest.mark.exhaustive
def test_forms_of_the_model_give_the_numbers_of_the_twins():
    """Its sizes: 64 heads of 512, 640 keys in a list, 512 of 1500 columns."""
    forms, rng = {form.kernel.name: form for form in kernels.FLASH}, np.random.default_rng(7)
    angle, x = emulated.normal(rng, 3, 32), emulated.normal(rng, 3, 512)
    q, rows = emulated.normal(rng, 2, 64, 512), emulated.normal(rng, 700, 512)
    ids = rng.integers(-9, 710, (2, 640)).astype(np.int32)
    given = {
        "norm_rope": (x.astype(emulated.BF16), x[0], np.cos(angle), np.sin(angle)),
        "attend_rows": (
            q.astype(emulated.BF16), rows.astype(emulated.BF16), ids[:, :128], ids[:, 128:],
            emulated.normal(rng, 64),
        ),
        "stream_mixes": (
            emulated.normal(rng, 5, 24), emulated.normal(rng, 3), emulated.normal(rng, 24)
        ),
        "select_best": (emulated.normal(rng, 3, 1500), np.array([1500, 300, 700], np.int32)),
    }  # fmt: skip
    for op in catalogue.OPS:
        if op.name not in forms:
            continue
        names = {"eps", "scale", "streams", "iterations", "k"} & set(forms[op.name].static)
        static = {name: forms[op.name].static[name] for name in names}
        held = dataclasses.replace(op, impls=(*op.impls, *ops.IMPLS[op.name]))
        here = named("cpu", (Found(COMPILER),))
        ask = functools.partial(call, held, machine=here, asked="emulated", **static)
        got = jax.tree.leaves(jax.jit(ask)(*given[op.name]))
        want = jax.tree.leaves(jax.jit(functools.partial(op.twin, **static))(*given[op.name]))
        if op.name in ("norm_rope", "select_best"):
            assert bits(got) == bits(want)
        assert_close(op.name, got, want)


# -- barriers and events ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gives_the_same_bits(name):
    """Lanes and pipes overtake each other wherever nothing forbids it, over other poison."""
    first = bits(launch(SOURCES[name], OPERANDS[name]))
    for schedule in SCHEDULES:
        assert bits(launch(SOURCES[name], OPERANDS[name], Control(schedule))) == first


def noticed(name, *without):
    """Whether some schedule shows that these lines are missing."""
    first = bits(launch(SOURCES[name], OPERANDS[name]))
    for schedule in SCHEDULES:
        try:
            made = launch(SOURCES[name], OPERANDS[name], Control(schedule, without))
        except LaunchError:
            return True
        if bits(made) != first:
            return True
    return False


# What the compiler put there and nothing needs, by the line before it and by count.
SPARE_BARRIERS = {"select_best": ["  }"]}  # the first pass does not use what it guards
SPARE_EVENTS = {"norm_rope": 1}  # of the weight: its pipe keeps its order, a later copy is awaited


@pytest.mark.parametrize("name", ["norm_rope", "attend_rows", "select_best"])
def test_no_barrier_can_be_left_out(name):
    lines, text = SOURCES[name].sync_lines("syncthreads"), SOURCES[name].text.splitlines()
    assert lines
    spare = [text[line - 2] for line in lines if not noticed(name, line)]
    assert spare == SPARE_BARRIERS.get(name, [])


@pytest.mark.parametrize("name", ["norm_rope", "attend_rows"])
def test_no_event_can_be_left_out_on_either_side_or_both(name):
    source = SOURCES[name]
    sets, waits = source.sync_lines("sync_notify"), source.sync_lines("sync_wait")
    assert sets
    assert all(noticed(name, line) for line in (*sets, *waits))
    text = source.text.splitlines()

    def event(line):
        return re.search(r"\((PIPE.*)\)", text[line - 1])[1]

    pairs = [pair for pair in itertools.product(sets, waits) if len(set(map(event, pair))) == 1]
    assert len([pair for pair in pairs if not noticed(name, *pair)]) == SPARE_EVENTS.get(name, 0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            emulated.PARTED,
            r"lanes part at a barrier: lane 0 waits at line \d+, lane \d+ waits at",
        ),
        (emulated.OUTSIDE, "a copy writes outside of the results"),
        (emulated.MISPLACED, "a copy starts inside of 32 bytes of the buffer"),
    ],
)
def test_faults_of_a_source_are_told(source, said):
    name = source.form.kernel.name
    with pytest.raises(LaunchError, match=f"{source.form.name}: {said}"):
        launch(source, OPERANDS[name])


def test_the_words_of_a_fault_name_the_line():
    source = SOURCES["norm_rope"]
    wait = source.sync_lines("sync_wait")[-1]
    with pytest.raises(LaunchError, match=r"set at line \d+ is never awaited"):
        launch(source, OPERANDS["norm_rope"], Control(0, (wait,)))
    notify = source.sync_lines("sync_notify")[0]
    with pytest.raises(LaunchError, match="waits for an event that is never set"):
        launch(source, OPERANDS["norm_rope"], Control(0, (notify,)))


def test_operands_that_are_not_those_of_the_form_are_refused():
    x, weight, cos, sin = OPERANDS["norm_rope"]
    with pytest.raises(ValueError, match=r"norm_rope-small: WEIGHT must be \[N\], with N=96"):
        launch(SOURCES["norm_rope"], (x, weight[:64], cos, sin))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["norm_rope", "attend_rows", "select_best"])
def test_a_race_between_lanes_is_found_without_looking_at_results(name, tmp_path):
    """ThreadSanitizer with a thread for every lane: nothing as it is, something without a barrier.

    Without the first barrier of the selection a lane reads a number while another writes it, which
    no result shows.
    """
    few = [each[:3] if i in BY_ROW[name] else each for i, each in enumerate(OPERANDS[name])]
    command = races.program(SOURCES[name], few, tmp_path)
    assert races.found(command) == []
    lines = SOURCES[name].sync_lines("syncthreads")
    assert [line for line in lines if not races.found(command, line)] == []
