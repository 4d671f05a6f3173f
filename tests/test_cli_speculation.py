"""`--speculative` and `profile`: what they take, refuse and keep."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from deepinfer_jax import cli, planning, profiling
from deepinfer_jax.cli import compiled, speculation
from deepinfer_jax.cli.refusal import Refused
from tests import tiny_model

FOLDER = ("--model", str(tiny_model.folder()))


def table(*slots: int, hardware: str | None = None) -> planning.CostTable:
    """Invented times of the tiny model on this machine."""
    model = tiny_model.model()
    block = model.cfg.most_drafts
    curves = (
        planning.Curve(n, profiling.row_sizes(n, block), tuple(
            1.0 + k for k in range(len(profiling.row_sizes(n, block)))
        ), 0.5 + n)
        for n in sorted(slots)
    )  # fmt: skip
    return planning.CostTable(
        profiling.model_fingerprint(model), hardware or profiling.hardware(),
        model.numerics.fingerprint(), "0", "0", tuple(curves),
    )  # fmt: skip


def generate(*args: str) -> int:
    return cli.main(["generate", *FOLDER, "--max-tokens", "4", *args])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("often", "--speculative must be off, a number of drafts, threshold:P"),
        ("off:1", "got 'off:1'"),
        ("-1", "got '-1'"),
        ("threshold", "got 'threshold'"),
        ("threshold:2", "got 'threshold:2'"),
        ("threshold:nan", "got 'threshold:nan'"),
        ("9", "--speculative 9: count must be at most 5 for this model"),
        ("planner:nowhere.json", "no cost table at nowhere.json; run `deepinfer-jax profile`"),
    ],
)
def test_what_cannot_be_is_refused(capsys, monkeypatch, tmp_path, how, message):
    monkeypatch.chdir(tmp_path)
    assert generate("a", f"--speculative={how}") == 2
    assert message in capsys.readouterr().err


def test_a_table_of_something_else_is_refused(capsys, tmp_path):
    path = tmp_path / "times.json"
    planning.save_table(path, table(1, hardware="an abacus"))
    assert generate("a", f"--speculative=planner:{path}") == 2
    assert "hardware 'an abacus' instead of" in capsys.readouterr().err
    planning.save_table(path, table(2, 8))
    assert generate("a", f"--speculative=planner:{path}") == 2
    said = capsys.readouterr().err
    assert "no step times for 1 slots, only for 2, 8" in said
    assert "profile --slots 1`" in said


def test_the_forms_name_their_policies(tmp_path, monkeypatch):
    model, heat = tiny_model.model(), tiny_model.model().confidence_temperatures
    assert speculation.policy_of("off", model, 3) == planning.OFF
    assert speculation.policy_of("2", model, 3) == planning.Fixed(2)
    assert speculation.policy_of("threshold:0.25", model, 3) == planning.Threshold(0.25, heat)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = speculation.table_file(model)
    assert tmp_path in path.parents
    with monkeypatch.context() as nowhere:
        nowhere.delenv("XDG_CACHE_HOME")
        nowhere.setattr(compiled.Path, "home", homeless)
        with pytest.raises(Refused, match="set XDG_CACHE_HOME"):
            speculation.policy_of("planner", model, 3)
    path.parent.mkdir(parents=True)
    planning.save_table(path, table(3))
    assert speculation.policy_of("planner", model, 3) == planning.Planner(table(3), heat)
    with pytest.raises(Refused, match="no step times for 4 slots"):
        speculation.policy_of("planner", model, 4)


def homeless():
    raise RuntimeError("Could not determine home directory.")


def measured(monkeypatch, *results: planning.CostTable) -> list:
    queue, asked = list(results), []
    monkeypatch.setattr(
        profiling, "measure", lambda model, slots, note: asked.append(slots) or queue.pop(0)
    )
    return asked


def test_profile_adds_to_what_is_known(capsys, monkeypatch, tmp_path):
    path = tmp_path / "new" / "times.json"
    asked = measured(monkeypatch, table(1, 8), table(4))
    for slots in (["1", "8"], ["4"]):
        assert cli.main(["profile", *FOLDER, "--slots", *slots, "--out", str(path)]) == 0
        assert capsys.readouterr().out == f"{path}\n"
    assert asked == [[1, 8], [4]]
    assert planning.read_table(path) == table(1, 4, 8)


def test_profile_refuses_before_it_measures(capsys, monkeypatch, tmp_path):
    asked = measured(monkeypatch)
    (tmp_path / "file").write_text("x")
    for out, message in (("file/times.json", "File exists"), ("file", "is no cost table")):
        assert cli.main(["profile", *FOLDER, "--out", str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err
    foreign = tmp_path / "foreign.json"
    planning.save_table(foreign, dataclasses.replace(table(1), numerics="other"))
    assert cli.main(["profile", *FOLDER, "--out", str(foreign)]) == 2
    assert "numerics 'other'" in capsys.readouterr().err
    assert not asked


@pytest.mark.exhaustive
def test_profile_measures(capsys, tmp_path):
    path = tmp_path / "times.json"
    assert cli.main(["profile", *FOLDER, "--slots", "2", "--out", str(path)]) == 0
    (curve,) = planning.read_table(path).curves
    assert curve.rows == (2, 4, 6, 8, 12)
    assert np.all(np.array([curve.plain_ms, *curve.ms]) > 0)
    assert "2 slots:" in capsys.readouterr().err
    assert json.loads(path.read_text())["model"] == profiling.model_fingerprint(tiny_model.model())


def test_sizes_worth_a_program():
    assert profiling.row_sizes(1, 5) == (1, 2, 3, 4, 5, 6)
    assert profiling.row_sizes(8, 5) == (8, 16, 24, 32, 48)
    assert profiling.row_sizes(3, 2) == (3, 6, 9)
    assert profiling.row_sizes(1, 1) == (1, 2)
