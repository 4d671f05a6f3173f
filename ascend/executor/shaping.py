"""Rules for primitives that move or cut values and compute nothing."""

from __future__ import annotations

import functools
from typing import Any

from ascend.executor import kinds
from ascend.executor.builder import Builder
from ascend.executor.kinds import torch
from ascend.executor.rules import aval, full, refuse, result, rule
from ascend.executor.values import Value


@rule("broadcast_in_dim")
def _broadcast(b: Builder, eqn: Any, x: Value, *dynamic: Value) -> Value:
    if x.shape == ():
        return x
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    wanted = [1] * len(shape)
    for size, place in zip(x.shape, places, strict=True):
        wanted[place] = size
    return viewed(b, x, tuple(wanted))


def viewed(b: Builder, x: Value, shape: tuple[int, ...]) -> Value:
    """A value in another shape; the elements stay in their order.

    Of a view the view of what it views, of a row cut out the row, of a sum one with its axis kept.
    """
    shape = tuple(shape)
    if x.shape == shape:
        return x
    fn = x.maker.fn if x.maker is not None and x.const is None else None
    if isinstance(fn, functools.partial) and x.maker is not None:
        base, how = x.maker.inputs[0], fn.keywords
        if fn.func in (view, torch.Tensor.reshape):
            return viewed(b, base, shape)
        if fn.func is torch.narrow and how["length"] == 1 and shape == _less(x.shape, how["dim"]):
            return b(torch.select, base, dim=how["dim"], index=how["start"])
        kept = how.get("dim")
        if fn.func is torch.sum and not how.get("keepdim") and shape == _more(base.shape, kept):
            return b(torch.sum, base, **how, keepdim=True)
    return b(view if _viewable(x, shape) else torch.Tensor.reshape, x, shape=shape)


