"""What integers can be: enough to see that an index lies inside, and need not be held there.

A jitted program normalises, clips and masks every index. Most of them are counters, remainders or
clipped values, of which all that decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ascend.executor import kinds
from ascend.executor.values import Value

Range = tuple[int, int]


def known(value: Value) -> Range | None:
    """The range of a value of integers or truth values; None where nothing is known."""
    found = value.const
    if value.range is None and found is not None and found.numel():
        if found.dtype.is_floating_point:
            return None
        value.range = int(found.min()), int(found.max())
    return value.range


def _product(x: Range, y: Range) -> Range:
    corners = [a * b for a in x for b in y]
    return min(corners), max(corners)


def _remainder(x: Range, y: Range) -> Range | None:
    if y[0] <= 0:
        return None
    most = y[1] - 1
    return (0 if x[0] >= 0 else max(x[0], -most)), (min(most, x[1]) if x[1] >= 0 else 0)


def _quotient(x: Range, y: Range) -> Range | None:
    if y[0] <= 0:
        return None
    corners = [int(a / b) if abs(a) < 1 << 50 else a // b for a in x for b in y]
    return min(corners), max(corners)


def _sign(x: Range) -> Range:
    return (x[0] > 0) - (x[0] < 0), (x[1] > 0) - (x[1] < 0)


def _and(x: Range, y: Range) -> Range | None:
    if x[0] >= 0 or y[0] >= 0:
        return 0, min(r[1] for r in (x, y) if r[0] >= 0)
    return None


_OF: dict[str, Callable[..., Range | None]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "neg": lambda x: (-x[1], -x[0]),
    "mul": _product,
    "rem": _remainder,
    "div": _quotient,
    "sign": _sign,
    "and": _and,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "clamp": lambda low, x, high: (
        min(max(low[0], x[0]), high[0]), min(max(low[1], x[1]), high[1])
    ),
    "select_n": lambda which, *cases: (min(c[0] for c in cases), max(c[1] for c in cases)),
    "concatenate": lambda *parts: (min(p[0] for p in parts), max(p[1] for p in parts)),
    "pad": lambda x, value: (min(x[0], value[0]), max(x[1], value[1])),
}  # fmt: skip
_OF["stack"] = _OF["concatenate"]
_SAME = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose rev slice convert_element_type "
    "dynamic_slice stop_gradient copy optimization_barrier reduce_max reduce_min split sort "
    "squeeze unstack".split()
)  # fmt: skip


def after(eqn: Any, values: Sequence[Value], made: Sequence[Value]) -> None:
    """Note the ranges of what an equation has made."""
    name = eqn.primitive.name
    for place, (var, value) in enumerate(zip(eqn.outvars, made, strict=True)):
        dtype = getattr(var.aval, "dtype", None)
        if value.const is not None or value.range is not None or dtype is None:
            continue
        if kinds.is_bool(dtype):
            value.range = 0, 1
        elif jnp.issubdtype(dtype, jnp.integer) and not kinds.hidden(dtype):
            value.range = _fitting(_found(name, eqn, values, place), dtype)


def _found(name: str, eqn: Any, values: Sequence[Value], place: int) -> Range | None:
    if name in ("argmax", "argmin"):
        return 0, max(eqn.invars[0].aval.shape[eqn.params["axes"][0]] - 1, 0)
    if name == "top_k" and place == 1:
        return 0, max(eqn.invars[0].aval.shape[-1] - 1, 0)
    ranges = [_of(value, var.aval.dtype) for value, var in zip(values, eqn.invars, strict=True)]
    if name in _SAME:
        return ranges[place if name == "sort" else 0]
    if name in ("reduce_sum", "cumsum"):
        return _total(ranges[0], eqn)
    if name == "select_n":
        ranges[0] = ranges[0] or (0, 1)
    if name not in _OF or any(r is None for r in ranges):
        return None
    return _OF[name](*ranges)


def _of(value: Value, dtype: Any) -> Range | None:
    """What is known, or at least what the dtype holds; None of floats and unsigned integers."""
    if kinds.is_bool(dtype):
        return known(value) or (0, 1)
    if not jnp.issubdtype(dtype, jnp.integer) or kinds.hidden(dtype):
        return None
    info = jnp.iinfo(dtype)
    return known(value) or (int(info.min), int(info.max))


def _total(x: Range | None, eqn: Any) -> Range | None:
    """Of a sum of some of the elements."""
    if x is None:
        return None
    shape, axes = eqn.invars[0].aval.shape, eqn.params.get("axes", (eqn.params.get("axis"),))
    count = math.prod(shape[a] for a in axes)
    return min(x[0], x[0] * count), max(x[1], x[1] * count)


def _fitting(found: Range | None, dtype: Any) -> Range | None:
    """None where a result might have wrapped around."""
    info = jnp.iinfo(dtype)
    if found is None or found[0] < info.min or found[1] > info.max:
        return None
    return found


def decided(name: str, values: Sequence[Value]) -> bool | None:
    """What a comparison of such ranges always gives, if it does."""
    x, y = (known(v) for v in values)
    if x is None or y is None:
        return None
    if name in ("ge", "lt"):
        yes, no = x[0] >= y[1], x[1] < y[0]
    elif name in ("gt", "le"):
        yes, no = x[0] > y[1], x[1] <= y[0]
    else:
        apart = x[1] < y[0] or x[0] > y[1]
        return (name == "ne") if apart else None
    if not (yes or no):
        return None
    return yes if name in ("ge", "gt") else no
