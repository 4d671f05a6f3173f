"""Products of rows with a weight, plain or stored: alone, or group by group.

Those with the weights of experts are in `grouped`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from deepinfer_jax import quant
from deepinfer_jax.numerics import stored
from deepinfer_jax.numerics.elements import round_to
from deepinfer_jax.numerics.pallas import decoding, reading, schedule, walk
from deepinfer_jax.numerics.pallas.schedule import Schedule

_FEW_TILES = 132  # with fewer tiles than this, the parts of K run side by side
DECODED_ROWS = 512  # from here on, decoding a whole weight first costs less than tile by tile
_BAND = 8  # row tiles that walk over the columns together, so that both operands stay in cache


def _place(number: Any, row_tiles: int, column_tiles: int) -> tuple[Any, Any]:
    """(row tile, column tile) of the number-th program: in bands of a few row tiles."""
    if row_tiles <= _BAND:
        return number % row_tiles, number // row_tiles
    band = _BAND * column_tiles
    first = number // band * _BAND
    height = jnp.minimum(row_tiles - first, _BAND)
    return first + number % band % height, number % band // height


def _kernel(
    x_ref, *refs, kind, pieces, parts, how, row_tiles, column_tiles, biased, layered, assembly
):
    """One tile of one group's (or one part's) product; x [M, G, K], weight [G * N, K]."""
    *weights, out_ref = refs
    bias_ref = weights.pop() if biased else None
    lead = (weights.pop()[()],) if layered else ()
    m, _, k = x_ref.shape
    n = out_ref.shape[-1]
    i, j = _place(pl.program_id(0), row_tiles, column_tiles)
    group = pl.program_id(1)
    first, base = i * how.rows, group * n + j * how.columns
    whole_k = k % how.depth == 0
    dtype = jnp.float32 if pieces > 1 else x_ref.dtype
    row = first + lax.iota(jnp.int32, how.rows)

    def x(column):
        mask = None
        if not (whole_k and m % how.rows == 0):
            inside = column + lax.iota(jnp.int32, how.depth) < k
            mask = (row < m)[:, None] & inside[None, :]
        where = pl.ds(first, how.rows), group, pl.ds(column, how.depth)
        at = x_ref.at[where]
        if mask is None:
            return triton.load(at)
        return triton.load(at, mask=mask, other=jnp.zeros((), x_ref.dtype))

    limits = None if whole_k and n % how.columns == 0 else ((group + 1) * n, k)
    place = reading.Place(
        weights, kind, lead, base, how.columns, how.depth, limits, dtype, how.turned, assembly
    )  # fmt: skip
    w = place.early, place.tile

    apart = len(out_ref.shape) == 4  # every part in its own program and its own slice
    if apart:
        p, each = pl.program_id(2), k // parts
        total = walk.part(x, w, p * each, each, pieces, how)
        total = total.T if how.turned else total
    else:
        p, total = None, walk.whole(x, w, k, parts, pieces, how)
        if bias_ref is not None:
            column = lax.iota(jnp.int32, how.columns)
            at = bias_ref.at[pl.ds(base, how.columns)]
            inside = j * how.columns + column < n
            total = total + triton.load(at, mask=inside, other=np.float32(0))[None, :]
    rows, columns = pl.ds(first, how.rows), pl.ds(j * how.columns, how.columns)
    inside = (row < m)[:, None] & (j * how.columns + lax.iota(jnp.int32, how.columns) < n)[None, :]
    where = (rows, group, columns) if p is None else (p, rows, group, columns)
    triton.store(out_ref.at[where], total.astype(out_ref.dtype), mask=inside)


def order(weight: Any) -> int:
    """Parts in which `product` sums over K: the same for every storage and number of rows."""
    n, k = stored.shape(weight)
    return schedule.parts(k, n)


def choose(x: jax.Array, weight: Any) -> Schedule:
    """The schedule for x [M, G, K] and weight [G * N, K]."""
    m, (n, k) = x.shape[0], stored.shape(weight)
    if x.dtype == jnp.float32:
        return schedule.float32()
    if stored.packed(weight):
        return schedule.decoded(m, k, n)
    return schedule.exact(m, k, n) if _is_exact(x, weight) else schedule.plain(m, k, n)


def _is_exact(x: jax.Array, weight: Any) -> bool:
    plain = stored.storage(weight) == "plain"
    return plain and weight.dtype == jnp.float32 and x.dtype == jnp.bfloat16


def product(
    x: jax.Array, weight: Any, dtype: Any, interpret: bool, how: Schedule | None = None,
    apart: bool | None = None, bias: jax.Array | None = None, parts: int | None = None,
) -> jax.Array:  # fmt: skip
    """x [M, G, K] times weight [G * N, K], group by group -> [M, G, N], rounded once to `dtype`.

    x is bfloat16 or float32; the weight is a `quant.Quantized`, a `stored.Layered`, an array of x's
    dtype, or float32;
    `bias` is float32 [G * N], added before the rounding.
    `how` replaces the schedule, `apart` says whether every part of K has a program of its own;
    neither changes a bit. `parts` of K in place of those of `order` do.
    """
    m, groups, _ = x.shape
    if stored.packed(weight) and m >= DECODED_ROWS and x.dtype == jnp.bfloat16:
        x, weight = stored.after(x, weight)
        weight = quant.dequantize(stored.alone(weight), x.dtype)
    weight = stored.reachable(weight)
    how = choose(x, weight) if how is None else how
    parts, n = parts or order(weight), stored.shape(weight)[0] // groups
    row_tiles, column_tiles = pl.cdiv(m, how.rows), pl.cdiv(n, how.columns)
    if apart is None:
        apart = parts > 1 and row_tiles * column_tiles * groups < _FEW_TILES
    shape = (parts, m, groups, n) if apart else (m, groups, n)
    kernel = functools.partial(
        _kernel, kind=stored.storage(weight), pieces=3 if _is_exact(x, weight) else 1, parts=parts,
        how=how, row_tiles=row_tiles, column_tiles=column_tiles,
        biased=bias is not None and not apart,
        layered=isinstance(weight, stored.Layered), assembly=decoding.assembly(interpret),
    )  # fmt: skip
    arrays = stored.arrays(weight)
    if isinstance(weight, stored.Layered):
        arrays.append(weight.layer)
    if bias is not None and not apart:
        arrays.append(bias)
    y = pl.pallas_call(
        kernel,
        grid=(row_tiles * column_tiles, groups, parts if apart else 1),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32 if apart else dtype),
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        interpret=interpret,
        name="product",
    )(x, *arrays)
    if not apart:
        return y
    total = functools.reduce(jnp.add, list(y))
    return round_to(total if bias is None else total + bias.reshape(1, groups, n), dtype)
