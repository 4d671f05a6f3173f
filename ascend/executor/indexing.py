"""Rules for reading and writing at indices that are known on the device only."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from ascend.executor import kinds, ranges
from ascend.executor.builder import Builder
from ascend.executor.elementwise import convert, wide
from ascend.executor.kinds import torch
from ascend.executor.rules import aval, full, refuse, result, rule, whole
from ascend.executor.shaping import cut, viewed
from ascend.executor.values import Value

_CLIP, _DROP = GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP


# -- dynamic slices --------------------------------------------------------------------------------


@rule("dynamic_slice")
def _dynamic_slice(b: Builder, eqn: Any, x: Value, *starts: Value) -> Value:
    sizes, shape = eqn.params["slice_sizes"], aval(eqn).shape
    x = full(b, x, shape)
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        most = shape[axis] - size
        if most == 0:
            continue
        start = _signed(b, start, aval(eqn, 1 + axis).dtype)
        if start.const is not None:
            at = min(max(int(start.const), 0), most)
            x = cut(b, x, axis, at, at + size)
        else:
            x = _selected(b, x, axis, _line(b, start, size, most))
    return x


def _selected(b: Builder, x: Value, axis: int, index: Value) -> Value:
    return b(_index_select, x, index, axis=axis)


def _index_select(x: Any, index: Any, axis: int) -> Any:
    return torch.index_select(x, axis, index)


def _line(b: Builder, start: Value, size: int, most: int) -> Value:
    """start .. start + size - 1, held inside, of a scalar start."""
    first = _held(b, convert(b, start, torch.int32), most)
    return b(torch.add, viewed(b, first, (1,)), b.const(torch.arange(
        size, dtype=torch.int32, device=b.device)))  # fmt: skip


def _signed(b: Builder, index: Value, dtype: Any) -> Value:
    """An index in int32 (int64 as it is), where torch takes no other; of uint32 what is beyond
    int32 as its largest, which is beyond every axis too.
    """
    if index.meta.dtype in (torch.int32, torch.int64) and not kinds.hidden(dtype):
        return index
    index = wide(b, index, dtype)
    if jnp.dtype(dtype).itemsize == 4:
        most = b.scalar(2**31 - 1, "int64")
        index = b(torch.minimum, index, most)
    return convert(b, index, torch.int32)


def _held(b: Builder, index: Value, most: int) -> Value:
    """An index within 0..most."""
    found = ranges.known(index)
    kept = index.meta.dtype
    if found is None or found[0] < 0:
        index = b(torch.maximum, index, b.const(torch.zeros((), dtype=kept, device=b.device)))
    if found is None or found[1] > most:
        top = b.const(torch.full((), most, dtype=kept, device=b.device))
        index = b(torch.minimum, index, top)
    return index


@rule("dynamic_update_slice")
def _dynamic_update_slice(b: Builder, eqn: Any, x: Value, update: Value, *starts: Value) -> Value:
    shape, sizes = aval(eqn).shape, aval(eqn, 1).shape
    x, update = whole(b, x, shape), full(b, update, sizes)
    lines = []
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size == shape[axis]:
            lines.append(None)
        else:
            start = _signed(b, start, aval(eqn, 2 + axis).dtype)
            lines.append(_line(b, start, size, shape[axis] - size))
    return _put(b, x, update, lines)


def _put(b: Builder, x: Value, update: Value, lines: list[Value | None]) -> Value:
    """x with `update` at the rows that each axis' line of indices names; None: all."""
    used = [i for i, line in enumerate(lines) if line is not None]
    indices = []
    for number, axis in enumerate(used):
        line = lines[axis]
        assert line is not None
        form = [1] * len(used)
        form[number] = line.shape[0]
        indices.append(viewed(b, line, tuple(form)))
    if not used:
        return update
    return b.emit(_put_at, (x, update, *indices), {"axes": tuple(used)}, in_place=_put_at_in_place)


def _put_at(x: Any, update: Any, *indices: Any, axes: Any) -> Any:
    return _put_at_in_place(x.clone(), update, *indices, axes=axes)


def _put_at_in_place(x: Any, update: Any, *indices: Any, axes: Any) -> Any:
    """The axes of the indices first, as torch wants them."""
    rest = [d for d in range(x.dim()) if d not in axes]
    x.permute(*axes, *rest).index_put_(indices, update.permute(*axes, *rest))
    return x


