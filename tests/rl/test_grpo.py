"""The training example: what a run leaves behind, and that it continues with the same bits.

The model's part is put in place of by a small function of (state, step) by default; `exhaustive`
runs the real one.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.rl.examples import grpo, policy, saved
from deepinfer_jax.rl.examples.policy import Settings, State, Step

SETTINGS = Settings(steps=6, groups=1, members=4, rows="tiled")


def task(settings: Settings = SETTINGS) -> policy.Task:
    return policy.Task(model=None, sampler=None, settings=settings)


@pytest.fixture
def small(monkeypatch):
    """A model of three numbers; its "reward" grows with the step."""

    def step(task, state, number):
        slope = jnp.sin(state.params["w"] * (number + 1))
        moments = state.moments * 0.5 + slope
        record = Step(number, number / 8, 0.5, 0.75, 3, 0.0, 0.0, 0.0, 0.01, 0.02)
        return State({"w": state.params["w"] - moments}, moments), record

    start = State({"w": jnp.arange(3.0)}, jnp.zeros(3))
    monkeypatch.setattr(grpo, "start", lambda task: start)
    monkeypatch.setattr(grpo, "train_step", step)
    monkeypatch.setattr(grpo, "evaluate", lambda task, params: {"sorting": 0.25})


def test_an_interrupted_run_ends_as_a_whole_one(small, tmp_path, capsys):
    whole = grpo.run(task(), tmp_path / "whole", every=2)
    part = grpo.run(task(), tmp_path / "part", every=2, until=4)
    assert (part["steps"], saved.steps(tmp_path / "part" / "checkpoints")) == (4, [2, 4])
    log = tmp_path / "part" / "log.jsonl"
    last = log.read_text("utf-8").splitlines()[-1]
    log.write_text(log.read_text("utf-8") + last + "\n", "utf-8")  # after a checkpoint: made again
    rest = grpo.run(task(), tmp_path / "part", every=2)
    assert rest["digest"] == whole["digest"] != part["digest"]
    assert {**rest, "seconds": 0} == {**whole, "seconds": 0}
    logs = [(tmp_path / name / "log.jsonl").read_text("utf-8") for name in ("whole", "part")]
    assert logs[0] == logs[1]
    assert len(capsys.readouterr().out.splitlines()) == 12


def test_a_run_that_was_killed_while_it_wrote_goes_on(small, tmp_path):
    """Half a line of the log is no step; nothing else is written in place."""
    whole = grpo.run(task(), tmp_path / "whole", every=2)
    grpo.run(task(), tmp_path / "part", every=2, until=4)
    with open(tmp_path / "part" / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"step": 4, "rew')
    assert len(grpo.read_log(tmp_path / "part" / "log.jsonl")) == 4
    assert grpo.run(task(), tmp_path / "part", every=2)["digest"] == whole["digest"]
    assert len(grpo.read_log(tmp_path / "part" / "log.jsonl")) == 6


def test_a_run_that_has_ended_is_not_made_again(small, tmp_path, monkeypatch):
    found = grpo.run(task(), tmp_path, every=2)
    monkeypatch.delattr(grpo, "train_step")
    monkeypatch.delattr(grpo, "evaluate")
    assert grpo.run(task(), tmp_path, every=2) == found


def test_what_is_no_step_of_the_run_is_refused(small, tmp_path):
    with pytest.raises(ValueError, match=r"every .* at least 1, got 0"):
        grpo.run(task(), tmp_path, every=0)
    for until in (0, 7):
        with pytest.raises(ValueError, match=rf"until .* lie in 1..6, .* got {until}"):
            grpo.run(task(), tmp_path, until=until)
    assert not list(tmp_path.iterdir())
    grpo.run(task(), tmp_path, every=2, until=4)
    (tmp_path / "log.jsonl").unlink()
    with pytest.raises(ValueError, match="has 0 steps, the last checkpoint is after 4"):
        grpo.run(task(), tmp_path)


def test_a_run_says_what_it_was(small, tmp_path):
    found = grpo.run(task(), tmp_path / "one")
    assert json.loads((tmp_path / "one" / "summary.json").read_text("utf-8")) == found
    assert found["settings"] == dataclasses.asdict(SETTINGS)
    assert (found["reward_first"], found["reward_last"]) == (0.125, 0.5)  # of three steps each
    assert (found["tokens"], found["largest_raw_difference"]) == (18, 0.0)
    assert found["held_out_before"] == found["held_out_after"] == {"sorting": 0.25}


def test_a_folder_of_other_settings_is_refused(small, tmp_path):
    grpo.run(task(), tmp_path, until=1)
    other = dataclasses.replace(SETTINGS, rate=0.5)
    with pytest.raises(ValueError, match=r"holds a run of other settings \(rate=0.00015\)"):
        grpo.run(task(other), tmp_path)


def test_a_digest_names_every_bit():
    one = State({"w": jnp.zeros(2)}, jnp.ones(1))
    assert grpo.digest(one) == grpo.digest(State({"w": jnp.zeros(2)}, jnp.ones(1)))
    moved = State({"w": jnp.array([0.0, -0.0])}, jnp.ones(1))
    assert grpo.digest(moved) != grpo.digest(one)


CHANGES = ({"steps": 0}, {"members": 1}, {"rate": 0.0}, {"groups": 0}, {"temperature": 0.0})


@pytest.mark.parametrize("changes", CHANGES)
def test_settings_without_sense_are_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        Settings(**changes)


@pytest.mark.exhaustive
def test_two_runs_of_the_model_are_equal_and_the_sides_agree(tmp_path):
    """Two steps, one of them resumed; training saw exactly what was sampled."""
    made = policy.make_task(dataclasses.replace(SETTINGS, steps=2, groups=2))
    with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with integers
        whole = grpo.run(made, tmp_path / "whole")
        grpo.run(made, tmp_path / "part", until=1)
        rest = grpo.run(made, tmp_path / "part")
    assert rest["digest"] == whole["digest"]
    assert whole["largest_raw_difference"] == whole["largest_processed_difference"] == 0
    assert whole["largest_kl"] == 0
    assert np.isfinite(whole["reward_last"])
