"""Are replies the same bits for every use of the drafter?

200 prompts of the corpus, each at temperature 0, 0.7, 1 and 1 with top-p 0.9, are answered without
drafts; with 1 to 5 drafts, all verified; by threshold; by the planner under step times drawn at
random; and at random schedules that change from look to look. Tokens and all three numbers of every
token are compared. Exit status 1 if a bit differs, or a policy accepted no draft.

    python bench/speculation_equality.py --machine cpu2
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from environment import machine, write_result
from speculation import prompts

import deepinfer_jax as di
from deepinfer_jax import planning, profiling
from deepinfer_jax.planning.policies import Memory, Move, Policy

OPTIONS = ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0},
           {"temperature": 1.0, "top_p": 0.9})  # fmt: skip
NUMBERS = ("tokens", "logprobs", "logprobs_processed", "kept_mass")


def requests(count: int, new: int) -> list[dict[str, Any]]:
    """Every prompt with every set of options."""
    return [
        {**prompt, **options, "id": f"{prompt['id']}/{number}"}
        for prompt in prompts(count, 0.0, new)
        for number, options in enumerate(OPTIONS)
    ]


@dataclasses.dataclass(frozen=True)
class Drawn(Policy):
    """Lengths of every slot drawn anew at every look, cut to fewer rows than they ask for."""

    seed: int

    def move(self, memory: Memory, running: int) -> Move:
        """A few rounds of it."""
        rng = np.random.default_rng((self.seed, memory.plain))
        lengths = rng.integers(0, memory.block + 1, memory.slots).astype(np.int32)
        rounds = int(rng.integers(1, 9))
        return Move(memory.block, 3 * memory.slots, planning.Lengths(lengths), rounds)

    def learn(self, memory: Memory, move: Move, confidence: np.ndarray, most: np.ndarray) -> Memory:
        """Only how many rounds there were."""
        return dataclasses.replace(memory, plain=memory.plain + len(most))


def drawn_table(model: di.Model, slots: int, seed: int) -> planning.CostTable:
    """Step times that no device has: rows cost anything, so that plans jump about."""
    rng = np.random.default_rng(seed)
    rows = (slots, 3 * slots, slots * (model.cfg.dspark_block_size + 1))
    ms = tuple(float(each) for each in rng.uniform(0.5, 3.0, len(rows)))
    curve = planning.Curve(slots, rows, ms, float(rng.uniform(0.5, 3.0)))
    return planning.CostTable("drawn", "none", "any", "0", "0", (curve,))


def policies(model: di.Model, slots: int, tables: int) -> dict[str, Any]:
    """By name."""
    heat, block = model.confidence_temperatures, model.cfg.dspark_block_size
    return {
        **{f"fixed {count}": planning.Fixed(count) for count in range(1, block + 1)},
        "threshold 0.6": planning.Threshold(0.6, heat),
        **{
            f"planner, times {seed}": planning.Planner(drawn_table(model, slots, seed), heat)
            for seed in range(tables)
        },
        **{f"schedule {seed}": Drawn(seed) for seed in range(tables)},
    }


def differing(made: list[di.Result], want: list[di.Result]) -> tuple[int, int]:
    """(numbers that differ, numbers compared)."""
    wrong = total = 0
    for left, right in zip(made, want, strict=True):
        for name in NUMBERS:
            a, b = (np.array(getattr(each, name), np.float32).view(np.uint32) for each in
                    (left, right))  # fmt: skip
            total += max(len(a), len(b))
            shared = min(len(a), len(b))
            wrong += max(len(a), len(b)) - shared + int(np.count_nonzero(a[:shared] != b[:shared]))
    return wrong, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--rows", help="form of the numerics, default as `load` chooses")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tables", type=int, default=3, help="random step times and schedules")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, model = machine(), di.load("spark-tiny", rows=given.rows)
    asked = requests(given.count, given.new)

    def run(policy: Any, some: list[dict]) -> list[di.Result]:
        return di.generate(model, some, seed=3, batch_size=given.slots, speculative=policy)

    chosen = policies(model, given.slots, given.tables)
    with ThreadPoolExecutor(profiling.cores()) as pool:  # compile side by side
        list(pool.map(lambda policy: run(policy, asked[:16]), [planning.OFF, *chosen.values()]))
    want = run(planning.OFF, asked)
    rows = {}
    for name, policy in chosen.items():
        began = time.perf_counter()
        made = run(policy, asked)
        wrong, total = differing(made, want)
        spent = [result.timing for result in made]
        rows[name] = {
            "differing": wrong, "compared": total, "s": time.perf_counter() - began,
            "verified": sum(each.verified for each in spent),
            "accepted": sum(each.accepted for each in spent),
        }  # fmt: skip
        print(name, rows[name], flush=True)
    settings = {
        "name": "spark-tiny", "numerics": model.numerics.fingerprint(), "options": OPTIONS,
        **{name: getattr(given, name) for name in ("count", "new", "slots", "tables")},
    }  # fmt: skip
    path = write_result(
        "speculation_equality", given.machine, __doc__, settings, {"results": rows}, given.out,
        start,
    )  # fmt: skip
    print(path)
    return 1 if any(row["differing"] or not row["accepted"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
