"""Products of rows sorted by expert with the experts' weights, picked tile by tile."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from deepinfer_jax.numerics import stored
from deepinfer_jax.numerics.pallas import decoding, reading, schedule, walk
from deepinfer_jax.numerics.pallas.schedule import Schedule


def _kernel(
    expert_ref, live_ref, used_ref, layer_ref, x_ref, *refs, kind, how, column_tiles, assembly
):
    *weights, out_ref = refs
    k, n = x_ref.shape[1], out_ref.shape[1]
    number = pl.program_id(0)
    tile, j = number // column_tiles, number % column_tiles
    first, base = tile * how.rows, j * how.columns

    @pl.when(tile < used_ref[()])
    def _():
        lead = (layer_ref[()], expert_ref[tile])

        row = lax.iota(jnp.int32, how.rows)

        def x(column):
            inside = (row < live_ref[tile])[:, None]
            if k % how.depth:
                inside = inside & (column + lax.iota(jnp.int32, how.depth) < k)[None, :]
            mask = jnp.broadcast_to(inside, (how.rows, how.depth))
            return reading.load(x_ref, (), pl.ds(first, how.rows), pl.ds(column, how.depth), mask)

        limits = (n, k) if k % how.depth or n % how.columns else None
        place = reading.Place(
            weights, kind, lead, base, how.columns, how.depth, limits, x_ref.dtype, how.turned,
            assembly,
        )  # fmt: skip
        w = place.early, place.tile
        total = walk.whole(x, w, k, 1, 1, how)
        inside = base + lax.iota(jnp.int32, how.columns) < n
        mask = jnp.broadcast_to(inside[None, :], (how.rows, how.columns))
        where = out_ref.at[pl.ds(first, how.rows), pl.ds(base, how.columns)]
        triton.store(where, total.astype(out_ref.dtype), mask=mask)


def product(
    x: jax.Array, weight: Any, layer: jax.Array, expert: jax.Array, live: jax.Array,
    used: jax.Array, rows: int, dtype: Any, interpret: bool, how: Schedule | None = None,
) -> jax.Array:  # fmt: skip
    """x [tiles * rows, K] times weight[layer, expert[tile]] [N, K] -> [tiles * rows, N] of `dtype`.

    K is walked in one part. Only the first `used` tiles are computed, the others stay undefined.
    live [tiles]: leading rows of each tile that count; the others are not read.
    """
    k = x.shape[1]
    weight, layer = stored.addressable(weight, layer)
    if how is None:
        float32 = dataclasses.replace(schedule.float32(), rows=rows)
        how = (
            float32 if x.dtype == jnp.float32 else schedule.grouped(rows, k, stored.packed(weight))
        )
    n, tiles = stored.shape(weight)[-2], expert.shape[0]
    column_tiles = pl.cdiv(n, how.columns)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            kind=stored.storage(weight),
            how=how,
            column_tiles=column_tiles,
            assembly=decoding.assembly(interpret),
        ),
        grid=(tiles * column_tiles,),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], n), dtype),
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        interpret=interpret,
        name="grouped_product",
    )(expert, live, used, layer, x, *stored.arrays(weight))
