"""GRPO on verifiable questions, with the sampler's and the trainer's log-probs held side by side.

    python -m deepinfer_jax.rl.examples.grpo --out runs/one
    python -m deepinfer_jax.rl.examples.grpo --out runs/plain --sampler-rows batched

Each step asks questions, samples a group of replies to each, gives each reply the advantage of its
reward over its group, and takes one step of Adam along the gradient of advantage times ratio. The
ratio is of the trainer's probability to the sampler's: exactly 1 where both run one `Numerics`, and
something else where the sampler runs plain XLA operations, as an engine beside a trainer does.

A run is a function of its settings: questions, noise and updates have names, and nothing is drawn
from a stream. `OUT/log.jsonl` has a line for each step, `OUT/summary.json` the whole in numbers; an
interrupted run goes on from its last checkpoint with the bits of a whole one.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from deepinfer_jax import whole_files
from deepinfer_jax.numerics import Form
from deepinfer_jax.rl.examples import saved
from deepinfer_jax.rl.examples.policy import (
    Settings,
    State,
    Step,
    Task,
    evaluate,
    gradient_program,
    make_task,
    rollout_program,
    share,
    start,
    train_step,
)

EDGE = 8  # steps whose mean reward is the reward at the beginning and at the end


def run(task: Task, out: Path, *, every: int = 20, until: int | None = None) -> dict[str, Any]:
    """Train to step `until` (default: all steps), from the last checkpoint in `out` if it has one.

    A checkpoint is written every `every` steps and at the end. Returns what `summary` says, at once
    where the run has been to `until` already.

    Raises ValueError for an `until` or `every` that is no step of the run, and where `out` holds a
    run of other settings or half of one.
    """
    settings = task.settings
    until = settings.steps if until is None else until
    _check_steps(settings, every, until)
    out.mkdir(parents=True, exist_ok=True)
    _check_settings(settings, out / "settings.json")
    if (ended := _ended(out / "summary.json", until)) is not None:
        return ended
    state, done = start(task), 0
    before = _known(out / "held_out_before.json", lambda: evaluate(task, state.params))
    reached = saved.steps(out / "checkpoints")
    if reached:
        done = reached[-1]
        state = saved.restore(out / "checkpoints", done, state)
    log = read_log(out / "log.jsonl")[:done]
    if len(log) < done:
        raise ValueError(
            f"{out / 'log.jsonl'} has {len(log)} steps, the last checkpoint is after {done}: put "
            "the log back, or start anew in another folder"
        )
    with whole_files.replacing(out / "log.jsonl", text=True) as file:
        file.writelines(map(_record, log))
    with open(out / "log.jsonl", "a", encoding="utf-8") as file:
        for step in range(done, until):
            state, record = train_step(task, state, step)
            log.append(record)
            file.write(_record(record))
            file.flush()
            print(_line(record), flush=True)
            if (step + 1) % every == 0 or step + 1 == until:
                saved.save(out / "checkpoints", step + 1, state)
    found = summary(settings, log, before, evaluate(task, state.params), state)
    _write(out / "summary.json", found, indent=1)
    return found


def summary(
    settings: Settings, log: list[Step], before: dict[str, float], after: dict[str, float],
    state: State,
) -> dict[str, Any]:  # fmt: skip
    """A run in numbers."""
    edge = min(EDGE, max(1, len(log) // 2))
    first, last = (share([each.reward for each in part]) for part in (log[:edge], log[-edge:]))
    return {
        "settings": dataclasses.asdict(settings),
        "steps": len(log),
        "reward_first": first,
        "reward_last": last,
        "held_out_before": before,
        "held_out_after": after,
        "tokens": sum(each.tokens for each in log),
        "largest_raw_difference": max(each.raw_difference for each in log),
        "largest_processed_difference": max(each.processed_difference for each in log),
        "largest_kl": max(abs(each.kl) for each in log),
        "seconds": round(share([e.sample_s + e.learn_s for e in log]) * len(log), 1),
        "programs": compiled(),
        "digest": digest(state),
    }


def compiled() -> list[int]:
    """How many programs this process has compiled for sampling and for learning."""
    every: Any = (rollout_program, gradient_program)
    return [program._cache_size() for program in every]


def digest(state: State) -> str:
    """Sixteen hexadecimal digits that name every bit of a state."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def read_log(path: Path) -> list[Step]:
    """The steps that a log holds; none where there is no file. What an interrupted run wrote of its
    last line is left out.
    """
    if not path.is_file():
        return []
    *lines, _ = path.read_text("utf-8").split("\n")
    return [Step(**json.loads(line)) for line in lines]


def _record(step: Step) -> str:
    return json.dumps(dataclasses.asdict(step)) + "\n"


def _write(path: Path, value: Any, indent: int | None = None) -> None:
    with whole_files.replacing(path, text=True) as file:
        file.write(json.dumps(value, indent=indent) + "\n")


def _known(path: Path, make: Any) -> dict[str, float]:
    """What `path` holds; made and written where there is none."""
    if not path.is_file():
        _write(path, make())
    return json.loads(path.read_text("utf-8"))


def _ended(path: Path, until: int) -> dict[str, Any] | None:
    """The summary at `path`, if it is of `until` steps."""
    found = json.loads(path.read_text("utf-8")) if path.is_file() else None
    return found if found is not None and found["steps"] == until else None


def _check_steps(settings: Settings, every: int, until: int) -> None:
    if every < 1:
        raise ValueError(f"every (steps between checkpoints) must be at least 1, got {every}")
    if not 1 <= until <= settings.steps:
        raise ValueError(
            f"until (the step to stop at) must lie in 1..{settings.steps}, the steps of the run, "
            f"got {until}: for a longer run raise steps, in another folder"
        )


def _check_settings(settings: Settings, path: Path) -> None:
    """Note the settings in `path`; ValueError where a run of others is there."""
    wanted = dataclasses.asdict(settings)
    found = _known(path, lambda: wanted)
    if found != wanted:
        other = [f"{name}={found.get(name)}" for name in wanted if found.get(name) != wanted[name]]
        raise ValueError(
            f"{path.parent} holds a run of other settings ({', '.join(other)}): continue it with "
            "those, or choose another folder"
        )


def _line(record: Step) -> str:
    return (
        f"{record.step:4} reward {record.reward:.3f} right {record.right:.3f} "
        f"groups that differ {record.spread:.2f} "
        f"|trainer - sampler| {record.raw_difference:.3g} kl {record.kl:.3g} "
        f"{record.sample_s + record.learn_s:.1f} s"
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    for field in dataclasses.fields(Settings):
        if field.name.endswith("rows"):
            continue
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    for name in ("--rows", "--sampler-rows"):
        parser.add_argument(name, choices=get_args(Form), default=None)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--until", type=int, help="stop there, to be continued")
    given = vars(parser.parse_args(arguments))
    out, every, until = given.pop("out"), given.pop("every"), given.pop("until")
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    try:
        found = run(make_task(settings), out, every=every, until=until)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({name: found[name] for name in list(found)[2:]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
