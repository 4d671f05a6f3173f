"""Which programs a run can come to need, compiled before it begins.

The engine calls few programs, whose shapes are fixed by its sizes, its policy and the kinds of its
requests: so they can be listed. A program that is lowered and compiled here, with arguments of the
same shapes, is the one that the engine's own call finds later.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from deepinfer_jax import moving
from deepinfer_jax.config import VisionConfig
from deepinfer_jax.engine import programs
from deepinfer_jax.engine.calls import illustrated
from deepinfer_jax.engine.sites import ONE, Site, State
from deepinfer_jax.engine.sizes import (
    MOST_STEPS,
    Sizes,
    image_rows,
    prefill_rows,
    span_lengths,
)
from deepinfer_jax.engine.watch import Signature, compilations, name_of, signature
from deepinfer_jax.grammar import bits
from deepinfer_jax.images import encoding
from deepinfer_jax.images.gallery import encoding_call
from deepinfer_jax.images.pixels import Picture
from deepinfer_jax.loading import Model
from deepinfer_jax.planning.policies import Move
from deepinfer_jax.requests import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Warming:
    """How far warming up has come: `done` of `total` programs; `label` says what is compiled."""

    done: int
    total: int
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What requests ask of an engine.

    prompt_rows: sizes of calls with prompts. shared: some begin alike, for a page or more.
    free, ruled: replies of more than the token that their prompt gives, without and with grammars.
    masked: a prompt's own token may have to follow a grammar.
    image_rows: sizes of calls with images. pictures: one of each class of sizes, of the tower.
    """

    prompt_rows: tuple[int, ...]
    shared: bool
    free: bool
    ruled: bool
    masked: bool
    image_rows: tuple[int, ...] = ()
    pictures: tuple[Picture, ...] = ()


def needs(requests: Sequence[Request], sizes: Sizes, vision: VisionConfig | None = None) -> Needs:
    """Of `requests` in an engine of `sizes`; never too little. `vision`: of the model's tower."""
    scarce = sizes.pages < sizes.slots * sizes.table  # then replies may be prompts once more
    lengths = [len(r.tokens) + (r.options.max_tokens if scarce else 0) for r in requests]
    together = sum(sorted(lengths)[-sizes.slots :])
    most = min(together, sizes.step_rows)
    rows = tuple(sorted({prefill_rows(count, sizes) for count in range(1, most + 1)}))
    page = sizes.page_tokens
    heads = collections.Counter(r.tokens[:page] for r in requests if len(r.tokens) > page)
    longer = [r for r in requests if r.options.max_tokens > 1]
    spans = span_lengths(requests, vision)
    return Needs(
        prompt_rows=rows,
        shared=bool(sizes.snapshots) and any(count > 1 for count in heads.values()),
        free=any(r.options.rule is None for r in longer),
        ruled=any(r.options.rule is not None for r in longer),
        masked=any(r.options.rule is not None for r in requests),
        image_rows=tuple(sorted({image_rows(length) for length in spans})),
        pictures=_every_size(requests, vision),
    )