def _less(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _more(shape: tuple[int, ...], axes: Any) -> tuple[int, ...]:
    return tuple(1 if d in axes else n for d, n in enumerate(shape))


def _viewable(x: Value, shape: tuple[int, ...]) -> bool:
    """Whether the elements need not move."""
    return x.meta.reshape(shape)._is_view() if x.meta.numel() else False


def view(x: Any, shape: tuple[int, ...]) -> Any:
    """`Tensor.view` with a name to be known by."""
    return x.view(shape)


@rule("reshape")
def _reshape(b: Builder, eqn: Any, x: Value) -> Value:
    if eqn.params.get("dimensions") is not None:
        raise refuse(eqn, "it permutes dimensions")
    old, new = aval(eqn).shape, eqn.params["new_sizes"]
    if x.shape == () and old != ():
        return x
    if x.shape != old and [n for n in old if n != 1] == [n for n in new if n != 1]:
        return viewed(b, x, _with_ones(x.shape, old, new))
    return viewed(b, full(b, x, old), new)


def _with_ones(own: Any, old: Any, new: Any) -> tuple[int, ...]:
    """The shape of a broadcast value when only dimensions of 1 come and go."""
    sizes = iter([have for have, n in zip(own, old, strict=True) if n != 1])
    return tuple(1 if n == 1 else next(sizes) for n in new)


@rule("squeeze")
def _squeeze(b: Builder, eqn: Any, x: Value) -> Value:
    if x.shape == ():
        return x
    gone = {d % len(x.shape) for d in eqn.params["dimensions"]}
    return viewed(b, x, tuple(n for d, n in enumerate(x.shape) if d not in gone))


@rule("expand_dims")
def _expand_dims(b: Builder, eqn: Any, x: Value) -> Value:
    if x.shape == () and aval(eqn).shape != ():
        return x
    shape = iter(x.shape)
    added = set(eqn.params["dimensions"])
    rank = len(result(eqn).shape)
    return viewed(b, x, tuple(1 if d in added else next(shape) for d in range(rank)))


@rule("transpose")
def _transpose(b: Builder, eqn: Any, x: Value) -> Value:
    order = tuple(eqn.params["permutation"])
    if x.shape == () or order == tuple(range(len(order))):
        return x
    return b(torch.Tensor.permute, x, dims=order)


@rule("rev")
def _reverse(b: Builder, eqn: Any, x: Value) -> Value:
    return b(torch.flip, full(b, x, aval(eqn).shape), dims=tuple(eqn.params["dimensions"]))


@rule("slice")
def _slice(b: Builder, eqn: Any, x: Value) -> Value:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    if x.shape == ():
        return x
    if x.columns is not None:
        found = _column(x, starts, limits)
        if found is not None:
            return found
    for axis, (start, limit, stride) in enumerate(zip(starts, limits, strides, strict=True)):
        if x.shape[axis] == aval(eqn).shape[axis]:  # it is not broadcast along this one
            x = cut(b, x, axis, start, limit, stride)
    return x


def _column(x: Value, starts: Any, limits: Any) -> Value | None:
    """The piece of a concatenation of columns that a slice asks for."""
    whole = all(
        s == 0 and n == size
        for s, n, size in zip(starts[:-1], limits[:-1], x.shape[:-1], strict=True)
    )
    assert x.columns is not None
    return x.columns[starts[-1]] if whole and limits[-1] == starts[-1] + 1 else None


def cut(b: Builder, x: Value, axis: int, start: int, limit: int, stride: int = 1) -> Value:
    """A part of one axis."""
    if (start, limit, stride) == (0, x.shape[axis], 1):
        return x
    if stride == 1:
        return b(torch.narrow, x, dim=axis, start=int(start), length=int(limit - start))
    return b(_strided, x, axis=axis, start=int(start), limit=int(limit), stride=int(stride))


def _strided(x: Any, axis: int, start: int, limit: int, stride: int) -> Any:
    return x[(slice(None),) * axis + (slice(start, limit, stride),)]


@rule("concatenate")
def _concatenate(b: Builder, eqn: Any, *values: Value) -> Value:
    axis = eqn.params["dimension"]
    parts = [full(b, v, aval(eqn, i).shape) for i, v in enumerate(values)]
    if len(parts) == 1:
        return parts[0]
    some = [i for i, p in enumerate(parts) if p.shape[axis]] or [0]
    parts = [parts[i] for i in some]
    made = joined(b, parts, axis)
    last = axis == len(result(eqn).shape) - 1
    if last and len(parts) > 1 and all(p.shape[-1] == 1 for p in parts):
        made.columns = tuple(values[i] for i in some)
    return made


def joined(b: Builder, parts: list[Value], axis: int) -> Value:
    """Values one behind the other along an axis."""
    return parts[0] if len(parts) == 1 else b(_cat, *parts, axis=axis)


def _cat(*parts: Any, axis: int) -> Any:
    return torch.cat(parts, axis)


@rule("stack")
def _stack(b: Builder, eqn: Any, *values: Value) -> Value:
    parts = [full(b, v, aval(eqn, i).shape) for i, v in enumerate(values)]
    return stacked(b, parts, eqn.params["axis"])


def stacked(b: Builder, parts: list[Value], axis: int) -> Value:
    """Values of one shape along a new axis."""
    return b(_stacked, *parts, axis=axis)


def _stacked(*parts: Any, axis: int) -> Any:
    return torch.stack(parts, axis)


@rule("unstack")
def _unstack(b: Builder, eqn: Any, x: Value) -> list[Value]:
    x = full(b, x, aval(eqn).shape)
    axis = eqn.params["axis"]
    return [b(torch.select, x, dim=axis, index=i) for i in range(x.shape[axis])]


@rule("split")
def _split(b: Builder, eqn: Any, x: Value) -> list[Value]:
    axis, start, made = eqn.params["axis"], 0, []
    x = full(b, x, aval(eqn).shape)
    for size in eqn.params["sizes"]:
        made.append(cut(b, x, axis, start, start + size))
        start += size
    return made


@rule("pad")
def _pad(b: Builder, eqn: Any, x: Value, value: Value) -> Value:
    config = [
        (int(low), int(high), int(inner)) for low, high, inner in eqn.params["padding_config"]
    ]
    x = full(b, x, aval(eqn).shape)
    for axis, (low, high, inner) in enumerate(config):
        if inner:
            x = _spaced(b, x, value, axis, inner)
        before, after = max(-low, 0), max(-high, 0)
        x = cut(b, x, axis, before, x.shape[axis] - after)
        for count, first in ((max(low, 0), True), (max(high, 0), False)):
            if count:
                shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
                fill = full(b, value, shape)
                x = joined(b, [fill, x] if first else [x, fill], axis)
    return x


def _spaced(b: Builder, x: Value, value: Value, axis: int, inner: int) -> Value:
    """`inner` copies of `value` between neighbours."""
    rows = [cut(b, x, axis, i, i + 1) for i in range(x.shape[axis])]
    gap = full(b, value, (*x.shape[:axis], inner, *x.shape[axis + 1 :]))
    parts = [part for row in rows for part in (row, gap)][:-1]
    return joined(b, parts, axis) if parts else x


@rule("tile")
def _tile(b: Builder, eqn: Any, x: Value) -> Value:
    return b(torch.Tensor.repeat, full(b, x, aval(eqn).shape), repeats=tuple(eqn.params["reps"]))


@rule("iota")
def _iota(b: Builder, eqn: Any, *dynamic: Value) -> Value:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    kept = kinds.kept(eqn.params["dtype"])
    line = torch.arange(shape[axis], device=b.device).to(kept)
    return b.const(line.reshape(tuple(n if d == axis else 1 for d, n in enumerate(shape))))
