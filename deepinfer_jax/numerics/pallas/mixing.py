"""The mixes of hyper-connections from their raw sums: a row per lane, all iterations in one kernel.

A loop of the compiler would start several kernels for each of its iterations, which takes longer
than all the arithmetic.
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

_ROWS = 32  # a warp


def _kernel(raw_ref, scale_ref, base_ref, pre_ref, post_ref, comb_ref, *, streams, iterations, eps):
    """Raw mixes [T, C(2 + C)] of some rows -> pre, post [T, C] and comb [T, C * C]."""
    c, count = streams, raw_ref.shape[0]
    row = pl.program_id(0) * _ROWS + lax.iota(jnp.int32, _ROWS)
    inside = row < count

    def read(column, part):
        at = raw_ref.at[row, jnp.full((_ROWS,), column, jnp.int32)]
        value = triton.load(at, mask=inside, other=np.float32(0))
        # As a product and a sum of their own, not as one fused operation.
        return jnp.minimum(value * scale_ref[part], np.finfo(np.float32).max) + base_ref[column]

    def write(ref, column, value):
        at = ref.at[row, jnp.full((_ROWS,), column, jnp.int32)]
        triton.store(at, value, mask=inside)

    def total(terms):
        return functools.reduce(jnp.add, terms)

    def over_dest(m, extra):
        sums = [total(m[s * c : s * c + c]) for s in range(c)]
        return [m[s * c + d] / (sums[s] + extra) for s in range(c) for d in range(c)]

    def over_source(m):
        sums = [total([m[s * c + d] for s in range(c)]) for d in range(c)]
        return [m[s * c + d] / (sums[d] + eps) for s in range(c) for d in range(c)]

    for i in range(c):
        write(pre_ref, i, 1 / (1 + jnp.exp(-read(i, 0))) + eps)
        write(post_ref, i, 2 * (1 / (1 + jnp.exp(-read(c + i, 1)))))
    m = [read(2 * c + i, 2) for i in range(c * c)]
    tops = [functools.reduce(jnp.maximum, m[s * c : s * c + c]) for s in range(c)]
    m = [jnp.exp(m[s * c + d] - tops[s]) for s in range(c) for d in range(c)]
    m = over_source([value + eps for value in over_dest(m, np.float32(0))])
    m = lax.fori_loop(1, iterations, lambda _, m: over_source(over_dest(list(m), eps)), m)
    for i, value in enumerate(m):
        write(comb_ref, i, value)


def split(
    raw: jax.Array, scale: jax.Array, base: jax.Array, streams: int, iterations: int, eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """raw float32 [T, C(2 + C)], scale [3], base [C(2 + C)] -> pre [T, C], post [T, C] and the
    doubly normalised comb [T, C source, C dest].
    """
    count, c = raw.shape[0], streams

    def shaped(width: int) -> Any:
        return jax.ShapeDtypeStruct((count, width), jnp.float32)

    kernel = functools.partial(
        _kernel, streams=c, iterations=iterations, eps=np.float32(eps)
    )  # fmt: skip
    pre, post, comb = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(count, _ROWS),),
        out_shape=(shaped(c), shaped(c), shaped(c * c)),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="mixing",
    )(raw, scale, base)
    return pre, post, comb.reshape(count, c, c)