# -- gather ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which axes of the operand are indexed, and what stands in the result for each."""

    start_map: tuple[int, ...]
    batching: tuple[int, ...]  # axes of the operand that go with one of the indices each
    index_batching: tuple[int, ...]
    gone: tuple[int, ...]  # axes that the result does not have
    sizes: tuple[int, ...]


def _columns(b: Builder, indices: Value, shape: Any) -> list[Value]:
    """The parts of the last axis of the indices."""
    if indices.columns is not None:
        return [_without_last(b, c) for c in indices.columns]
    indices = full(b, indices, shape)
    return [b(torch.select, indices, dim=len(shape) - 1, index=j) for j in range(shape[-1])]


def _without_last(b: Builder, column: Value) -> Value:
    return viewed(b, column, column.shape[:-1]) if column.shape else column


def _noted(index: Value, parts: Value) -> Value:
    if index.range is None:
        index.range = ranges.known(parts)
    return index


def _starts(b: Builder, indices: Value, var: Any) -> list[Value]:
    dtype, shape = var.aval.dtype, var.aval.shape
    made = [_signed(b, column, dtype) for column in _columns(b, indices, shape)]
    if kinds.hidden(dtype):  # what is known is of their bits
        return made
    sources = indices.columns or (indices,) * len(made)
    return [_noted(m, s) for m, s in zip(made, sources, strict=True)]


@rule("gather")
def _gather(b: Builder, eqn: Any, x: Value, indices: Value) -> Value:
    d = eqn.params["dimension_numbers"]
    plan = _Plan(
        tuple(d.start_index_map), tuple(d.operand_batching_dims),
        tuple(d.start_indices_batching_dims),
        tuple(sorted((*d.collapsed_slice_dims, *d.operand_batching_dims))),
        tuple(eqn.params["slice_sizes"]),
    )  # fmt: skip
    shape, batch = aval(eqn).shape, aval(eqn, 1).shape[:-1]
    x = full(b, x, shape)
    starts = _starts(b, indices, eqn.invars[1])
    mode = GatherScatterMode.from_any(eqn.params["mode"])
    inside = _inside(b, starts, plan, shape) if mode == _DROP else None
    made = _picked(b, x, starts, plan, shape, batch, tuple(d.offset_dims), len(result(eqn).shape))
    if inside is None:
        return made
    fill = b.scalar(_fill(eqn), result(eqn).dtype)
    offset = set(d.offset_dims)
    spread = iter(batch)
    form = tuple(1 if i in offset else next(spread) for i in range(len(result(eqn).shape)))
    return b(torch.where, viewed(b, full(b, inside, batch), form), made, fill)


def _fill(eqn: Any) -> Any:
    value, dtype = eqn.params["fill_value"], result(eqn).dtype
    if value is not None:
        return value
    if kinds.is_float(dtype):
        return np.nan
    if kinds.is_bool(dtype) or jnp.issubdtype(dtype, jnp.unsignedinteger):
        return kinds.largest(dtype)
    return kinds.smallest(dtype)


def _inside(b: Builder, starts: list[Value], plan: _Plan, shape: Any) -> Value | None:
    """Which windows lie wholly inside; None: all of them."""
    found: Value | None = None
    for start, axis in zip(starts, plan.start_map, strict=True):
        most, known = shape[axis] - plan.sizes[axis], ranges.known(start)
        tests = []
        if known is None or known[0] < 0:
            zero = b.const(torch.zeros((), dtype=start.meta.dtype, device=b.device))
            tests.append(b(torch.ge, start, zero))
        if known is None or known[1] > most:
            top = b.const(torch.full((), most, dtype=start.meta.dtype, device=b.device))
            tests.append(b(torch.le, start, top))
        for test in tests:
            found = test if found is None else b(torch.bitwise_and, found, test)
    if found is not None and found.const is not None and bool(found.const.all()):
        return None
    return found


