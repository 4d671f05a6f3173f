"""Which share of the time does the accelerator wait while the engine runs?

Requests of random tokens fill all slots, more of them than there are, so that prompts come in while
others decode. The run is repeated under JAX's profiler; of the time between the first and the last
kernel, that in which no kernel runs is idle. Gaps of up to 20 microseconds lie between the kernels
of one program; longer ones are waits for the host. Recording takes time of its own on the host: the
run without it stands beside.

    python bench/engine_idle.py --machine h200 --slots 64 --slice     # needs a GPU of 80 GB
    python bench/engine_idle.py --machine h200 --slots 64             # spark-tiny
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from environment import machine, write_result
from recording import Kernel, recorded
from speculation_slice import sliced

import deepinfer_jax as di
from deepinfer_jax import engine, planning
from deepinfer_jax.requests import Options, Request

GAP_US = 20.0  # longest gap between the kernels of one program
EDGES_US = (5, 20, 100, 1000, 10_000)


def asked(model: di.Model, count: int, new: int) -> list[Request]:
    """Prompts of 16 to 128 random tokens; replies of half to all of `new` tokens, or shorter where
    the model ends them.
    """
    rng = np.random.default_rng(5)
    made = []
    for i in range(count):
        tokens = tuple(rng.integers(8, model.cfg.vocab_size, rng.integers(16, 129)).tolist())
        options = Options(max_tokens=int(rng.integers(new // 2, new + 1)))
        made.append(Request(i, tokens, tokens, i, options))
    return made


def run(model: di.Model, requests: list[Request], slots: int, policy: planning.Policy) -> float:
    """Seconds until all have ended; compiling is done before."""
    sizes = engine.sizes_for(requests, model.cfg, model.max_length, slots)
    running = engine.Engine(model, sizes, policy=policy)
    for request in requests:
        running.submit(request)
    running.warm_up()
    start = time.perf_counter()
    for update in running.updates():
        if update.error:
            raise update.error
    return time.perf_counter() - start


def gaps(spans: np.ndarray) -> np.ndarray:
    """Microseconds in which nothing ran, one entry per gap, of spans [N, 2] sorted by begin."""
    ends = np.maximum.accumulate(spans[:, 1])
    return np.maximum(spans[1:, 0] - ends[:-1], 0) / 1e3


def answer(spans: np.ndarray) -> dict[str, Any]:
    whole = float(spans[:, 1].max() - spans[0, 0]) / 1e3
    found = gaps(spans)
    bins = np.digitize(found, EDGES_US)
    names = ["up to 5", *(f"over {edge}" for edge in EDGES_US)]
    return {
        "kernels": len(spans),
        "span_s": whole / 1e6,
        "idle": float(found.sum() / whole),
        "waiting": float(found[found > GAP_US].sum() / whole),
        "share_of_gaps_us": {n: float(found[bins == i].sum() / whole) for i, n in enumerate(names)},
    }


def between(ran: list[Kernel]) -> list[dict[str, Any]]:
    """The waits by the programs that they stand between, the longest sums first."""
    waits = collections.defaultdict(list)
    found = gaps(np.array([(kernel.begin, kernel.end) for kernel in ran]))
    for place in np.flatnonzero(found > GAP_US).tolist():
        waits[ran[place].program, ran[place + 1].program].append(float(found[place]))
    longest = sorted(waits.items(), key=lambda item: -math.fsum(item[1]))[:12]
    return [
        {"after": after, "before": before, "count": len(each), "ms": math.fsum(each) / 1e3,
         "median_us": statistics.median(each)}
        for (after, before), each in longest
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--rows", help="form of the numerics, default as `load` chooses")
    parser.add_argument("--slice", action="store_true", help="the slice of bench/speculation_slice")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--count", type=int, default=160, help="requests")
    parser.add_argument("--new", type=int, default=64, help="most tokens of a reply")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, model = machine(), di.load("spark-tiny", rows=given.rows)
    if given.slice:  # most of its ids have no text
        model = dataclasses.replace(sliced(small=False), tokenizer=model.tokenizer)
    requests, found = asked(model, given.count, given.new), {}
    policies = {"off": planning.OFF, "all drafts": planning.Fixed(model.cfg.most_drafts)}
    for name, policy in policies.items():
        run(model, requests, given.slots, policy)  # discarded
        plain = run(model, requests, given.slots, policy)
        traced, ran = recorded(lambda policy=policy: run(model, requests, given.slots, policy))
        spans = np.array([(kernel.begin, kernel.end) for kernel in ran])
        found[name] = {"s": plain, "traced_s": traced, **answer(spans), "between": between(ran)}
        print(name, found[name], flush=True)
    settings = {
        "name": model.name, "numerics": model.numerics.fingerprint(),
        **{n: getattr(given, n) for n in ("slots", "count", "new")},
    }  # fmt: skip
    label = given.machine + ("-slice" if given.slice else "")
    print(write_result("engine_idle", label, __doc__, settings, {"results": found}, given.out,
                       start))  # fmt: skip


if __name__ == "__main__":
    main()
