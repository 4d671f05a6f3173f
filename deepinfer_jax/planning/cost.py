"""What a step costs: a staircase over the row counts that a step is compiled for.

Legend: G sizes. A step of b rows runs in the program of the smallest size g >= b and takes
`ms(g) + slope * g + constant` milliseconds (docs/speculation.md "The plan").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


class CurveTooShort(ValueError):  # noqa: N818 - named for what is the matter
    """More requests run than the largest measured size has rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Step times of one device. Build and validate with `make_cost`.

    Repeating the last point changes no answer, so curves of several lengths can share a shape.

    Attributes:
        sizes: [G] int32, ascending.
        ms: [G], milliseconds of a step of `sizes` rows; times and objectives have its dtype.
        slope: scalar, milliseconds per row on top of the curve (`estimators.slope`).
        constant: scalar, milliseconds of a round whatever its rows: sampling, drafting.
    """

    sizes: Array
    ms: Array
    slope: Array
    constant: Array


def make_cost(
    sizes: Sequence[int] | Array,
    ms: Sequence[float] | Array,
    *,
    slope: float = 0.0,
    constant: float = 0.0,
    dtype: Any = np.float32,
) -> Cost:
    """Validated `Cost` of NumPy arrays (no device is touched); times in `dtype`.

    Raises ValueError when there is no size, sizes are not ascending positive integers, a time is
    not positive and finite, the two differ in length, or slope or constant is negative.
    """
    check_curve("sizes", sizes, "ms", ms)
    for name, value in (("slope", slope), ("constant", constant)):
        if not (np.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and >= 0 milliseconds, got {value}")
    times = np.asarray(ms, dtype)
    return Cost(np.asarray(sizes, np.int32), times, np.asarray(slope, dtype),
                np.asarray(constant, dtype))  # fmt: skip


def check_curve(sizes_name: str, sizes: Any, ms_name: str, ms: Any) -> None:
    """Raise a ValueError that names the first thing that makes `sizes`, `ms` no curve."""
    given, times = np.asarray(sizes), np.asarray(ms)
    if given.ndim != 1 or given.shape != times.shape or not given.size:
        raise ValueError(
            f"{sizes_name} and {ms_name} must be lists of one length, at least 1, got shapes "
            f"{given.shape} and {times.shape}; give one time per size"
        )
    if given.dtype.kind not in "iu" or times.dtype.kind not in "iuf":
        raise ValueError(
            f"{sizes_name} must be integers and {ms_name} numbers, got {given.dtype} and "
            f"{times.dtype}"
        )
    if given[0] < 1 or given[-1] >= 2**31 or (given[1:] <= given[:-1]).any():
        raise ValueError(
            f"{sizes_name} must be ascending row counts from 1 on, got {given.tolist()}; sort the "
            "points and keep one per size"
        )
    bad = ~(np.isfinite(times) & (times > 0))
    if bad.any():
        at = int(np.argmax(bad))
        raise ValueError(
            f"{ms_name} must be positive and finite milliseconds, got {times[at]} for "
            f"{given[at]} rows; measure that size again or leave it out"
        )


def check_requests(cost: Cost, requests: int) -> None:
    """Raise CurveTooShort unless a step with a row for each of `requests` has a time.

    Needs the sizes on the host: call it where a curve is chosen, before compiling with it.
    """
    largest = int(np.asarray(cost.sizes)[-1])
    if requests > largest:
        raise CurveTooShort(
            f"{requests} requests need a step of {requests} rows, the largest measured size is "
            f"{largest}; measure larger sizes or run fewer requests at once"
        )


def monotone(cost: Cost) -> Cost:
    """`cost` with its running maximum for a curve, as NumPy arrays.

    A larger size measured faster is noise; left in, it would make worthless drafts look free.
    """
    return dataclasses.replace(cost, ms=np.maximum.accumulate(np.asarray(cost.ms)))


def step_ms(cost: Cost, rows: Array | int) -> jax.Array:
    """Milliseconds of a step with `rows` [...] rows, in the dtype of `cost.ms`; inf beyond G."""
    sizes, ms = jnp.asarray(cost.sizes), jnp.asarray(cost.ms)
    # The bound is pinned to the product so that no program contracts it with the addition.
    traffic = jnp.minimum(cost.slope * sizes.astype(ms.dtype), jnp.finfo(ms.dtype).max)
    times = ms + traffic + cost.constant
    index = jnp.searchsorted(sizes, jnp.asarray(rows, jnp.int32), method="compare_all")
    return times.at[index].get(mode="fill", fill_value=jnp.inf)
