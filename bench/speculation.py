"""Does speculative decoding pay, and does the planner ever make decoding slower?

Prompts of the corpus are answered with every use of the drafter, policies taking turns in one run:
no drafts, fixed numbers, a threshold, the planner. Reported are emitted tokens per second of the
whole run (prefill and host included), tokens per pass of the model with and without the one that
needs no draft, rows verified and wasted, and the planner's regret against the best fixed number in
hindsight. All replies must be equal in every bit; exit status 1 if they are not.

    deepinfer-jax profile --slots 1 8 64 --out times.json
    python bench/speculation.py --table times.json --machine cpu2
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from environment import machine, weights, write_result

import deepinfer_jax as di
from deepinfer_jax import loading, planning, profiling
from deepinfer_jax.training import corpus, dataset


def prompts(count: int, temperature: float, new: int) -> list[dict[str, Any]]:
    """Held-out prompts of all tasks, replies of at most `new` tokens."""
    tokenizer, found = dataset.load_tokenizer(), []
    for number, example in enumerate(corpus.examples(777, "heldout")):
        prompt, _ = corpus.render(example, tokenizer)
        if prompt:
            found.append({"tokens": prompt, "id": str(number), "temperature": temperature,
                          "max_tokens": new})  # fmt: skip
        if len(found) == count:
            return found
    raise AssertionError("the corpus ended")


def policies(
    model: di.Model, table: planning.CostTable, fixed: list[int]
) -> dict[str, planning.Policy]:
    """What is compared, by name."""
    heat = model.confidence_temperatures
    return {
        "off": planning.OFF,
        **{f"fixed {count}": planning.Fixed(count) for count in fixed},
        "threshold 0.5": planning.Threshold(0.5, heat),
        "planner": planning.Planner(table, heat),
    }


def measure(
    model: di.Model, asked: list[dict], batch: int, chosen: dict[str, planning.Policy], repeats: int
) -> dict[str, Any]:
    """Every policy `repeats` times in turns, after one discarded turn of all at once."""
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    made: dict[str, list[di.Result]] = {}

    def run(name: str) -> list[di.Result]:
        policy = chosen[name]
        return di.generate(model, asked, seed=1, batch_size=batch, speculative=policy)

    with ThreadPoolExecutor(profiling.cores()) as pool:  # compiles side by side
        list(pool.map(run, chosen))
    for _ in range(repeats):
        for name in chosen:
            start = time.perf_counter()
            made[name] = run(name)
            seconds[name].append(time.perf_counter() - start)
    return summary(made, seconds) | {"samples": seconds}


def summary(made: dict[str, list[di.Result]], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Speeds, ratios to no drafts, and what became of the drafts."""
    tokens = sum(len(result.tokens) for result in made["off"])
    speed = {name: tokens / statistics.median(each) for name, each in seconds.items()}
    rows = {}
    for name, results in made.items():
        spent = [result.timing for result in results]
        passes = sum(each.rounds for each in spent)
        verified, accepted = (sum(getattr(t, n) for t in spent) for n in ("verified", "accepted"))
        rows[name] = {
            "tokens_per_s": speed[name],
            "over_off": speed[name] / speed["off"],
            "spread": [tokens / max(seconds[name]), tokens / min(seconds[name])],
            "accepted_per_pass": accepted / passes,
            "tokens_per_pass": (tokens - len(results)) / passes,  # the first is the prefill's
            "verified_rows": verified,
            "wasted_rows": verified - accepted,
            "equal_to_off": results == made["off"],
        }
    best = max(speed[name] for name in speed if name.startswith(("fixed", "off")))
    return {"policies": rows, "tokens": tokens, "planner_regret": 1 - speed["planner"] / best}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--rows", help="form of the numerics, default as `load` chooses")
    parser.add_argument("--table", type=Path, required=True, help="of deepinfer-jax profile")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--each", type=int, default=3, help="prompts for every slot")
    parser.add_argument("--least", type=int, default=24, help="prompts, however few the slots")
    parser.add_argument("--new", type=int, default=96, help="most tokens of a reply")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, model = machine(), di.load("spark-tiny", rows=given.rows)
    table = planning.load_table(
        given.table,
        model=profiling.model_fingerprint(model),
        hardware=profiling.hardware(),
        numerics=model.numerics.fingerprint(),
    )
    settings = {
        "name": "spark-tiny", "weights": weights(loading.find_folder("spark-tiny")),
        "numerics": model.numerics.fingerprint(),
        "table": [dataclasses.asdict(curve) for curve in table.curves],
        "temperatures_of_confidence": model.confidence_temperatures,
        **{name: getattr(given, name) for name in ("each", "least", "new", "repeats")},
    }  # fmt: skip
    found, chosen = [], policies(model, table, given.fixed)
    for batch in given.batches:
        for temperature in given.temperatures:
            asked = prompts(max(given.each * batch, given.least), temperature, given.new)
            one = measure(model, asked, batch, chosen, given.repeats)
            found.append({"batch": batch, "temperature": temperature, "prompts": len(asked), **one})
            print(f"batch {batch}, temperature {temperature}: regret {one['planner_regret']:.3f}")
            for name, row in one["policies"].items():
                print(f"  {name:14}{row['tokens_per_s']:9.1f} tokens/s {row['over_off']:6.2f} "
                      f"{row['tokens_per_pass']:6.2f} a pass, {row['wasted_rows']} rows wasted",
                      flush=True)  # fmt: skip
            path = write_result(  # what there is, should the rest not come to its end
                "speculation", given.machine, __doc__, settings, {"results": found}, given.out,
                start,
            )  # fmt: skip
    print(path)
    every = [row for one in found for row in one["policies"].values()]
    return 0 if all(row["equal_to_off"] for row in every) else 1


if __name__ == "__main__":
    sys.exit(main())
