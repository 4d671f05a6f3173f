"""Sums over one row: one row per program, in chunks of fixed lanes, then the lanes as a tree."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_LANES, _WARPS = 1024, 4


def _kernel(x_ref, out_ref, *, squared):
    width = x_ref.shape[1]
    row = pl.program_id(0)
    lane = lax.iota(jnp.int32, _LANES)

    def body(i, total):
        column = i * _LANES
        value = triton.load(
            x_ref.at[row, pl.ds(column, _LANES)],
            mask=column + lane < width,
            other=jnp.zeros((), x_ref.dtype),
        ).astype(jnp.float32)
        return total + (value * value if squared else value)

    total = lax.fori_loop(0, pl.cdiv(width, _LANES), body, jnp.zeros((_LANES,), jnp.float32))
    out_ref[row] = jnp.sum(total)


def row_sum(x: jax.Array, squared: bool, interpret: bool) -> jax.Array:
    """Sum [...] float32 over the last axis of x [..., K], or of its squares."""
    count = math.prod(x.shape[:-1])
    y = pl.pallas_call(
        functools.partial(_kernel, squared=squared),
        grid=(count,),
        out_shape=jax.ShapeDtypeStruct((count,), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2),
        interpret=interpret,
        name="row_sum",
    )(x.reshape(count, x.shape[-1]))
    return y.reshape(x.shape[:-1])
