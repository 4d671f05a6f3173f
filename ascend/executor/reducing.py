"""Rules for primitives that bring an axis together: sums, choices, orders and products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ascend.executor import kinds
from ascend.executor.builder import Builder
from ascend.executor.elementwise import convert, order
from ascend.executor.kinds import torch
from ascend.executor.rules import aval, full, refuse, result, rule
from ascend.executor.shaping import cut, viewed
from ascend.executor.values import Value


def _axes(eqn: Any, name: str = "axes") -> tuple[int, ...]:
    return tuple(int(a) for a in eqn.params[name])


def summed(b: Builder, x: Value, axes: tuple[int, ...]) -> Value:
    """Sum over axes in the value's own dtype; float8 and such are not summed."""
    if not axes:
        return x
    return b(torch.sum, x, dim=axes, dtype=x.meta.dtype)


@rule("reduce_sum")
def _sum(b: Builder, eqn: Any, x: Value) -> Value:
    x = full(b, x, aval(eqn).shape)
    if x.meta.dtype in (torch.bfloat16, torch.float16):  # XLA rounds once, at the end
        return convert(b, summed(b, convert(b, x, torch.float32), _axes(eqn)), x.meta.dtype)
    return summed(b, x, _axes(eqn))


def _extreme(fn: Any) -> Any:
    def apply(b: Builder, eqn: Any, x: Value) -> Value:
        dtype, axes = aval(eqn).dtype, _axes(eqn)
        if not axes:
            return x
        if any(aval(eqn).shape[axis] == 0 for axis in axes):
            nothing = kinds.smallest if fn is torch.amax else kinds.largest
            return b.scalar(nothing(dtype), dtype)
        x = order(b, full(b, x, aval(eqn).shape), dtype)
        return order(b, b(fn, x, dim=axes), dtype)

    return apply


rule("reduce_max")(_extreme(torch.amax))
rule("reduce_min")(_extreme(torch.amin))


@rule("reduce_or", "reduce_and")
def _logical(b: Builder, eqn: Any, x: Value) -> Value:
    if not kinds.is_bool(aval(eqn).dtype):
        raise refuse(eqn, "it works on bits, not on truth values")
    if not _axes(eqn):
        return x
    fn = torch.any if eqn.primitive.name == "reduce_or" else torch.all
    return b(fn, full(b, x, aval(eqn).shape), dim=_axes(eqn))


@rule("reduce_prod")
def _prod(b: Builder, eqn: Any, x: Value) -> Value:
    x = full(b, x, aval(eqn).shape)
    for axis in sorted(_axes(eqn), reverse=True):
        x = b(torch.prod, x, dim=axis, dtype=x.meta.dtype)
    return x


@rule("argmax", "argmin")
def _arg(b: Builder, eqn: Any, x: Value) -> Value:
    (axis,) = _axes(eqn)
    dtype = aval(eqn).dtype
    x = order(b, full(b, x, aval(eqn).shape), dtype)
    x = convert(b, x, torch.uint8) if kinds.is_bool(dtype) else x
    fn = torch.argmax if eqn.primitive.name == "argmax" else torch.argmin
    return convert(b, b(fn, x, dim=axis), kinds.kept(eqn.params["index_dtype"]))


@rule("cumsum")
def _cumsum(b: Builder, eqn: Any, x: Value) -> Value:
    axis = eqn.params["axis"]
    x = full(b, x, aval(eqn).shape)
    if eqn.params["reverse"]:
        turned = b(torch.cumsum, b(torch.flip, x, dims=(axis,)), dim=axis, dtype=x.meta.dtype)
        return b(torch.flip, turned, dims=(axis,))
    return b(torch.cumsum, x, dim=axis, dtype=x.meta.dtype)


@rule("cummax", "cummin")
def _cumulative_extreme(b: Builder, eqn: Any, x: Value) -> Value:
    if eqn.params["reverse"]:
        raise refuse(eqn, "it runs backwards")
    dtype = aval(eqn).dtype
    fn = _running_most if eqn.primitive.name == "cummax" else _running_least
    x = order(b, full(b, x, aval(eqn).shape), dtype)
    return order(b, b(fn, x, axis=eqn.params["axis"]), dtype)


def _running_most(x: Any, axis: int) -> Any:
    return torch.cummax(x, axis).values


def _running_least(x: Any, axis: int) -> Any:
    return torch.cummin(x, axis).values


# -- reductions with a function of their own -------------------------------------------------------


