"""Operands of a kernel are arrays of one device: what the partitioner may still split is refused.

XLA cannot look into a kernel. In a program that is sharded over devices it therefore gathers every
operand on every device and lets each of them compute everything: right, and slower with each
device. Inside `jax.shard_map` shapes are those of one device, and nothing is gathered.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core
from jax.interpreters import batching, mlir

_LOCAL = core.Primitive("local_operands")
_LOCAL.multiple_results = True


def local_operands(name: str, *operands: jax.Array) -> list[jax.Array]:
    """`operands` themselves, where they lie on one device.

    Raises ValueError, when the program is made, where it spans several devices outside of
    `jax.shard_map` or inside one that leaves a mesh axis to the compiler. name: of the kernel.
    """
    return _LOCAL.bind(*operands, name=name)


def _refuse(name: str) -> None:
    raise ValueError(
        f"the kernel of {name} stands in a program over several devices, where XLA would gather "
        "its operands on each of them and compute everything everywhere: call it inside "
        "jax.shard_map, manual over every axis of the mesh, with the shapes of one device"
    )


@_LOCAL.def_impl
def _run(*operands: jax.Array, name: str) -> list[jax.Array]:
    if any(len(each.sharding.device_set) > 1 for each in operands if isinstance(each, jax.Array)):
        _refuse(name)
    return list(operands)


@_LOCAL.def_abstract_eval
def _abstract(*operands: Any, name: str) -> list[Any]:
    return list(operands)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, name: str) -> Any:
    if _is_split(ctx.module_context.axis_context):
        _refuse(name)
    return operands


def _is_split(context: Any) -> bool:
    """Whether the partitioner decides, of what is lowered here, which device computes what."""
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return getattr(context, "num_devices", 1) > 1
    wide = {name for name, size in mesh.shape.items() if size > 1}
    return bool(wide - set(context.manual_axes))


mlir.register_lowering(_LOCAL, _lower)
batching.primitive_batchers[_LOCAL] = lambda operands, dims, *, name: (
    _LOCAL.bind(*operands, name=name),
    dims,
)
