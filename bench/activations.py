"""What does a GPU set aside for intermediate values, beside what a plan counts for them?

The slice of the released model of `speculation_slice` on one device: rounds of many sequences,
without drafts and with as many as the model makes, and chunks of prompts. For each the temporaries
of XLA's own report on the compiled program, and what the device held at most while it ran above
what it held before, beside `scale.memory.activations` of the same call. Arguments are no part of
either: weights and caches of a plan are exact.

    python bench/activations.py --machine h200
    python bench/activations.py --small --slots 3 --chunks 8 16 --held 64
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import machine, write_result
from released import filled_cache, nbytes
from speculation_slice import random_weights, slice_config

from deepinfer_jax import rounds, sampling, scale, steps
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics, rows_for
from deepinfer_jax.planning.schedules import Lengths
from deepinfer_jax.rounds import Running
from deepinfer_jax.rows import text_rows
from deepinfer_jax.scale import memory
from deepinfer_jax.tables import make_tables

ALONE = scale.over_experts(1)
_STATIC = {"static_argnames": ("cfg", "numerics", "size"), "donate_argnames": "cache"}


@functools.partial(jax.jit, **_STATIC)
def decode(params, tables, cache, asked, cfg: ModelConfig, numerics: Numerics, size: int):
    """A round of every slot, `size` drafts each."""
    every = jnp.arange(cache.slots, dtype=jnp.int32)
    running = Running(every, every >= 0, every * 0 + 9, every[:, None] * 0 - 1)
    return rounds.speculate(
        params, tables, running, cache, asked, Lengths(jnp.int32(size)), cfg, numerics, size=size
    )


@functools.partial(jax.jit, **_STATIC)
def prefill(params, tables, cache, asked, cfg: ModelConfig, numerics: Numerics, size: int):
    """`size` prompt rows, shared evenly among the slots, behind what the cache holds."""
    number = jnp.arange(size, dtype=jnp.int32)
    each = -(-size // cache.slots)
    slot = number // each
    rows = text_rows(number * 7919 % cfg.vocab_size, slot, cache.lengths[slot] + number % each)
    return steps.prefill(params, tables, rows, cache, asked, cfg, numerics)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: `size` is drafts of a decode round, rows of a prefill."""

    call: str
    slots: int
    size: int

    def accounting(self, cfg: ModelConfig, context: int) -> dict[str, Any]:
        """Of a plan with this call."""
        drafts, rows = (self.size, 1) if self.call == "decode" else (0, self.size)
        work = scale.Workload(context, self.slots, drafts=drafts, prefill=rows)
        make = scale.Call.decode if self.call == "decode" else scale.Call.prompts
        call = make(cfg, ALONE, work)
        parts = memory.activations(cfg, ALONE, call, work)
        return {
            **dataclasses.asdict(self), "rows": call.rows,
            "accounted_bytes": memory.at_once(parts),
            "accounted": {part.kind: part.device for part in parts},
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Scene:
    """What all calls are made with; the cache holds `held` tokens of `room`."""

    cfg: ModelConfig
    numerics: Numerics
    weights: tuple[Any, Any]
    room: int
    held: int

    def cache(self, slots: int) -> Cache:
        return filled_cache(self.cfg, self.numerics, slots, self.room, self.held)

    def compiled(self, case: Case) -> Any:
        body = decode if case.call == "decode" else prefill
        cache = jax.eval_shape(lambda: self.cache(case.slots))
        given = *self.weights, cache, asked_of(case.slots), self.cfg, self.numerics, case.size
        return body.lower(*given).compile()


def asked_of(slots: int) -> sampling.Sampling:
    return sampling.untruncated(sampling.make_sampling(slots, 1.0, seeds=range(slots)))


def held_most(program: Any, scene: Scene, case: Case) -> int | None:
    """Bytes of the device at the worst moment of a call above those before it, if it tells; None
    also where an earlier moment was worse, since a device remembers only the worst of all.
    """
    given = jax.block_until_ready((*scene.weights, scene.cache(case.slots), asked_of(case.slots)))
    before = jax.devices()[0].memory_stats()
    jax.block_until_ready(program(*given))
    after = jax.devices()[0].memory_stats()
    if not before or after["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        return None
    return after["peak_bytes_in_use"] - before["bytes_in_use"]


def measured(scene: Scene, cases: list[Case]) -> list[dict[str, Any]]:
    """All cases, those that need least first: so each is the worst moment so far."""
    with ThreadPoolExecutor(len(cases)) as pool:
        programs = list(pool.map(scene.compiled, cases))
    said = [program.memory_analysis() for program in programs]
    total = [m.argument_size_in_bytes + m.temp_size_in_bytes for m in said]
    found = []
    for n in np.argsort(total):
        row = cases[n].accounting(scene.cfg, scene.room)
        row["temporaries_bytes"] = said[n].temp_size_in_bytes
        row["new_output_bytes"] = said[n].output_size_in_bytes - said[n].alias_size_in_bytes
        row["peak_bytes"] = held_most(programs[n], scene, cases[n])
        row["temporaries_over_accounted"] = row["temporaries_bytes"] / row["accounted_bytes"]
        found.append(row)
        print({name: value for name, value in row.items() if name != "accounted"}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--held", type=int, default=4096, help="tokens of a slot before the call")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 4096], metavar="ROWS")
    parser.add_argument("--small", action="store_true", help="tiny widths, to try the script")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, cfg = machine(), slice_config(given.small)
    numerics = Numerics.native(cfg.quantized, rows_for(jax.default_backend()))
    room = given.held + max(*given.chunks, 1 + cfg.most_drafts)
    token_map = np.arange(cfg.vocab_size, dtype=np.int32) % cfg.engram_compressed_vocab_size
    weights = jax.block_until_ready((random_weights(cfg), make_tables(cfg, token_map, room)))
    cases = [Case("decode", given.slots, drafts) for drafts in (0, cfg.most_drafts)]
    # One prompt and as many as there are slots: the rows of the head differ.
    cases += [Case("prefill", n, rows) for rows in given.chunks for n in (1, given.slots)]
    begin = time.perf_counter()
    found = measured(Scene(cfg, numerics, weights, room, given.held), cases)
    settings = {
        "layers": cfg.num_hidden_layers, "hidden": cfg.hidden_size, "room": room,
        "held": given.held, "weight_bytes": nbytes(weights[0]),
        "numerics": numerics.fingerprint(), "rows": numerics.rows,
    }  # fmt: skip
    answers = {"seconds": time.perf_counter() - begin, "results": found}
    print(write_result("activations", given.machine, __doc__, settings, answers, given.out, start))


if __name__ == "__main__":
    main()
