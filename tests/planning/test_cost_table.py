"""Step times on disk."""

import dataclasses
import json
import math

import pytest

from deepinfer_jax import planning
from deepinfer_jax.planning import CostTable, Curve

TABLE = CostTable(
    model="3f2a",
    hardware="8 x accelerator, 80 GB",
    numerics="0123456789ab",
    jax="0.10.2",
    jaxlib="0.10.2",
    curves=(Curve(3, (3, 7, 18), (1.1, 1.3, 2.9), 0.2), Curve(5, (5, 30), (1.2, 0.1 + 0.2), 1)),
)
MINE = {name: getattr(TABLE, name) for name in ("model", "hardware", "numerics")}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "costs.json"


def test_a_table_returns_as_it_was(path):
    path.write_text("an older one")
    planning.save_table(path, TABLE)
    assert planning.load_table(path, **MINE) == TABLE
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_written_leaves_the_file_alone(path):
    planning.save_table(path, TABLE)
    broken = dataclasses.replace(TABLE)
    object.__setattr__(broken, "model", object())
    with pytest.raises(TypeError):
        planning.save_table(path, broken)
    assert planning.load_table(path, **MINE) == TABLE
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_curve_is_found_by_its_slots():
    assert planning.curve_for(TABLE, 5) == TABLE.curves[1]
    with pytest.raises(planning.MissingCostTable, match=r"4 slots, only for 3, 5; .* --slots 4`"):
        planning.curve_for(TABLE, 4)


def test_no_file_is_refused_as_a_missing_file(path):
    with pytest.raises(
        planning.MissingCostTable, match=r"costs\.json; run `deepinfer-jax profile`"
    ):
        planning.load_table(path, **MINE)
    assert issubclass(planning.MissingCostTable, FileNotFoundError)


@pytest.mark.parametrize("name", list(MINE))
def test_times_of_something_else_are_refused_by_name(path, name):
    planning.save_table(path, TABLE)
    with pytest.raises(planning.ForeignCostTable) as caught:
        planning.load_table(path, **{**MINE, name: "another"})
    message = str(caught.value)
    assert f"{name} {MINE[name]!r} instead of 'another'" in message
    assert "run `deepinfer-jax profile`" in message
    assert all(other not in message for other in set(MINE) - {name})


def change(*keys, to=None):
    """Sets one value of the file's JSON, or removes it."""

    def edit(value):
        for key in keys[:-1]:
            value = value[key]
        if to is None:
            del value[keys[-1]]
        else:
            value[keys[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("format", to=2), "format 2, expected 1"),
        (change("numerics"), "the file lacks numerics"),
        (change("jax"), "the file lacks jax"),
        (change("model", to=7), "model must be str, got 7"),
        (change("curves", to={}), "curves must be list"),
        (change("curves", to=[]), "curves must be of ascending numbers of slots"),
        (change("curves", 0, to=3), r"curves\[0\] must be dict, got 3"),
        (change("curves", 1, "plain_ms"), r"curves\[1\] lacks plain_ms"),
        (
            change("curves", 1, "plain_ms", to=-1.0),
            "plain_ms must be positive and finite, got -1.0",
        ),
        (change("curves", 1, "plain_ms", to="1"), "plain_ms must be"),
        (change("curves", 1, "slots", to=3), r"ascending numbers of slots, got \[3, 3\]"),
        (change("curves", 0, "slots", to=0), "slots must be at least 1, got 0"),
        (change("curves", 0, "slots", to=True), "slots must be int, got True"),
        (change("curves", 0, "rows", to=3), "rows must be list"),
        (change("curves", 0, "rows", to=[7, 3, 18]), "rows must be ascending"),
        (change("curves", 0, "ms", to=[1.0, 2.0]), "rows and ms must be lists of one length"),
        (change("curves", 0, "ms", to=[1.0, [], 2.0]), "is no cost table"),
        (change("curves", 0, "ms", 1, to=-3.0), "ms must be positive and finite.*got -3.0 for 7"),
        (change("curves", 0, "ms", 1, to=math.nan), "ms must be positive and finite.*got nan"),
    ],
)
def test_a_broken_table_is_refused_by_name(path, edit, message):
    planning.save_table(path, TABLE)
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    with pytest.raises(planning.BrokenCostTable, match=message) as caught:
        planning.load_table(path, **MINE)
    assert str(path) in str(caught.value)
    assert "run `deepinfer-jax profile`" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe"])
def test_what_is_no_json_object_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(planning.BrokenCostTable, match="is no cost table"):
        planning.load_table(path, **MINE)
