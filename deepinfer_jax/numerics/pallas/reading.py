"""Tiles of a weight inside a kernel, decoded exactly from the storage it has in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from deepinfer_jax import quant
from deepinfer_jax.numerics.pallas import decoding


def load(ref: Any, lead: Sequence[Any], rows: Any, columns: Any, mask: Any) -> jax.Array:
    """A [rows, columns] tile of ref[lead]; entries outside `mask` are zero."""
    where = ref.at[(*lead, rows, columns)]
    if mask is None:
        return triton.load(where)
    return triton.load(where, mask=mask, other=jnp.zeros((), ref.dtype))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a program reads in a weight: in refs[lead] `rows` rows from `first`, `columns` at once.

    kind: `storage`. limits (N, K): what lies beyond is zero; None where nothing does. dtype: of the
    floats that come out. turned: the tile is the first operand of a product (`Schedule.turned`),
    which stays in registers. assembly: `decoding.assembly`.
    """

    refs: Sequence[Any]
    kind: str
    lead: Sequence[Any]
    first: Any
    rows: int
    columns: int
    limits: tuple[int, int] | None
    dtype: Any
    turned: bool
    assembly: bool

    @property
    def _apart(self) -> bool:
        """Whether scales are read a step ahead: where they stay in registers as well."""
        return self.turned and self.kind not in ("plain", "bf16_bits")

    def early(self, column: Any) -> Any:
        """Scales of the tile at `column` for `tile`, or None."""
        return self._scales(column) if self._apart else None

    def tile(self, column: Any, scales: Any) -> jax.Array:
        """The tile [rows, columns] as floats, with what `early` gave; columns: a multiple of 32."""
        if self.kind in ("plain", "bf16_bits"):
            value = self._entries(column, self.columns, self.limits and self.limits[1])
            if self.kind == "bf16_bits":
                value = lax.bitcast_convert_type(value, jnp.bfloat16)
            return value.astype(self.dtype)
        value = self._in_groups(column, scales) if self._apart else self._in_rows(column)
        return value.reshape(self.rows, self.columns).astype(self.dtype)

    def _in_groups(self, column, scales):
        """Values [rows, groups, 32]: a group's bytes and its scale lie in one thread that way."""
        row, group, inside = self._groups(column)
        each = quant.GROUP // self._packed
        shape = (*scales.shape, each)
        byte = group[:, None] * each + lax.iota(jnp.int32, each)[None, :]
        row, byte = (jnp.broadcast_to(a, shape) for a in (row[:, None, None], byte[None]))
        inside = None if inside is None else jnp.broadcast_to(inside[:, :, None], shape)
        codes = load(self.refs[0], self.lead, row, byte, inside)
        fast = self.assembly and self.dtype == jnp.bfloat16
        factor = decoding.factor(scales, jnp.bfloat16 if fast else jnp.float32)
        decode = decoding.assembled if fast else decoding.decoded
        return decode(codes, jnp.broadcast_to(factor[:, :, None], shape), self.kind)

    def _in_rows(self, column):
        """Values [rows, columns], for a tile that passes through shared memory."""
        limit = self.limits and self.limits[1] // self._packed
        codes = self._entries(column // self._packed, self.columns // self._packed, limit)
        factor = decoding.factor(self._scales(column), jnp.float32)
        wide = (*factor.shape, codes.shape[1] // factor.shape[1])
        factor = jnp.broadcast_to(factor[:, :, None], wide).reshape(codes.shape)
        return decoding.decoded(codes, factor, self.kind)

    @property
    def _packed(self) -> int:
        """Values of a byte."""
        return 2 if self.kind == "fp4_group" else 1

    def _entries(self, column, columns, limit):
        """Entries [rows, columns] of the first array; what lies beyond column `limit` is zero."""
        mask = None
        if self.limits is not None:
            row, inner = (lax.iota(jnp.int32, n) for n in (self.rows, columns))
            mask = (self.first + row < self.limits[0])[:, None] & (column + inner < limit)[None, :]
        where = pl.ds(self.first, self.rows), pl.ds(column, columns)
        return load(self.refs[0], self.lead, *where, mask)

    def _scales(self, column):
        """uint8 [rows, groups]: a scale for every row, also where the storage has one for 32."""
        row, group, inside = self._groups(column)
        if self.kind == "fp8_block":
            row = row // quant.GROUP
        shape = (self.rows, self.columns // quant.GROUP)
        row, group = (jnp.broadcast_to(a, shape) for a in (row[:, None], group[None, :]))
        return load(self.refs[1], self.lead, row, group, inside)

    def _groups(self, column):
        """Rows [rows], groups of 32 columns [groups], and which of both are inside, or None."""
        row = self.first + lax.iota(jnp.int32, self.rows)
        group = column // quant.GROUP + lax.iota(jnp.int32, self.columns // quant.GROUP)
        if self.limits is None:
            return row, group, None
        inside = (row < self.limits[0])[:, None] & (group * quant.GROUP < self.limits[1])[None, :]
        return row, group, inside
