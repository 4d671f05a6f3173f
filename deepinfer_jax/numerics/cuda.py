"""Products with weights in FP4 and FP8 as CUDA kernels, for `rows="cuda"`: which, in what order.

The order of a sum belongs to the sizes of the weight and to its storage alone. K is cut into blocks
of 128, and the blocks into `parts` equal runs whose sums are added one after the other; in a block,
the tensor cores take K as `in_order` says. How many rows a tile has (`height`) changes no bit, nor
does decoding the whole weight first, which is faster for many rows. Other weights, other rows and
sizes that fill no tile run as for "pallas".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import quant
from deepinfer_jax.numerics import stored
from deepinfer_jax.numerics.elements import round_to
from deepinfer_jax.numerics.pallas import products
from deepinfer_jax.numerics.sums import ordered_sum
from kernels_bridge import cuda as kernels

BLOCK, OUTPUTS = 128, 32  # K and N are multiples
HEIGHTS = (8, 16, kernels.MANY)  # rows of a tile
DECODED_ROWS = 129  # of a plain product, from which on the whole weight is decoded first
# Warps that an H200 has at work: the order of sums must not follow the chip at hand.
_WARPS = 16 * 132
_MOST_PARTS = 8
_ACTIVE = 4  # experts that are at work at least, whoever is alone
# How K lies in a block of a row of x or of codes, and how the axes of that lie for the tensor
# cores: sixteen after sixteen, of which a thread has four (kernels_bridge/csrc/cuda/codes.cuh). The
# last three axes are eight values, which `in_pairs` keeps together.
_FOUR = (4, 4, 2, 2, 2), (1, 3, 4, 0, 2), (0, 1, 3, 4, 2)
_EIGHT = (2, 4, 2, 2, 2, 2), (0, 2, 3, 5, 1, 4), (0, 1, 2, 3, 5, 4)
_AXES = {"fp4_group": _FOUR, "fp8_block": _EIGHT, "fp8_group": _EIGHT}


def takes(x: jax.Array, weight: Any, groups: int = 1) -> bool:
    """Whether the kernels multiply x with a weight leaf [..., G * N, K]: by dtypes and sizes."""
    n, k = stored.shape(weight)[-2:]
    return _fits(weight, x.dtype) and k % BLOCK == 0 and n % (OUTPUTS * groups) == 0


def takes_both_ways(weight: Any, dtype: Any) -> bool:
    """Whether they take rows of `dtype` times a weight of these sizes, and of N and K exchanged."""
    n, k = stored.shape(weight)[-2:]
    return _fits(weight, dtype) and k % BLOCK == 0 and n % BLOCK == 0


def _fits(weight: Any, dtype: Any) -> bool:
    return stored.packed(weight) and jnp.dtype(dtype) == jnp.bfloat16


def parts(k: int, n: int, copies: int = 1) -> int:
    """Parts in which K is summed for N outputs of as many weights at once as `copies`."""
    blocks, warps, count = k // BLOCK, n // 16 * copies, 1
    while count < _MOST_PARTS and warps * count < _WARPS and blocks % (2 * count) == 0:
        count *= 2
    return count


def in_order(x: jax.Array, storage: str) -> jax.Array:
    """[..., K] with K in the order in which a weight of `storage` is multiplied."""
    axes, order, _ = _AXES[storage]
    return _turned(x, axes, order)


def in_pairs(x: jax.Array, storage: str) -> jax.Array:
    """[..., K] with every eight values in the order in which a thread multiplies them."""
    axes, _, pairs = _AXES[storage]
    return _turned(x, axes, pairs)


def _turned(x: jax.Array, axes: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    lead = x.ndim
    blocks = x.reshape(*x.shape[:-1], -1, *axes)
    return blocks.transpose(*range(lead), *(lead + axis for axis in order)).reshape(x.shape)


def tile_rows(rows: int, experts: int = 1) -> int:
    """Rows of a tile, for rows spread over `experts`."""
    if rows <= (8 if experts == 1 else 5 * experts):
        return 8
    return 16 if rows <= (32 if experts == 1 else 24 * experts - 1) else kernels.MANY


def product(
    x: jax.Array, weight: Any, dtype: Any, bias: jax.Array | None, interpret: bool
) -> jax.Array:
    """x [M, G, K] times weight [G * N, K], group by group -> [M, G, N], rounded once to `dtype`.

    x is bfloat16, weight a `quant.Quantized` in FP4 or FP8, or one layer of them; `bias` is float32
    [G * N], added before the rounding.
    """
    m, (n, k) = x.shape[0], stored.shape(weight)
    order = parts(k, n)
    if m >= DECODED_ROWS:
        return _decoded(x, weight, dtype, bias, order, interpret)
    codes, scale = stored.arrays(weight)
    if isinstance(weight, stored.Layered):
        layer = weight.layer
    else:
        codes, scale, layer = codes[None], scale[None], 0
    rows = tile_rows(m)
    if rows < kernels.MANY:
        return kernels.product(x, codes, scale, layer, bias, dtype, order, rows)[0]
    x = in_pairs(x, stored.storage(weight))
    y = kernels.product(x, codes, scale, layer, None, jnp.float32, order, rows)
    total = ordered_sum(list(y))
    bias = None if bias is None else bias.reshape(1, x.shape[1], -1)
    return round_to(total if bias is None else total + bias, dtype)


def _decoded(x, weight, dtype, bias, order, interpret):
    """`product` by a kernel for bfloat16, which walks K from its first element to its last."""
    storage = stored.storage(weight)
    x, weight = stored.after(x, weight)
    wide = in_order(quant.dequantize(stored.alone(weight), x.dtype), storage)
    return products.product(in_order(x, storage), wide, dtype, interpret, bias=bias, parts=order)


def experts(
    x: jax.Array, weights: tuple[Any, ...], numbers: tuple[jax.Array, ...], dtype: Any
) -> tuple[jax.Array, ...]:
    """x [tiles * rows, K] times weight[layer, expert[tile]] [N, K] -> [tiles * rows, N] of `dtype`.

    For each of the weights; two of one shape are read by one kernel. numbers: layer, expert
    [tiles], live [tiles], used. Only the first `live` rows of the first `used` tiles are computed.
    """
    if x.shape[0] // numbers[1].shape[0] == kernels.MANY:
        x = in_pairs(x, stored.storage(weights[0]))
    arrays = [(codes, scale) for codes, scale in map(stored.arrays, weights)]
    orders = [parts(x.shape[1], codes.shape[2], _ACTIVE) for codes, _ in arrays]
    alike = len({(stored.shape(weight), stored.storage(weight)) for weight in weights}) == 1
    if len(weights) == 2 and alike:
        return kernels.experts_twice(x, arrays[0], arrays[1], numbers, dtype, orders[0])
    return tuple(
        kernels.experts(x, codes, scale, numbers, dtype, order)
        for (codes, scale), order in zip(arrays, orders, strict=True)
    )