def _picked(
    b: Builder, x: Value, starts: list[Value], plan: _Plan, shape: Any, batch: Any, offset: Any,
    rank: int,
) -> Value:  # fmt: skip
    """The windows at `starts`, held inside."""
    indexed = [a for a in range(len(shape)) if a in plan.start_map or a in plan.batching]
    moved = dict(zip(plan.start_map, starts, strict=True))
    names = list(range(len(shape)))  # of the axes that x still has
    for axis in [a for a in indexed if a in moved and _one(moved[a]) is not None]:
        # The same place for all: a cut, no index.
        at = min(max(_one(moved[axis]) or 0, 0), shape[axis] - plan.sizes[axis])
        x = cut(b, x, names.index(axis), at, at + plan.sizes[axis])
        indexed.remove(axis)
        if axis in plan.gone:
            place = names.index(axis)
            x = viewed(b, x, x.shape[:place] + x.shape[place + 1 :])
            names.remove(axis)
    for axis in [a for a in names if a not in indexed]:
        x = cut(b, x, names.index(axis), 0, plan.sizes[axis])
    windows = [a for a in indexed if a not in plan.gone]
    rest = [a for a in names if a not in indexed]
    lead = (*batch, *(plan.sizes[a] for a in windows))
    if indexed:
        indices = [_index_of(b, a, moved, plan, shape, batch, windows) for a in indexed]
        x = _take(b, x, [names.index(a) for a in indexed], indices)
        x = full(b, x, (*lead, *x.shape[len(lead) :]))
    else:
        x = full(b, viewed(b, x, (*(1 for _ in batch), *x.shape)), (*batch, *x.shape))
    have = [("batch", i) for i in range(len(batch))] + [("axis", a) for a in windows + rest]
    kept = iter(("axis", a) for a in range(len(shape)) if a not in plan.gone)
    rows = iter(("batch", i) for i in range(len(batch)))
    order = tuple(have.index(next(kept) if i in offset else next(rows)) for i in range(rank))
    return x if order == tuple(range(rank)) else b(torch.Tensor.permute, x, dims=order)


def _one(start: Value) -> int | None:
    """The number that all of an index is, where that is known."""
    if start.const is None or not start.const.numel():
        return None
    low, high = int(start.const.min()), int(start.const.max())
    return low if low == high else None


def _index_of(
    b: Builder, axis: int, moved: dict[int, Value], plan: _Plan, shape: Any, batch: Any,
    windows: list[int],
) -> Value:  # fmt: skip
    """The index of an axis, with a dimension for each of the batch's and of the windows."""
    if axis in plan.batching:
        along = plan.index_batching[plan.batching.index(axis)]
        form = [1] * (len(batch) + len(windows))
        form[along] = batch[along]
        line = torch.arange(batch[along], dtype=torch.int32, device=b.device)
        return b.const(line.reshape(form))
    start = _held(b, moved[axis], shape[axis] - plan.sizes[axis])
    start = start if start.shape else viewed(b, start, (1,) * len(batch))
    start = viewed(b, start, (*start.shape, *(1 for _ in windows)))
    if axis in windows and plan.sizes[axis] > 1:
        form = [1] * (len(batch) + len(windows))
        form[len(batch) + windows.index(axis)] = plan.sizes[axis]
        line = torch.arange(plan.sizes[axis], device=b.device).to(start.meta.dtype)
        start = b(torch.add, start, b.const(line.reshape(form)))
    return start


def _take(b: Builder, x: Value, places: list[int], indices: list[Value]) -> Value:
    """x at the indices of some axes, whose common dimensions come first."""
    count = len(places)
    if places == list(range(count)) and (count == 1 or x.meta.is_contiguous()):
        index = indices[0]
        for size, more in zip(x.shape[1:count], indices[1:], strict=True):
            times = b.scalar(size, "int32")
            index = b(torch.add, b(torch.mul, convert(b, index, torch.int32), times), more)
        flat = viewed(b, index, (int(np.prod(index.shape)),))
        rows = viewed(b, x, (int(np.prod(x.shape[:count])), *x.shape[count:]))
        return viewed(b, _selected(b, rows, 0, flat), (*index.shape, *x.shape[count:]))
    rest = [d for d in range(len(x.shape)) if d not in places]
    if places != list(range(count)):
        x = b(torch.Tensor.permute, x, dims=(*places, *rest))
    return b(_at, x, *indices)


def _at(x: Any, *indices: Any) -> Any:
    return x[indices]


# -- scatter ---------------------------------------------------------------------------------------


