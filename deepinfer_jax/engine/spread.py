"""The engine's programs over a mesh: every device has slots of its own, experts lie on slots.

A device runs `programs` on its rows, its slots and its pages, whose numbers are its own; only rows
on their way to experts cross to others (`model.exchange`). Devices along an axis "context" have the
same slots, share what the slots have of global KV, and the rows (`model.dealt`). Arrays that the
host reads are gathered on every device, so that every process of a run sees all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax import edits as editing
from deepinfer_jax import layout, rounds, snapshots
from deepinfer_jax.axes import CONTEXT, Rules
from deepinfer_jax.cache import Cache, split_over
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine import programs
from deepinfer_jax.rounds import Round
from deepinfer_jax.snapshots import Snapshots

EVERYWHERE = PartitionSpec()
_STATIC = ("cfg", "numerics")


def owners(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which devices have slots of their own."""
    return tuple(name for name in mesh.axis_names if name != CONTEXT)


def ranks_of(mesh: Mesh) -> int:
    """Devices that share the slots of one."""
    return dict(mesh.shape).get(CONTEXT, 1)


def split(mesh: Mesh, axis: int = 0) -> PartitionSpec:
    """`axis` over all devices with slots of their own, in their order."""
    return PartitionSpec(*(None,) * axis, owners(mesh))


def cache_specs(mesh: Mesh) -> Cache:
    """How a `Cache` is split: slots and pages over `owners`, entries over those who share them."""
    ranks = ranks_of(mesh)
    entries = CONTEXT if ranks > 1 else None
    return split_over(Cache, owners(mesh), entries, ranks=ranks)


def snapshot_specs(mesh: Mesh) -> Snapshots:
    """How `Snapshots` are split."""
    return split_over(Snapshots, owners(mesh), None)


def round_specs(mesh: Mesh) -> Any:
    """How a `Round` of several is split before it is gathered."""
    names = (field.name for field in dataclasses.fields(Round) if field.name != "loads")
    return Round(**{name: split(mesh, 1) for name in names}, loads=EVERYWHERE)  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Programs:
    """Those of the module `programs` by the same names, over a mesh."""

    fill_program: Any
    decode_program: Any
    propose_program: Any
    settle_program: Any
    seat_program: Any
    edit_program: Any
    take_program: Any
    restore_program: Any
    whole_program: Any


@functools.cache
def programs_over(mesh: Mesh, rules: Rules) -> Programs:
    """The programs of a mesh with parameters laid out by rules; those of both are compiled once."""
    own, everywhere = (NamedSharding(mesh, spec) for spec in (split(mesh), EVERYWHERE))
    fill, decode, propose, settle = _model_programs(mesh, rules)
    take, restore = _snapshot_programs(mesh)
    return Programs(
        fill, decode, propose, settle,
        jax.jit(programs.seat, out_shardings=own),
        jax.jit(editing.place, out_shardings=own, donate_argnums=0),
        take, restore,
        jax.jit(_same, out_shardings=everywhere),
    )  # fmt: skip


def _same(tree: Any) -> Any:
    return tree


def _over(mesh: Mesh, f: Callable[..., Any], given: Any, made: Any) -> Callable[..., Any]:
    return jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)


def _gathered(tree: Any, mesh: Mesh) -> Any:
    return lax.with_sharding_constraint(tree, NamedSharding(mesh, EVERYWHERE))


def _run(
    mesh: Mesh, rules: Rules, cfg: ModelConfig, f: Any, given: tuple[Any, ...], params: Any,
    *args: Any,
) -> Any:  # fmt: skip
    """(Round, running, cache) of f(params, tables, ...) on every device, the round gathered.

    given: how the arguments behind the tables are split.
    """
    axes = owners(mesh)

    def here(*args: Any) -> Any:
        made, running, cache = f(*args)
        loads = jax.tree.map(lambda x: lax.psum(x.astype("int32"), axes), made.loads)
        return dataclasses.replace(made, loads=loads), running, cache

    made = round_specs(mesh), split(mesh), cache_specs(mesh)
    over = layout.over(here, params, cfg, mesh, rules, (EVERYWHERE, *given), made)
    found, running, after = over(params, *args)
    return _gathered(found, mesh), running, after


def _model_programs(mesh: Mesh, rules: Rules) -> tuple[Any, ...]:
    own, state = split(mesh), cache_specs(mesh)
    run = functools.partial(_run, mesh, rules)

    def fill(params, tables, rows, complete, beside, running, cache, sampling, cfg, numerics,
             packed=None):  # fmt: skip
        f = functools.partial(_fill, cfg=cfg, numerics=numerics)
        given = own, own, own, own, state, own, own
        args = tables, rows, complete, beside, running, cache, sampling, packed
        return run(cfg, f, given, params, *args)

    def decode(params, tables, running, cache, sampling, cfg, numerics, *, limit, leave, schedule,
               **static):  # fmt: skip
        f = functools.partial(_decode, cfg=cfg, numerics=numerics, together=owners(mesh), **static)
        given = own, state, own, EVERYWHERE, EVERYWHERE, EVERYWHERE
        args = tables, running, cache, sampling, limit, leave, schedule
        return run(cfg, f, given, params, *args)

    def settle(params, tables, running, drafts, confidence, legal, packed, cache, sampling, cfg,
               numerics):  # fmt: skip
        f = functools.partial(programs.settle, cfg=cfg, numerics=numerics)
        given = own, own, own, own, own, state, own
        args = tables, running, drafts, confidence, legal, packed, cache, sampling
        return run(cfg, f, given, params, *args)

    def propose(params, tables, running, cache, sampling, packed, cfg, numerics, *, size):
        f = functools.partial(programs.propose, cfg=cfg, numerics=numerics, size=size)
        given = EVERYWHERE, own, state, own, own
        over = layout.over(f, params, cfg, mesh, rules, given, (own, own))
        return _gathered(over(params, tables, running, cache, sampling, packed), mesh)

    made = functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="cache")
    return (
        made(fill),
        made(decode, static_argnames=(*_STATIC, "steps", "size", "rows", "mode")),
        jax.jit(propose, static_argnames=(*_STATIC, "size")),
        made(settle),
    )


def _decode(params, tables, running, cache, sampling, limit, leave, schedule, *, cfg, numerics,
            **more):  # fmt: skip
    return rounds.decode_many(
        params, tables, running, cache, sampling, cfg, numerics, limit=limit, leave=leave,
        schedule=schedule, **more,
    )  # fmt: skip


def _fill(params, tables, rows, complete, beside, running, cache, sampling, packed, cfg, numerics):
    return programs.fill(
        params, tables, rows, complete, beside, running, cache, sampling, cfg, numerics, packed
    )


def _snapshot_programs(mesh: Mesh) -> tuple[Any, Any]:
    own, cache, kept = split(mesh), cache_specs(mesh), snapshot_specs(mesh)
    take = _over(mesh, snapshots.take, (kept, cache, own, own), kept)
    restore = _over(mesh, snapshots.restore, (cache, kept, own, own), cache)
    return jax.jit(take, donate_argnums=0), jax.jit(restore, donate_argnums=0)
