"""How long a round takes on this device, by the rows of its verification: the planner's data.

Measured on short sequences in the smallest cache; a round over long ones takes longer, with and
without drafts, by reading more of the cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import cache as caches
from deepinfer_jax import rounds, sampling
from deepinfer_jax.cache import Cache
from deepinfer_jax.engine import Sizes, make_sizes
from deepinfer_jax.engine import programs as engine_programs
from deepinfer_jax.engine.sizes import (
    MOST_STEPS,
    PREFILL_ROWS,
    SHORTEST_CAPACITY,
    STOP_IDS,
    specialised,
)
from deepinfer_jax.engine.warming import cores
from deepinfer_jax.loading import Model
from deepinfer_jax.planning.cost_table import CostTable, Curve
from deepinfer_jax.planning.schedules import Fill, Lengths
from deepinfer_jax.rows import Rows

REPEATS = 12
CALL_S = 0.3  # seconds that a measured call should take; slow rounds are timed fewer at a time
PROMPT = 32  # tokens that stand in every slot before the first round


def model_fingerprint(model: Model) -> str:
    """Twelve hex digits naming what the speed of a model depends on: shapes and storage."""
    storage = jax.tree.map(lambda x: (x.shape, str(x.dtype)), model.params)
    return hashlib.sha256(repr((model.cfg, storage)).encode()).hexdigest()[:12]


def hardware() -> str:
    """The device that programs run on, in words; for a CPU the processor and the usable cores."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    return f"{_processor()}, {cores()} cores"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def row_sizes(slots: int, block: int) -> tuple[int, ...]:
    """The verification sizes worth a program: one row a slot up to the whole block of each.

    Every size for a single slot; else 1, 2, 3, 4 rows and the block + 1 of each slot.
    """
    each = range(1, block + 2) if slots == 1 else sorted({*range(1, min(block, 3) + 2), block + 1})
    return tuple(slots * n for n in each)


def measure(
    model: Model, slots: Sequence[int], note: Callable[[str], None] = lambda text: None
) -> CostTable:
    """Compile and time the rounds of every number of slots. `note` hears what is going on.

    Raises ValueError for a model without drafter or numbers of slots that are none.
    """
    if not model.cfg.most_drafts:
        raise ValueError("this model has no draft layers: there is nothing to plan")
    wanted = sorted(set(slots))
    if not wanted or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in wanted):
        raise ValueError(f"slots must be integers of at least 1, got {list(slots)}")
    made = {
        count: _empty(model, make_sizes(count, SHORTEST_CAPACITY, model.cfg)) for count in wanted
    }
    programs = _programs(model, made, note)
    return CostTable(
        model=model_fingerprint(model),
        hardware=hardware(),
        numerics=model.numerics.fingerprint(),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        curves=tuple(_curve(model, made[count], programs[count], note) for count in wanted),
    )


@dataclasses.dataclass(frozen=True)
class _Programs:
    """Of one number of slots: prompts, and the rounds by (drafts made, rows verified)."""

    fill: Callable[..., Any]
    rounds: dict[tuple[int, int], Callable[..., Any]]


def _programs(
    model: Model, made: dict[int, Cache], note: Callable[[str], None]
) -> dict[int, _Programs]:
    """Everything that is run, compiled side by side."""
    block = model.cfg.most_drafts
    sizes = {
        slots: [(0, slots), *((block, rows) for rows in row_sizes(slots, block))] for slots in made
    }
    note(f"compiling {sum(1 + len(each) for each in sizes.values())} programs")
    with ThreadPoolExecutor(cores()) as pool:
        fills = {slots: pool.submit(_fill, model, cache) for slots, cache in made.items()}
        every = {
            slots: {size: pool.submit(_compiled, model, made[slots], *size) for size in each}
            for slots, each in sizes.items()
        }
        return {
            slots: _Programs(
                fills[slots].result(), {size: f.result() for size, f in every[slots].items()}
            )
            for slots in made
        }


def _curve(
    model: Model, cache: Cache, programs: _Programs, note: Callable[[str], None]
) -> Curve:  # fmt: skip
    slots = cache.slots
    times = _round_ms(model, _filled(model, cache, programs.fill), programs.rounds)
    for (size, count), ms in times.items():
        what = f"with {size} drafts, {count} rows verified" if size else "without drafts"
        note(f"{slots} slots: {ms:.2f} ms {what}")
    plain, *drafted = times.values()
    return Curve(slots, tuple(rows for size, rows in times if size), tuple(drafted), plain)


