"""The best columns of every row, in a total order: value, then lower column; -0 equals +0.

They come back as ascending columns, the order in which attention reads its entries. NaN is larger
than every number, as `jax.lax.top_k` has it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_bridge.adapters import deep_select
from kernels_bridge.ops.operands import fit
from kernels_bridge.registry import Capability, Impl, Op


def _rule(x, end, *, k: int) -> Any:
    sizes: dict[str, int] = {}
    fit("select_best", sizes, operand="x", shape=x, dims="T N", dtypes=("bfloat16", "float32"))
    fit("select_best", sizes, operand="end", shape=end, dims="T", dtypes=("int32",))
    if not 1 <= k <= sizes["N"]:
        raise ValueError(f"select_best: k must be in 1..{sizes['N']} (columns of x), got {k}")
    return jax.ShapeDtypeStruct((sizes["T"], k), jnp.int32)


def select_best_twin(x, end, *, k: int):
    """The k best of columns 0 .. end - 1 of x [T, N], end [T] int32 -> ascending columns [T, k]
    int32, -1 behind them where a row has fewer."""
    column = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    inside = column < end[:, None]
    # As keys that sort as numbers do, with a place below all of them for what does not count.
    key = jnp.where(inside, _ordered(x), jnp.iinfo(jnp.int32).min)
    _, best = lax.top_k(key, k)
    best = jnp.where(best < end[:, None], best, x.shape[1])
    ordered = jnp.sort(best, axis=1)
    return jnp.where(ordered == x.shape[1], -1, ordered).astype(jnp.int32)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 keys that order as the values do: -0 as +0, NaN on top, none is the least int32."""
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    return jnp.where(jnp.isnan(x), jnp.iinfo(jnp.int32).max, key)


def corrected(x: jax.Array, end: jax.Array, found: jax.Array, k: int) -> jax.Array:
    """`found` [T, k] of a kernel that orders by value alone, or the twin's where ties may differ.

    The largest values are any kernel's; which of the columns equal to the least of them it takes is
    not said. So these are counted: where more of them are in the row than were taken, somewhere in
    the call, or a NaN, all rows are selected again.
    """
    column = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    inside = column < end[:, None]
    picked = jnp.take_along_axis(x, jnp.maximum(found, 0), axis=1)
    least = jnp.min(jnp.where(found >= 0, picked, jnp.inf), axis=1, keepdims=True)
    equal = jnp.sum((x == least) & inside, axis=1, dtype=jnp.int32)
    taken = jnp.sum((picked == least) & (found >= 0), axis=1, dtype=jnp.int32)
    doubt = jnp.any(equal != taken) | jnp.any(jnp.isnan(x) & inside)
    return lax.cond(doubt, lambda: select_best_twin(x, end, k=k), lambda: found)


def _run(x, end, *, k: int):
    return corrected(x, end, deep_select.topk(x, end, k), k)


select_best = Op(
    "select_best",
    "the k best columns of every row, lower columns first among equals",
    _rule,
    select_best_twin,
    (
        deep_select.implementation(_run),
        Impl(
            "xla", "xla", Capability(batch_invariant=True), "top_k of integers that order alike",
            select_best_twin, seen="a CPU",
        ),
    ),
)  # fmt: skip
OPS = (select_best,)