@rule("scatter", "scatter-add", "scatter-max", "scatter-min")
def _scatter(b: Builder, eqn: Any, x: Value, indices: Value, updates: Value) -> Value:
    d = eqn.params["dimension_numbers"]
    shape, batch = aval(eqn).shape, aval(eqn, 1).shape[:-1]
    if d.operand_batching_dims:
        raise refuse(eqn, "it has batching dimensions")
    windows = [a for a in range(len(shape)) if a not in d.inserted_window_dims]
    sizes = [1] * len(shape)
    for axis, place in zip(windows, sorted(d.update_window_dims), strict=True):
        sizes[axis] = aval(eqn, 2).shape[place]
    plan = _Plan(tuple(d.scatter_dims_to_operand_dims), (), (), (), tuple(sizes))
    partial = [a for a in windows if a in plan.start_map]
    if any(sizes[a] != shape[a] for a in windows if a not in partial):
        raise refuse(eqn, "its windows begin at the first place of an axis and end before the last")
    x = whole(b, x, shape)
    if 0 in shape or 0 in aval(eqn, 2).shape:
        return x
    starts = _starts(b, indices, eqn.invars[1])
    mode = GatherScatterMode.from_any(eqn.params["mode"])
    inside = None if mode == _CLIP else _inside(b, starts, plan, shape)
    moved = dict(zip(plan.start_map, starts, strict=True))
    index = {a: _index_of(b, a, moved, plan, shape, batch, partial) for a in plan.start_map}
    rest = [a for a in windows if a not in partial]
    update = _arranged(b, eqn, updates, windows, partial, rest, len(batch))
    axes = sorted(index)
    lead = (*batch, *(sizes[a] for a in partial))
    if eqn.primitive.name == "scatter" and axes == list(range(len(axes))) and not partial:
        return _rows_written(b, eqn, x, update, [index[a] for a in axes], inside, batch)
    if inside is not None:
        inside = viewed(b, full(b, inside, batch), (*batch, *(1 for _ in partial)))
    return _written(b, eqn, x, update, [index[a] for a in axes], axes, inside, lead)


def _arranged(
    b: Builder, eqn: Any, updates: Value, windows: list[int], partial: list[int],
    rest: list[int], count: int,
) -> Value:  # fmt: skip
    """Updates with the batch first, then the windows that begin anywhere, then whole axes."""
    d, shape = eqn.params["dimension_numbers"], aval(eqn, 2).shape
    places = dict(zip(windows, sorted(d.update_window_dims), strict=True))
    rows = [i for i in range(len(shape)) if i not in d.update_window_dims]
    order = (*rows, *(places[a] for a in partial), *(places[a] for a in rest))
    assert len(rows) == count, "an update has a row for each index"
    updates = full(b, updates, shape)
    if order == tuple(range(len(shape))):
        return updates
    return b(torch.Tensor.permute, updates, dims=order)


def _written(
    b: Builder, eqn: Any, x: Value, update: Value, indices: list[Value], axes: list[int],
    inside: Value | None, lead: Any,
) -> Value:  # fmt: skip
    name = eqn.primitive.name
    if inside is not None and name == "scatter":
        update, indices = _redirected(b, x, update, indices, axes, inside, lead)
    elif inside is not None:
        neutral = {"scatter-add": 0, "scatter-max": kinds.smallest(result(eqn).dtype),
                   "scatter-min": kinds.largest(result(eqn).dtype)}[name]  # fmt: skip
        form = (*inside.shape, *(1 for _ in range(len(update.shape) - len(lead))))
        fill = b.scalar(neutral, result(eqn).dtype)
        update = b(torch.where, viewed(b, inside, form), update, fill)
    static = {"axes": tuple(axes)}
    if name == "scatter":
        return b.emit(_set, (x, update, *indices), static, in_place=_set_in_place)
    if name == "scatter-add":
        return b.emit(_add, (x, update, *indices), static, in_place=_add_in_place)
    if len(lead) != len(update.shape) or kinds.hidden(result(eqn).dtype):
        raise refuse(eqn, "it compares whole windows, or unsigned integers")
    spread = [convert(b, full(b, i, lead), torch.int64) for i in indices]
    how = "amax" if name == "scatter-max" else "amin"
    return b(_extreme, x, update, *spread, how=how, axes=tuple(axes))


def _rows_written(
    b: Builder, eqn: Any, x: Value, update: Value, indices: list[Value], inside: Value | None,
    batch: Any,
) -> Value:  # fmt: skip
    """A `scatter` into the leading axes: one index of rows, those axes taken together."""
    count = int(np.prod(batch))
    sizes = x.shape[: len(indices)]
    rows = viewed(b, x, (int(np.prod(sizes)), *x.shape[len(sizes) :]))
    index = viewed(b, full(b, _flat(b, indices, sizes), batch), (count,))
    update = viewed(b, update, (count, *update.shape[len(batch) :]))
    if inside is not None:
        inside = viewed(b, full(b, inside, batch), (count,))
        update, (index,) = _redirected(b, rows, update, [index], [0], inside, (count,))
    static = {"axes": tuple(range(len(sizes)))}
    return b.emit(_set_rows, (x, update, index), static, in_place=_set_rows_in_place)


