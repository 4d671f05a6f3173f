"""Our CUDA kernels as JAX functions: built, loaded and registered at their first use.

Products of rows with weights in FP4 and FP8 on an NVIDIA GPU (Hopper). None has a gradient of its
own (`deepinfer_jax.numerics` gives them one). Raise NoKernelsError where they cannot be had.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_bridge import building, handlers

MANY = 64  # rows of a tile of many rows, whose operands and results lie otherwise
_STORED = handlers.Library(
    building.CUDA_SOURCE,
    ("product", "experts", "experts_twice"),
    prefix="deepinfer_cuda_",
    another=building.CUDA_ANOTHER,
    toolchain=building.CUDA,
    platform="CUDA",
)


def load() -> None:
    """Build the kernels if need be and register them, once in a process."""
    handlers.load(_STORED)


def product(
    x: jax.Array, codes: jax.Array, scale: jax.Array, layer: Any, bias: jax.Array | None,
    dtype: Any, parts: int, rows: int,
) -> jax.Array:  # fmt: skip
    """x [M, G, K] times codes [layers, G * N, K or K/2] at `layer` -> [1, M, G, N] of `dtype`.

    x is bfloat16; codes and scale are those of a `quant.Quantized` in FP4 or FP8, K a multiple of
    128, N of 32; bias float32 [G * N] or None; dtype bfloat16 or float32. parts: runs of K that are
    summed apart, at most 8; rows: of a tile, 8, 16 or 64.

    In tiles of 64 rows the parts of K come out alone, [parts, M, G, N] float32, without bias, and x
    is given with the pairs side by side that meet codes (`numerics.cuda.in_pairs`).
    """
    m, groups, _ = x.shape
    shape = (parts if rows == MANY else 1, m, groups, codes.shape[1] // groups)
    bias = jnp.zeros((0,), jnp.float32) if bias is None else bias
    attributes = {"parts": np.int64(parts), "rows": np.int64(rows)}
    operands = x, codes, scale, jnp.asarray(layer, jnp.int32), bias
    result = jax.ShapeDtypeStruct(shape, dtype)
    return handlers.call(_STORED, "product", result, *operands, attributes=attributes)


def experts(
    x: jax.Array, codes: jax.Array, scale: jax.Array, numbers: tuple[Any, ...], dtype: Any,
    parts: int,
) -> jax.Array:  # fmt: skip
    """x [tiles * rows, K] times codes [layers, E, N, K or K/2] at [layer, expert[tile]].

    numbers: layer, expert [tiles], live [tiles], used. Only the first `live` rows of the first
    `used` tiles are computed, the others stay undefined. Tiles have 8, 16 or 64 rows;
    x lies as for `product` in those of 64.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], codes.shape[2]), dtype)
    given = (jnp.asarray(one, jnp.int32) for one in numbers)
    attributes = {"parts": np.int64(parts)}
    return handlers.call(_STORED, "experts", result, x, codes, scale, *given, attributes=attributes)


def experts_twice(
    x: jax.Array, one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array],
    numbers: tuple[Any, ...], dtype: Any, parts: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`experts` with two weights (codes, scale) of one shape."""
    result = jax.ShapeDtypeStruct((x.shape[0], one[0].shape[2]), dtype)
    given = (jnp.asarray(number, jnp.int32) for number in numbers)
    attributes = {"parts": np.int64(parts)}
    return handlers.call(
        _STORED, "experts_twice", [result, result], x, *one, *other, *given, attributes=attributes
    )