@rule("reduce")
def _reduce(b: Builder, eqn: Any, *values: Value) -> list[Value]:
    """Sums, one or several at once; a guard around the running sum (`min`) is left out."""
    operands, starts = values[: len(values) // 2], values[len(values) // 2 :]
    if not _adds(eqn.params["jaxpr"].jaxpr, len(operands)):
        raise refuse(eqn, "its reducer is not a sum")
    made = []
    for place, (x, start) in enumerate(zip(operands, starts, strict=True)):
        total = summed(b, full(b, x, aval(eqn, place).shape), _axes(eqn, "dimensions"))
        known = start.const is not None and bool((start.const == 0).all())
        made.append(total if known else b(torch.add, total, start))
    return made


def _adds(jaxpr: Any, count: int) -> bool:
    """Whether the outputs are left + right, where left may have been held below a limit."""
    made: dict[Any, Any] = {var: var for var in jaxpr.invars}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("min", "max"):
            held = [v for v in eqn.invars if not isinstance(v, Literal)]
            limit = [v for v in eqn.invars if isinstance(v, Literal)]
            if len(held) != 1 or abs(float(limit[0].val)) < float(np.finfo(np.float32).max):
                return False
            made[eqn.outvars[0]] = made.get(held[0])
        elif name == "add":
            made[eqn.outvars[0]] = ("sum", *(made.get(v) for v in eqn.invars))
        else:
            return False
    pairs = zip(jaxpr.invars[:count], jaxpr.invars[count:], strict=True)
    wanted = [{left, right} for left, right in pairs]
    found = [made.get(v) for v in jaxpr.outvars]
    return all(isinstance(f, tuple) and set(f[1:]) == w for f, w in zip(found, wanted, strict=True))


# -- orders ----------------------------------------------------------------------------------------


@rule("sort")
def _sort(b: Builder, eqn: Any, *values: Value) -> list[Value]:
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    operands = [full(b, v, aval(eqn, i).shape) for i, v in enumerate(values)]
    where: Value | None = None
    for place in reversed(range(keys)):  # stable: the last key first
        dtype = aval(eqn, place).dtype
        key = order(b, _comparable(b, operands[place], dtype), dtype)
        if where is not None:
            key = b(_along, key, where, axis=axis)
        values_sorted, found = b(torch.sort, key, dim=axis, stable=True)
        if keys == 1 and len(operands) == 1:
            return [order(b, convert(b, values_sorted, operands[0].meta.dtype), dtype)]
        where = found if where is None else b(_along, where, found, axis=axis)
    assert where is not None
    return [b(_along, x, where, axis=axis) for x in operands]


def _comparable(b: Builder, x: Value, dtype: Any) -> Value:
    """bool is sorted as a number."""
    return convert(b, x, torch.uint8) if kinds.is_bool(dtype) else x


def _along(x: Any, index: Any, axis: int) -> Any:
    return torch.gather(x, axis, index)


@rule("top_k")
def _top_k(b: Builder, eqn: Any, x: Value) -> list[Value]:
    """The lower index first among equals: a stable sort, since torch's topk does not say."""
    k, dtype, axis = eqn.params["k"], aval(eqn).dtype, eqn.params["axis"]
    x = order(b, full(b, x, aval(eqn).shape), dtype)
    values, places = b(torch.sort, x, dim=axis, descending=True, stable=True)
    values, places = (cut(b, v, axis % len(x.shape), 0, k) for v in (values, places))
    return [order(b, values, dtype), convert(b, places, kinds.kept(result(eqn, 1).dtype))]


# -- products --------------------------------------------------------------------------------------


@rule("dot_general")
def _dot(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    (cx, cy), (bx, by) = eqn.params["dimension_numbers"]
    wanted = result(eqn).dtype
    working = torch.float32 if kinds.is_float(wanted) else kinds.kept(wanted)
    if jnp.dtype(wanted) == jnp.float64:
        working = torch.float64
    left, fx = _matrix(b, full(b, x, aval(eqn).shape), bx, cx, working, left=True)
    right, fy = _matrix(b, full(b, y, aval(eqn, 1).shape), by, cy, working, left=False)
    fn = torch.bmm if bx else torch.mm
    made = b(fn, left, right)
    batch = tuple(aval(eqn).shape[d] for d in bx)
    return convert(b, viewed(b, made, (*batch, *fx, *fy)), kinds.kept(wanted))


def _matrix(
    b: Builder, x: Value, batch: Any, summed_over: Any, dtype: Any, *, left: bool
) -> tuple[Value, tuple[int, ...]]:
    """[batch, free, summed] or [batch, summed, free], flattened, and the sizes of what is free."""
    free = [d for d in range(len(x.shape)) if d not in batch and d not in summed_over]
    order_ = (*batch, *free, *summed_over) if left else (*batch, *summed_over, *free)
    shape, sizes = x.shape, tuple(x.shape[d] for d in free)
    x = convert(b, x, dtype)
    if order_ != tuple(range(len(order_))):
        x = b(torch.Tensor.permute, x, dims=order_)
    depth, width = (int(np.prod([shape[d] for d in dims])) for dims in (summed_over, free))
    lead = (int(np.prod([shape[d] for d in batch])),) if batch else ()
    return viewed(b, x, (*lead, width, depth) if left else (*lead, depth, width)), sizes
