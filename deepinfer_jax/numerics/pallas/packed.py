"""Vectors of a cache inside a kernel, decoded exactly from what they are stored in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from deepinfer_jax import quant
from deepinfer_jax.numerics.pallas import decoding, scores

Kind = Literal["window", "main", "index"]


def place(pages_ref: Any, slot: Any, entry: jax.Array, size: int, seen: jax.Array) -> tuple:
    """(page, place in it) of entries [n] of a slot, in pages of `size`; 0 where not `seen`.

    With one page for a slot nothing is looked up for an entry.
    """
    if pages_ref.shape[1] == 1:
        return jnp.maximum(pages_ref[slot, 0], 0), entry
    where = pages_ref.at[jnp.full(entry.shape, slot), lax.div(entry, jnp.int32(size))]
    page = triton.load(where, mask=seen, other=0)
    return jnp.maximum(page, 0), lax.rem(entry, jnp.int32(size))


def turned(x: jax.Array, ref: Any) -> jax.Array:
    """x [..., K] in the order in which `Vectors` of `ref` gives values.

    Eight products of one step of the tensor cores are added alike in any order.
    """
    if ref.dtype != jnp.uint32:
        return x
    eights = x.reshape(*x.shape[:-1], -1, 2, len(decoding.WORD_ORDER) // 2)
    return eights.swapaxes(-1, -2).reshape(x.shape)


def _flat(value: jax.Array, *shape: int) -> jax.Array:
    """`value` reshaped as bits: Triton moves a bare reshape of an operand of a product into shared
    memory, and fails where groups are short.
    """
    if value.dtype != jnp.bfloat16:
        return value.reshape(shape)
    return lax.bitcast_convert_type(
        lax.bitcast_convert_type(value, jnp.int16).reshape(shape), jnp.bfloat16
    )


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Vectors of `width` in ref [..., w]: uint8 bytes, uint32 words (of index keys), or floats.

    kind: of the packed form (`quant.pack_window`, `pack_main`, `pack_index`). dtype: of the floats
    that come out. assembly: `decoding.assembly`.
    """

    ref: Any
    kind: Kind
    width: int
    dtype: Any
    assembly: bool

    def load(self, lead: Sequence[Any], seen: jax.Array) -> jax.Array:
        """The vectors [n, power(width)] at ref[lead], numbers or [n] each; zeros unless `seen`.

        In words every eight values come in the order `decoding.WORD_ORDER`: see `turned`.
        """
        wide = scores.power(self.width)
        if jnp.issubdtype(self.ref.dtype, jnp.floating):
            value = self._read(lead, seen, lax.iota(jnp.int32, wide), self.width)
            return value.astype(self.dtype)
        group = lax.iota(jnp.int32, wide // self._group)
        codes, scale = self._codes(lead, seen, group), self._scales(lead, seen, group)
        fast = self.assembly and self.dtype == jnp.bfloat16
        factor = self._factor(scale, jnp.bfloat16 if fast else jnp.float32)
        factor = jnp.broadcast_to(factor[:, :, None], codes.shape)
        if codes.dtype != jnp.uint8:
            value = decoding.words(lax.bitcast_convert_type(codes, jnp.int32), factor, fast)
        else:
            decode = decoding.assembled if fast else decoding.decoded
            value = decode(codes, factor, "fp8_group" if self.kind == "window" else "fp4_group")
        return _flat(value.astype(self.dtype), seen.shape[0], wide)

    @property
    def _group(self) -> int:
        """Values that share a scale."""
        return quant.MAIN_KV_GROUP if self.kind == "main" else quant.GROUP

    @property
    def _bytes(self) -> int:
        """Bytes of the codes of a vector."""
        return self.width if self.kind == "window" else self.width // 2

    def _factor(self, scale, dtype):
        if self.kind != "main":
            return decoding.factor(scale, dtype)
        return quant.decode_e4m3(scale).astype(dtype)

    def _read(self, lead, seen, column, limit):
        """ref[*lead, column]: [n, *column.shape]."""
        shape = (seen.shape[0], *column.shape)
        single = (-1, *(1 for _ in column.shape))

        def spread(a):
            return jnp.broadcast_to(a.reshape(single), shape)

        lead = [spread(a) if getattr(a, "shape", ()) else a for a in lead]
        column = jnp.broadcast_to(column[None], shape)
        inside = spread(seen) & (column < limit)
        return triton.load(
            self.ref.at[(*lead, column)], mask=inside, other=jnp.zeros((), self.ref.dtype)
        )

    def _codes(self, lead, seen, group):
        """What the storage has [n, groups, bytes or words of a group]."""
        size = self.ref.dtype.itemsize
        each = self._group * self._bytes // self.width // size
        column = group[:, None] * each + lax.iota(jnp.int32, each)[None]
        return self._read(lead, seen, column, self._bytes // size)

    def _scales(self, lead, seen, group):
        """uint8 [n, groups]."""
        size = self.ref.shape[-1]
        if self.ref.dtype == jnp.uint8:
            return self._read(lead, seen, self._bytes + group, size)
        word = self._read(lead, seen, self._bytes // 4 + group // 4, size)
        shift = jnp.broadcast_to((group % 4 * 8).astype(jnp.uint32)[None], word.shape)
        return ((word >> shift) & 255).astype(jnp.uint8)
