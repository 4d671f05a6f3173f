"""Calls of operations: rule, selection, transport, gradient."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp

from kernels_bridge.local import local_operands
from kernels_bridge.machine import Machine, probe
from kernels_bridge.registry import INVARIANT, Op, Policy, select

_TRAINED = ("bfloat16", "float16", "float32")


def call(
    op: Op, *operands: jax.Array, asked: str | None = None, policy: Policy = INVARIANT,
    machine: Machine | None = None, **static: Any,
) -> Any:  # fmt: skip
    """The results of `op` by the implementation that `select` names.

    asked: the implementation, by its name; machine: default this one. The gradient of a kernel is
    that of the twin, computed anew.

    Raises ValueError for operands that do not fit, KernelRefusedError where nothing may run, both
    before anything is compiled; ValueError while the program is made where it is sharded outside of
    `jax.shard_map`.
    """
    if op.abstract is None:
        raise ValueError(f"{op.name} is called through deepinfer_jax.numerics")
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
    op.abstract(*shapes, **static)
    machine = probe() if machine is None else machine
    impl = select(op, machine, policy, shapes, static, asked)
    if impl.transport == "xla":
        return cast(Any, impl.run)(*operands, **static)
    return _in_kernel(op, impl.name, tuple(sorted(static.items())), *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_kernel(op, name, static, *operands):
    run = cast(Any, op.impl(name).run)
    return run(*local_operands(op.name, *operands), **dict(static))


def _forward(op, name, static, *operands):
    return _in_kernel(op, name, static, *operands), operands


def _backward(op, name, static, operands, slopes):
    trained = [i for i, each in enumerate(operands) if str(each.dtype) in _TRAINED]

    def twin(*moved):
        given = list(operands)
        for i, each in zip(trained, moved, strict=True):
            given[i] = each
        made = op.twin(*given, **dict(static))
        return jax.tree.map(lambda x: x if _has_slope(x) else None, made)

    _, pull = jax.vjp(twin, *(operands[i] for i in trained))
    pulled = pull(jax.tree.map(lambda x: x if _has_slope(x) else None, slopes))
    slots = dict(zip(trained, pulled, strict=True))
    return tuple(slots.get(i) for i in range(len(operands)))


def _has_slope(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


_in_kernel.defvjp(_forward, _backward)