def _every_size(requests: Sequence[Request], vision: VisionConfig | None) -> tuple[Picture, ...]:
    """One picture of each class of sizes that `requests` show."""
    shown = [image.picture for each in requests for image in each.images]
    if vision is None:
        return ()
    ratio = vision.downsample_ratio
    found = {
        encoding.size_class(each.height, each.width, ratio): each
        for each in shown
        if isinstance(each, Picture)
    }
    return tuple(found[size] for size in sorted(found, reverse=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """A call of a jitted program that is going to be made: `label` is for people."""

    label: str
    program: Any
    args: tuple[Any, ...]
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def compile(self) -> None:
        """Make the program; its call will find it."""
        self.program.lower(*self.args, **self.more).compile()


def planned(
    model: Model, sizes: Sizes, needs: Needs, moves: Sequence[Move], state: State, site: Site = ONE,
    *, rearranged: bool = False,
) -> list[Planned]:  # fmt: skip
    """The calls to come, those that take longest to compile first. Nothing is run.

    `moves`: those of the policy; `state`: the engine's; `rearranged`: whether experts move.
    """
    each, put = _Making(model, sizes, state, site), site.slots
    every = [*_prompts(each, needs), *_rounds(each, needs, moves), *_pictures(model, needs)]
    every += _movings(state, site) if rearranged else ()
    running, cache, _, kept, *_ = state
    slots, none = put((np.zeros(sizes.slots, np.int32), np.zeros(sizes.slots, bool)))
    run = site.programs
    if needs.shared:
        every += [
            Planned("snapshots", run.take_program, (kept, cache, slots, slots)),
            Planned("beginnings", run.restore_program, (cache, kept, slots, slots)),
        ]
    if running.edits is not None:
        one = jax.tree.map(lambda x: np.zeros((1, *x.shape[1:]), x.dtype), running.edits)
        args = running.edits, *site.all((np.int32(0), one))
        every += [Planned("edits", run.edit_program, args)]
    bare = dataclasses.replace(running, edits=None)
    stops = put(np.zeros((sizes.slots, sizes.stop_ids), np.int32))
    return [*every, Planned("seats", run.seat_program, (bare, none, slots, stops))]


@dataclasses.dataclass(frozen=True)
class _Making:
    """What all calls are made of."""

    model: Model
    sizes: Sizes
    state: State
    site: Site

    def masks(self, *places: int) -> Any:
        """[B, W] or [B, places, W], as the host packs them."""
        words = bits.words(self.model.cfg.vocab_size)
        return self.site.slots(np.zeros((self.sizes.slots, *places, words), np.uint32))


def _prompts(of: _Making, needs: Needs) -> Iterator[Planned]:
    model, site, state = of.model, of.site, of.state
    none = site.slots(np.zeros(of.sizes.slots, bool))
    masks = [None, of.masks()] if needs.masked else [None]
    text = [programs.host_rows([], site.parts * rows) for rows in needs.prompt_rows]
    shown = [programs.host_rows([], rows) for rows in needs.image_rows]
    shown = [illustrated(rows, [], model.cfg, model.numerics) for rows in shown]
    for rows in (*text, *shown):
        what = "prompts" if rows.embeddings is None else "prompts with images"
        for packed in masks:
            yield Planned(
                f"{what}, {rows.slots.shape[0]} rows"
                + (" under grammars" if packed is not None else ""),
                site.programs.fill_program,
                (state.params, state.tables, site.slots(rows), none, none, *state[:3],
                 model.cfg, model.numerics, packed),
            )  # fmt: skip


def _pictures(model: Model, needs: Needs) -> Iterator[Planned]:
    for each in needs.pictures:
        program, args = encoding_call(each, model.params, model.cfg, model.numerics)
        yield Planned(f"images of {each.height} x {each.width} patches", program, args)


def _movings(state: State, site: Site) -> Iterator[Planned]:
    """One program for each stack of experts, whatever moves where."""
    if site.mesh is None:
        return
    for name, placement in site.placements.items():
        stay = state.params, name, 0, placement, placement, site.mesh
        yield Planned(f"moves of experts, {name}", *moving.moving_call(*stay))


def _rounds(of: _Making, needs: Needs, moves: Sequence[Move]) -> Iterator[Planned]:
    model, site, slots, run = of.model, of.site, of.sizes.slots, of.site.programs
    own = slots // site.parts  # the policy's rows are those of one device
    state = of.state.params, of.state.tables, of.state.running
    rest = *of.state[1:3], model.cfg, model.numerics
    if needs.free:
        for move in {(move.size, move.rows): move for move in moves}.values():
            given = {"limit": np.int32(1), "leave": np.int32(0), "schedule": move.schedule}
            yield Planned(
                f"decode {slots} slots" + (f", {move.size} drafts" if move.size else "")
                + (f", {move.rows} rows" if move.rows != own * (move.size + 1) else ""),
                run.decode_program, (*state, *rest),
                {"steps": MOST_STEPS, "size": move.size, "rows": move.rows, "mode": "coupled",
                 **site.all(given)},
            )  # fmt: skip
    for size in sorted({move.size for move in moves}, reverse=True) if needs.ruled else ():
        if size:
            yield Planned(
                f"{size} drafts under grammars", run.propose_program,
                (*state, *rest[:2], of.masks(), *rest[2:]), {"size": size},
            )  # fmt: skip
        drafts, sure = np.zeros((slots, size), np.int32), np.zeros((slots, size), np.float32)
        given = site.slots((drafts, sure, np.zeros(slots, np.int32)))
        yield Planned(
            f"verify {size} drafts under grammars" if size else f"decode {slots} under grammars",
            run.settle_program, (*state, *given, of.masks(size + 1), *rest),
        )  # fmt: skip


def compiled(
    every: Sequence[Planned], progress: Callable[[Warming], None] | None = None
) -> tuple[dict[str, list[Signature]], float, int]:
    """Compile all side by side: signatures by program, seconds, how many were not there yet."""
    start = time.perf_counter()
    with compilations(every_thread=True) as found:
        pool = ThreadPoolExecutor(min(cores(), max(len(every), 1)))
        made = {pool.submit(each.compile): each for each in every}
        try:
            _watch(made, progress)
            for each in made:
                each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    known: dict[str, list[Signature]] = {}
    for each in every:
        alike = known.setdefault(name_of(each.program), [])
        alike.append(signature(each.program, each.args, each.more))
    return known, time.perf_counter() - start, found.count


def _watch(made: dict[Future[None], Planned], progress: Callable[[Warming], None] | None) -> None:
    """Wait for all, and tell of the first that is not there."""
    while rest := [future for future in made if not future.done()]:
        if progress is not None:
            progress(Warming(len(made) - len(rest), len(made), made[rest[0]].label))
        wait(rest, return_when="FIRST_COMPLETED")


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # not Linux
