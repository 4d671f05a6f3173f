"""One tile of a weight inside a kernel, decoded exactly from the storage it has in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from deepinfer_jax import quant


def arrays(weight: Any) -> list[jax.Array]:
    """The arrays of a weight leaf, in the order in which `tile` expects their refs."""
    if isinstance(weight, quant.Quantized):
        return [weight.codes] if weight.scale is None else [weight.codes, weight.scale]
    return [weight]


def shape(weight: Any) -> tuple[int, ...]:
    """[..., N, K] of a weight leaf."""
    if not isinstance(weight, quant.Quantized):
        return weight.shape
    packed = 2 if weight.format == "fp4_group" else 1
    return (*weight.codes.shape[:-1], weight.codes.shape[-1] * packed)


def storage(weight: Any) -> str:
    """ "plain", or the format of a `Quantized`."""
    return weight.format if isinstance(weight, quant.Quantized) else "plain"


def addressable(weight: Any, layer: jax.Array) -> tuple[Any, jax.Array]:
    """A stack [layers, ...] and the place of `layer` in it of which a kernel reaches every entry.

    Pallas for Triton counts entries with 32 signed bits in arrays of up to 2**32 bytes, with 64 in
    larger ones. A stack of bytes of a size between 2**31 and 2**32, such as the experts of the
    released drafter, has entries beyond: there the layer is copied out, which takes time and no
    bit. Raises ValueError where one layer is as large as that.
    """
    if not any(_out_of_reach(a.shape, a.dtype) for a in arrays(weight)):
        return weight, layer
    if any(_out_of_reach(a.shape[1:], a.dtype) for a in arrays(weight)):
        raise ValueError(
            f"one layer of the weight {shape(weight)} takes 2 to 4 GiB, which no kernel can "
            "address; spread it over several devices"
        )
    alone = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, layer), weight)
    return alone, jnp.zeros_like(layer)


def _out_of_reach(shape: tuple[int, ...], dtype: Any) -> bool:
    count = math.prod(shape)
    return count > 1 << 31 and count * jnp.dtype(dtype).itemsize <= 1 << 32


def load(ref: Any, lead: Sequence[Any], rows: Any, columns: Any, mask: Any) -> jax.Array:
    """A [rows, columns] tile of ref[lead]; entries outside `mask` are zero."""
    where = ref.at[(*lead, rows, columns)]
    if mask is None:
        return triton.load(where)
    return triton.load(where, mask=mask, other=jnp.zeros((), ref.dtype))


def _e2m1(nibble: jax.Array) -> jax.Array:
    """uint8 nibbles -> e4m3 codes of 2^-6 times their value: both formats count up in one order."""
    return ((nibble & 8) << 4) | ((nibble & 7) << 2)


_E2M1_SCALE = np.float32(64)


def packed(weight: Any) -> bool:
    """Whether the weight is decoded by scales."""
    return isinstance(weight, quant.Quantized) and weight.scale is not None


def tile(
    refs: Sequence[Any], kind: str, lead: Sequence[Any], first: Any, rows: int, column: Any,
    columns: int, limits: tuple[int, int] | None, dtype: Any,
) -> jax.Array:  # fmt: skip
    """Rows first .. first + rows and `columns` columns from `column` on, as floats of `dtype`.

    `columns` is a multiple of 32. limits (N, K): what lies beyond is zero; None where nothing does.
    """
    packed = 2 if kind == "fp4_group" else 1
    mask = None
    if limits is not None:
        inside = column // packed + lax.iota(jnp.int32, columns // packed) < limits[1] // packed
        mask = (first + lax.iota(jnp.int32, rows) < limits[0])[:, None] & inside[None, :]
    codes = load(
        refs[0], lead, pl.ds(first, rows), pl.ds(column // packed, columns // packed), mask
    )
    if kind == "plain":
        return codes.astype(dtype)
    if kind == "bf16_bits":
        return lax.bitcast_convert_type(codes, jnp.bfloat16).astype(dtype)
    factor = quant.decode_e8m0(_scales(refs[1], kind, lead, first, rows, column, columns, limits))
    if kind == "fp4_group":
        nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, columns)
        codes, factor = _e2m1(nibbles), factor * _E2M1_SCALE
    value = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    each = jnp.broadcast_to(factor[:, :, None], (*factor.shape, quant.GROUP))
    return (value * each.reshape(value.shape)).astype(dtype)


def _scales(ref, kind, lead, first, rows, column, columns, limits):
    """uint8 [rows, columns / 32]: a scale per row, also where the storage has one for 32 rows."""
    groups = columns // quant.GROUP
    group = column // quant.GROUP + lax.iota(jnp.int32, groups)
    row = first + lax.iota(jnp.int32, rows)
    mask = None
    if limits is not None:
        mask = (row < limits[0])[:, None] & (group * quant.GROUP < limits[1])[None, :]
    if kind == "fp8_block":
        row = row // quant.GROUP
    row = jnp.broadcast_to(row[:, None], (rows, groups))
    group = jnp.broadcast_to(group[None, :], (rows, groups))
    return load(ref, lead, row, group, mask)
