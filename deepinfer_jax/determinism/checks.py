"""The checks by name, and the one function that runs them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from deepinfer_jax.determinism import compilation, engine, serving, speculation, training
from deepinfer_jax.determinism.equality import unequal
from deepinfer_jax.determinism.reference import (
    Setup,
    check_arguments,
    default_tokens,
    make_setup,
)
from deepinfer_jax.determinism.schedules import Pair
from deepinfer_jax.loading import Model


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
      name: of the check.
      varied: what was varied against the reference.
      compared: values compared, as unsigned integers.
      differing: how many of them differ.
      seconds: time the check took, compiling included.
      first: where the first difference stood and what was there; None without.
      skipped: why nothing was compared; None where something was.
    """

    name: str
    varied: str
    compared: int
    differing: int
    seconds: float
    first: str | None = None
    skipped: str | None = None


@dataclasses.dataclass(frozen=True)
class Check:
    """A perturbation: `pairs` runs it and yields what must be equal.

    alone: it changes settings of the process, so no other check may run beside it.
    nothing: why `pairs` may yield nothing.
    """

    name: str
    varied: str
    pairs: Callable[[Setup], Iterator[Pair]]
    alone: bool = False
    nothing: str = "nothing to compare"


CHECKS = (
    Check("repetition", "nothing: the same calls twice", serving.repetition),
    Check("batch", "1 to 64 sequences in a call, any order, any slot", serving.batch),
    Check("remat", "the trainer's pass: gradients, recomputation, batch 8", training.remat),
    Check("padding", "calls of 8, 64 and 160 rows around the same few", serving.padding),
    Check("gradient", "the trainer's pass: gradients, batch 1", training.gradient),
    Check("chunks", "prompts whole and cut anywhere", serving.chunks),
    Check("drafts", "verification with wrong drafts", serving.drafts),
    Check("neighbours", "long chunks beside single tokens, joining, leaving", serving.neighbours),
    Check("preemption", "slot lost at any step, recomputed in another", serving.preemption),
    Check("donation", "caches donated to every call", serving.donation),
    Check("engine", "generate, more requests than slots, two orders", engine.engine),
    Check("scan", "decoding inside lax.scan", engine.scan),
    Check("score", "the trainer's pass: scores alone, batch 8", training.score),
    Check("speculation", "the model's drafter, any number verified", speculation.speculation),
    Check(
        "devices",
        "data and expert parallel over 2 to 8 devices",
        speculation.devices,
        nothing="one device",
    ),
    Check(
        "mesh",
        "generate over 2 to 8 devices that share KV, experts and requests",
        engine.mesh,
        nothing="one device",
    ),
    Check("compilation", "compilation cache cold and warm", compilation.compiled, alone=True),
)
_WORKERS = 2
NAMES = tuple(check.name for check in CHECKS)


def check(
    model: Model, *, tokens: int | None = None, seed: int = 0, names: Iterable[str] | None = None
) -> Iterator[Finding]:
    """Check the contract of determinism on this device, one perturbation after the other.

    Args:
      model: from `load`.
      tokens: tokens of each reply; default `default_tokens`.
      seed: of prompts, noise and schedules.
      names: which of `NAMES` to run; default all.

    Returns an iterator of one `Finding` per check, in the order of `names`, those that must run
    alone at the end. Nothing is computed before the first is asked for. Ctrl-C does not wait for
    checks in work: their threads end by themselves.

    Raises:
      TypeError, ValueError: a bad argument; by the call itself, before anything is compiled.
    """
    chosen = select(names)
    count = default_tokens(model.cfg, model.max_length) if tokens is None else tokens
    check_arguments(model.max_length, count, seed)
    return _run(model, chosen, count, seed)


def select(names: Iterable[str] | None) -> tuple[Check, ...]:
    """The checks of these names; ValueError for a name that is none."""
    if names is None:
        return CHECKS
    if isinstance(names, str):
        raise TypeError(f"names must be a list of names, got {names!r}; write [{names!r}]")
    known = {check.name: check for check in CHECKS}
    names = list(names)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown check {name!r}; there are: {', '.join(NAMES)}")
    if not names:
        raise ValueError(f"names is empty: give some of {', '.join(NAMES)}, or none for all")
    return tuple(known[name] for name in dict.fromkeys(names))


def _run(model: Model, chosen: tuple[Check, ...], tokens: int, seed: int) -> Iterator[Finding]:
    """Two checks at a time: most of their time is compiling, which keeps one core busy."""
    setup = make_setup(model, tokens=tokens, seed=seed)
    pool, wait = ThreadPoolExecutor(_WORKERS), True
    try:
        running = [pool.submit(run_check, each, setup) for each in chosen if not each.alone]
        for future in running:
            yield future.result()
    except KeyboardInterrupt:
        wait = False  # a check in work may go on for minutes
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)
    for each in chosen:
        if each.alone:
            yield run_check(each, setup)


def run_check(check: Check, setup: Setup) -> Finding:
    """Run one check to its end and count what differs."""
    start, compared, differing, first = time.perf_counter(), 0, 0, None
    for pair in check.pairs(setup):
        for name, want in pair.want.items():
            where = unequal(pair.got[name], want)
            compared += where.size
            differing += np.count_nonzero(where)
            if first is None and where.any():
                first = _describe(pair, name, where)
    seconds = time.perf_counter() - start
    skipped = None if compared else check.nothing
    return Finding(check.name, check.varied, compared, int(differing), seconds, first, skipped)


def _describe(pair: Pair, name: str, where: np.ndarray) -> str:
    index = tuple(np.argwhere(where)[0].tolist())
    got, want = np.asarray(pair.got[name])[index], np.asarray(pair.want[name])[index]
    return f"{pair.where}: {name}{list(index)} is {got!s} instead of {want!s}"
