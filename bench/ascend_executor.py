"""How long does a decode step of the executor take on torch's CPU, against XLA's?

The same program of the engine (`rounds.decode_many`), float32, the same slots: both in turns, after
both have been compiled. XLA runs its default form ("tiled") on all cores, torch what
`ascend.placed` chooses: single operations of the compiler (`--kernels built`) on one thread. Wall
time, and CPU time of the process, which says more where the machine has other work.

    python bench/ascend_executor.py --machine cpu2
    python bench/ascend_executor.py --machine cpu2 --slots 1 8 --drafts 0 5 --kernels torch
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from environment import write_result

import ascend
import deepinfer_jax as di
from ascend.executor import place
from deepinfer_jax import prompts
from deepinfer_jax.engine import programs, sites, sizes
from deepinfer_jax.engine.seats import sampling_of
from deepinfer_jax.engine.sites import State
from deepinfer_jax.planning.schedules import Lengths
from deepinfer_jax.requests import make_options

MOST = 16  # rounds of a call, as in the engine


def started(model: di.Model, slots: int) -> State:
    """Slots in the middle of their replies: every page given out, 96 tokens behind each."""
    asked = prompts.make_requests(
        ["Tell me a story."] * slots, make_options(max_tokens=128), model.tokenizer, model.cfg,
        model.max_length,
    )  # fmt: skip
    room = sizes.sizes_for(asked, model.cfg, model.max_length, slots)
    state = sites.ONE.state(model, room, sampling_of([None] * slots, room.truncates))
    running = dataclasses.replace(
        state.running, active=jnp.ones(slots, bool), left=jnp.full(slots, 10_000, jnp.int32),
        tokens=jnp.arange(slots, dtype=jnp.int32) + 40,
    )  # fmt: skip
    pages = np.arange(slots * state.cache.pages.shape[1], dtype=np.int32) % room.pages
    cache = dataclasses.replace(
        state.cache, pages=jnp.asarray(pages.reshape(slots, -1)),
        lengths=jnp.full(slots, 96, jnp.int32),
    )  # fmt: skip
    return state._replace(running=running, cache=cache)


def asked_for(drafts: int, rounds: int) -> dict[str, Any]:
    """The arguments of the program beside the state."""
    return {
        "steps": MOST, "size": drafts, "rows": None, "mode": "coupled", "limit": np.int32(rounds),
        "leave": np.int32(0), "schedule": Lengths(jnp.int32(drafts)),
    }  # fmt: skip


def by_xla(model: di.Model, slots: int, more: dict[str, Any]) -> Callable[[], Any]:
    s = started(model, slots)

    def run() -> Any:
        made = programs.decode_program(
            s.params, s.tables, s.running, jax.tree.map(jnp.copy, s.cache), s.sampling, model.cfg,
            model.numerics, **more,
        )  # fmt: skip
        return jax.device_get(made[0])

    return run


def by_torch(site: Any, slots: int, more: dict[str, Any]) -> Callable[[], Any]:
    model = site.model
    s = started(model, slots)
    running, cache, sampling = place((s.running, s.cache, s.sampling), "cpu")

    def run() -> Any:
        copy = jax.tree.map(torch.clone, cache)
        return site.programs.decode_program(
            *site.held, running, copy, sampling, model.cfg, model.numerics, **more
        )[0]

    return run


def measured(forms: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a round, all forms in turns."""
    first = {}
    for name, run in forms.items():
        start = time.perf_counter()
        run()
        first[name] = time.perf_counter() - start
    wall: dict[str, list[float]] = {name: [] for name in forms}
    cpu: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, run in forms.items():
            start, busy = time.perf_counter(), time.process_time()
            run()
            wall[name].append((time.perf_counter() - start) / rounds * 1e3)
            cpu[name].append((time.process_time() - busy) / rounds * 1e3)
    best = {name: min(samples) for name, samples in wall.items()}
    least = {name: min(samples) for name, samples in cpu.items()}
    return {
        "first_call_s": first, "wall_ms": wall, "cpu_ms": cpu,
        "wall_ratio": best["torch"] / best["xla"], "cpu_ratio": least["torch"] / least["xla"],
        "median_wall_ratio": statistics.median(wall["torch"]) / statistics.median(wall["xla"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--machine", default="here", help="name of the result file")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--rounds", type=int, default=MOST, help="of a call, at most 16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kernels", choices=["built", "torch"], default="built")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--out", type=Path, help="folder of the result")
    args = parser.parse_args()
    model = di.load("spark-tiny", numerics=di.Numerics.fp32())
    torch.set_num_threads(args.threads)  # of copies between calls, too: a helper of theirs spins on
    site = ascend.placed(model, "cpu", kernels=args.kernels, threads=args.threads)
    found: dict[str, Any] = {}
    for drafts in args.drafts:
        for slots in args.slots:
            more = asked_for(drafts, args.rounds)
            forms = {"xla": by_xla(model, slots, more), "torch": by_torch(site, slots, more)}
            result = measured(forms, args.rounds, args.repeats)
            found[f"slots {slots}, drafts {drafts}"] = result
            print(f"slots {slots}, drafts {drafts}: {result['wall_ratio']:.2f} of XLA's time, "
                  f"{result['cpu_ratio']:.2f} of its CPU time")  # fmt: skip
    config = {
        "name": "spark-tiny", "numerics": dataclasses.asdict(model.numerics),
        "torch": metadata.version("torch"), "torch_threads": args.threads,
        "kernels": args.kernels, "rounds": args.rounds,
    }  # fmt: skip
    path = write_result("ascend_executor", args.machine, __doc__, config, found, folder=args.out)
    print(path)


if __name__ == "__main__":
    main()
