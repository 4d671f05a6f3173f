"""Is the distance of sampler and trainer exactly 0 for a whole training run, and does it repeat?

Four runs of `deepinfer_jax.rl.examples.grpo` on the shipped model: one, the same again, one that
goes on from the first one's checkpoint in the middle, and one whose sampler runs plain XLA
operations while the trainer stays what it is. The first three must end with the same bits and see
a difference of exactly 0 in every step. Exit status 1 otherwise. The runs stay in `--runs`; the
command goes on where it was stopped.

    python bench/grpo.py --machine cpu2 --runs runs
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

from environment import ROOT, machine, write_result

from deepinfer_jax.rl.examples import grpo
from deepinfer_jax.rl.examples.plots import plot_runs
from deepinfer_jax.rl.examples.policy import Settings, make_task

CURVES = {"whole": "one Numerics on both sides", "plain": "sampler: plain XLA operations"}


def train(name: str, settings: Settings, given: argparse.Namespace) -> dict[str, Any]:
    """Run `name`, or what is left of it; its summary."""
    print(name, flush=True)
    out, whole = given.runs / name, given.runs / "whole"
    if name == "resumed" and not out.exists():
        middle = given.steps // 2
        shutil.copytree(whole / "checkpoints" / str(middle), out / "checkpoints" / str(middle))
        for file in ("settings.json", "held_out_before.json"):
            shutil.copy(whole / file, out)
        lines = (whole / "log.jsonl").read_text("utf-8").splitlines(keepends=True)
        (out / "log.jsonl").write_text("".join(lines[:middle]), encoding="utf-8")
    return grpo.run(make_task(settings), out, every=given.every)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--rate", type=float, default=Settings.rate)
    parser.add_argument("--temperature", type=float, default=Settings.temperature)
    parser.add_argument("--rows", default=Settings.rows, help="form of the trainer's numerics")
    parser.add_argument("--plain", default="batched", help="form of the other sampler's")
    parser.add_argument("--every", type=int, help="steps between checkpoints, default half a run")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "grpo.png")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    given.every = given.every or given.steps // 2
    chosen = {name: getattr(given, name) for name in ("steps", "rate", "temperature", "rows")}
    settings, where = Settings(**chosen), machine()
    plain = dataclasses.replace(settings, sampler_rows=given.plain)
    found = {
        name: train(name, plain if name == "plain" else settings, given)
        for name in ("whole", "again", "resumed", "plain")
    }
    logs = {name: grpo.read_log(given.runs / name / "log.jsonl") for name in found}
    plot_runs({label: logs[name] for name, label in CURVES.items()}, given.picture)
    same = [found[name] for name in ("whole", "again", "resumed")]
    results = {
        "equal": len({run["digest"] for run in same}) == 1,
        "largest_difference": max(run["largest_raw_difference"] for run in same),
        "largest_kl": max(run["largest_kl"] for run in same),
        "plain_largest_difference": found["plain"]["largest_raw_difference"],
        "plain_largest_kl": found["plain"]["largest_kl"],
        "gain": found["whole"]["reward_last"] - found["whole"]["reward_first"],
        "plain_gain": found["plain"]["reward_last"] - found["plain"]["reward_first"],
        "runs": found,
    }
    samples = {name: [dataclasses.asdict(each) for each in log] for name, log in logs.items()}
    whole = {"samples": samples, "results": results}
    print(write_result(
        "grpo", given.machine, __doc__, dataclasses.asdict(settings), whole, given.out, where
    ))  # fmt: skip
    right = results["equal"] and not results["largest_difference"] and not results["largest_kl"]
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