def _flat(b: Builder, indices: list[Value], sizes: Any) -> Value:
    """The number of a row, of the indices of its axes; what is the same for all is added last."""
    made: Value | None = None
    alike = 0
    for place, index in enumerate(indices):
        stride = int(np.prod(sizes[place + 1 :]))
        one = _one(index)
        if one is not None:
            alike += one * stride
            continue
        part = convert(b, index, torch.int64)
        part = part if stride == 1 else b(torch.mul, part, b.const(_number(b, stride)))
        made = part if made is None else b(torch.add, made, part)
    if made is None:
        return b.const(_number(b, alike))
    return made if not alike else b(torch.add, made, b.const(_number(b, alike)))


def _number(b: Builder, value: int) -> Any:
    return torch.tensor(value, dtype=torch.int64, device=b.device)


def _set_rows(x: Any, update: Any, index: Any, axes: Any) -> Any:
    return _set_rows_in_place(x.clone(), update, index, axes=axes)


def _set_rows_in_place(x: Any, update: Any, index: Any, axes: Any) -> Any:
    x.view(-1, *x.shape[len(axes) :]).index_copy_(0, index, update)
    return x


def _redirected(
    b: Builder, x: Value, update: Value, indices: list[Value], axes: list[int], inside: Value,
    lead: Any,
) -> tuple[Value, list[Value]]:  # fmt: skip
    """Updates that lie outside do what the first one inside does, or nothing if none does.

    torch drops no updates, and leaving them out would give a shape that only the device knows.
    """
    count = int(np.prod(lead))
    flat = viewed(b, full(b, inside, lead), (count,))
    spread = [viewed(b, full(b, i, lead), (count,)) for i in indices]
    rows = viewed(b, update, (count, *update.shape[len(lead) :]))
    first = viewed(b, b(torch.argmax, convert(b, flat, torch.uint8), dim=0), (1,))
    chosen = [_selected(b, i, 0, first) for i in spread]
    order = (*axes, *(a for a in range(len(x.shape)) if a not in axes))
    turned = x if order == tuple(range(len(order))) else b(torch.Tensor.permute, x, dims=order)
    there = _selected(b, x, 0, chosen[0]) if axes == [0] else b(_at, turned, *chosen)
    any_inside = _selected(b, flat, 0, first)
    form = (1,) * (len(rows.shape) - 1)
    like = b(torch.where, viewed(b, any_inside, (1, *form)), _selected(b, rows, 0, first), there)
    rows = b(torch.where, viewed(b, flat, (count, *form)), rows, like)
    return rows, [b(torch.where, flat, i, c) for i, c in zip(spread, chosen, strict=True)]


def _first(x: Any, axes: Any) -> Any:
    """The indexed axes first."""
    return x.permute(*axes, *(d for d in range(x.dim()) if d not in axes))


def _set(x: Any, update: Any, *indices: Any, axes: Any) -> Any:
    return _set_in_place(x.clone(), update, *indices, axes=axes)


def _set_in_place(x: Any, update: Any, *indices: Any, axes: Any) -> Any:
    _first(x, axes).index_put_(indices, update)
    return x


def _add(x: Any, update: Any, *indices: Any, axes: Any) -> Any:
    return _add_in_place(x.clone(), update, *indices, axes=axes)


def _add_in_place(x: Any, update: Any, *indices: Any, axes: Any) -> Any:
    _first(x, axes).index_put_(indices, update, accumulate=True)
    return x


def _extreme(x: Any, update: Any, *indices: Any, how: str, axes: Any) -> Any:
    turned = _first(x, axes)
    place = indices[0]
    for size, index in zip(turned.shape[1:], indices[1:], strict=True):
        place = place * size + index
    flat = turned.reshape(-1)
    made = flat.scatter_reduce(0, place.reshape(-1), update.reshape(-1), how, include_self=True)
    made = made.reshape(turned.shape)
    back = [0] * x.dim()
    for new, old in enumerate((*axes, *(d for d in range(x.dim()) if d not in axes))):
        back[old] = new
    return made.permute(*back)
