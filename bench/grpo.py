"""Does a policy learn at a distance of sampler and trainer of exactly 0, and does it repeat?

Up to four runs of `deepinfer_jax.rl.examples.grpo` on the shipped model: one, the same "again", one
"resumed" from the first one's checkpoint in the middle, and one with a "plain" sampler, which runs
XLA operations while the trainer stays what it is. The first three must end with the same bits and
see a difference of exactly 0 in every step, and the share of right replies to held-out questions
must rise by `LEAST`. Exit status 1 otherwise. The runs stay in `--runs`; the command goes on where
it was stopped. A GPU adds in one order only with a flag:

    python bench/grpo.py --machine cpu2 --runs runs
    XLA_FLAGS=--xla_gpu_deterministic_ops=true python bench/grpo.py --rows pallas --runs runs
    python bench/grpo.py --runs runs --only again
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
from deepinfer_jax.rl.examples.policy import Settings, make_task, share
from deepinfer_jax.rl.examples.questions import KINDS

CURVES = {"whole": "one Numerics on both sides", "plain": "sampler: plain XLA operations"}
OTHERS = ("again", "resumed", "plain")
LEAST = 0.3  # by which the share of right replies must rise


def train(name: str, settings: Settings, given: argparse.Namespace) -> dict[str, Any]:
    """Run `name`, or what is left of it; its summary."""
    print(name, flush=True)
    out, whole = given.runs / name, given.runs / "whole"
    if name == "resumed" and not out.exists():
        middle = given.every * max(1, given.until // 2 // given.every)
        shutil.copytree(whole / "checkpoints" / str(middle), out / "checkpoints" / str(middle))
        for file in ("settings.json", "held_out_before.json"):
            shutil.copy(whole / file, out)
        lines = (whole / "log.jsonl").read_text("utf-8").splitlines(keepends=True)
        (out / "log.jsonl").write_text("".join(lines[:middle]), encoding="utf-8")
    return grpo.run(make_task(settings), out, every=given.every, until=given.until)


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--only", action="append", choices=OTHERS, help="compare the run with this one only"
    )
    for name in ("steps", "groups", "members", "rate", "temperature", "seed"):
        default = getattr(Settings, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--rows", default=Settings.rows, help="form of the trainer's numerics")
    parser.add_argument("--plain", default="batched", help="form of the other sampler's")
    parser.add_argument("--every", type=int, help="steps between checkpoints, default half a run")
    parser.add_argument("--until", type=int, help="stop all runs there, to be continued")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "grpo.png")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    return parser


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Answers from the summaries of the runs, by name."""
    same = [run for name, run in found.items() if name != "plain"]
    results = {
        "equal": len({run["digest"] for run in same}) == 1,
        "largest_difference": max(run["largest_raw_difference"] for run in same),
        "largest_kl": max(run["largest_kl"] for run in same),
        "gain": gain(found["whole"]),
    }
    if "plain" in found:
        results["plain_largest_difference"] = found["plain"]["largest_raw_difference"]
        results["plain_largest_kl"] = found["plain"]["largest_kl"]
        results["plain_gain"] = gain(found["plain"])
    return results


def gain(run: dict[str, Any]) -> float:
    """By how much the share of right replies to held-out questions rose, the mean over kinds."""
    rises = [run["held_out_after"][kind] - run["held_out_before"][kind] for kind in KINDS]
    return share(rises)


def main() -> int:
    given = options().parse_args()
    given.until = given.until or given.steps
    given.every = given.every or max(1, given.until // 2)
    chosen = ("steps", "groups", "members", "rate", "temperature", "seed", "rows")
    settings, where = Settings(**{name: getattr(given, name) for name in chosen}), machine()
    plain = dataclasses.replace(settings, sampler_rows=given.plain)
    names = ["whole", *(name for name in OTHERS if name in (given.only or OTHERS))]
    found = {name: train(name, plain if name == "plain" else settings, given) for name in names}
    logs = {name: grpo.read_log(given.runs / name / "log.jsonl") for name in found}
    if "plain" in found:
        plot_runs({label: logs[name] for name, label in CURVES.items()}, given.picture)
    results = compared(found)
    samples = {name: [dataclasses.asdict(each) for each in log] for name, log in logs.items()}
    whole = {"samples": samples, "results": {**results, "runs": found}}
    print(write_result(
        "grpo", given.machine, __doc__, dataclasses.asdict(settings), whole, given.out, where
    ))  # fmt: skip
    print(results)
    zero = results["largest_difference"] == results["largest_kl"] == 0
    return 0 if results["equal"] and zero and results["gain"] >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