def _empty(model: Model, sizes: Sizes) -> Cache:
    """The engine's cache, every slot with all its pages."""
    cache = caches.init_cache(
        model.cfg, model.numerics, sizes.slots, sizes.capacity, paging=sizes.paging
    )
    pages = jnp.arange(sizes.pages, dtype=jnp.int32).reshape(sizes.slots, -1)
    return dataclasses.replace(cache, pages=pages)


def _fill_arguments(model: Model, cache: Cache, rows: Rows) -> tuple[Any, ...]:
    """What the engine calls its program with where no prompt ends and nobody decodes."""
    nobody, running = np.zeros(cache.slots, bool), engine_programs.idle(cache.slots, STOP_IDS)
    options = _options(cache.slots)
    return model.params, model.tables, rows, nobody, nobody, running, cache, options


def _fill(model: Model, cache: Cache) -> Callable[..., Any]:
    given = _fill_arguments(model, cache, engine_programs.make_rows([], PREFILL_ROWS[-1]))
    return engine_programs.fill_program.lower(*given, model.cfg, model.numerics).compile()


def _filled(model: Model, cache: Cache, fill: Callable[..., Any]) -> Cache:
    """The cache with a prompt of random tokens in every slot; `cache` is used up."""
    rng = np.random.default_rng(0)
    size = PREFILL_ROWS[-1]
    every = [
        (int(rng.integers(model.cfg.vocab_size)), slot, position)
        for slot in range(cache.slots)
        for position in range(PROMPT)
    ]
    for start in range(0, len(every), size):
        rows = engine_programs.make_rows(every[start : start + size], size)
        *_, cache = fill(*_fill_arguments(model, cache, rows))
    return cache


def _options(slots: int) -> sampling.Sampling:
    made = sampling.make_sampling(slots, 1.0, seeds=range(slots))
    return jax.device_put(sampling.untruncated(made) if specialised() else made)


def _arguments(model: Model, cache: Cache, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the engine calls its program with, statics left out."""
    slots, block = cache.slots, model.cfg.most_drafts
    running = rounds.Running(
        tokens=jnp.zeros((slots,), jnp.int32),
        active=jnp.ones((slots,), bool),
        left=jnp.full((slots,), 2**30, jnp.int32),
        stops=jnp.full((slots, STOP_IDS), -1, jnp.int32),
    )
    schedule = Fill(np.ones(block, np.float32)) if size else Lengths(np.int32(0))
    more = {
        "limit": np.int32(MOST_STEPS), "leave": np.int32(0), "schedule": schedule,
    }  # fmt: skip
    return (model.params, model.tables, running, cache, _options(slots)), more


def _compiled(model: Model, cache: Cache, size: int, rows: int) -> Callable[..., Any]:
    """The engine's own program of these sizes."""
    given, more = _arguments(model, cache, size)
    lowered = engine_programs.decode_program.lower(
        *given, model.cfg, model.numerics, steps=MOST_STEPS, size=size, rows=rows,
        mode="coupled", **more,
    )  # fmt: skip
    return lowered.compile()


def _round_ms(
    model: Model, cache: Cache, programs: dict[tuple[int, int], Callable[..., Any]]
) -> dict[tuple[int, int], float]:
    """Milliseconds of one round of each program: the fastest of its calls, which come in turns.

    Whatever else the machine does only adds time. A median of few calls keeps some of it, another
    share for each size, and the planner then believes a size slow that is not.
    """
    samples: dict[tuple[int, int], list[float]] = {sizes: [] for sizes in programs}
    rounds_of = dict.fromkeys(programs, 1)
    for turn in range(REPEATS + 1):
        for sizes, program in programs.items():
            own = jax.block_until_ready(jax.tree.map(jnp.copy, cache))
            given, more = _arguments(model, own, sizes[0])
            more["limit"] = np.int32(rounds_of[sizes])
            start = time.perf_counter()
            jax.block_until_ready(program(*given, **more))
            each = (time.perf_counter() - start) / rounds_of[sizes]
            if turn:
                samples[sizes].append(1e3 * each)
            else:
                rounds_of[sizes] = int(np.clip(CALL_S / each, 1, MOST_STEPS))
    return {sizes: min(each) for sizes, each in samples.items()}
