"""Attention of a query row over its slots in one kernel, which reads a cache as it is stored.

Slots come in tiles of a fixed size, those of the window and those of entries apart. What a tile
gives is a function of its slots alone; tiles are joined one after the other. So it changes no bit
whether a program makes all tiles of a row or, where there are few rows, every tile has its own.
Tiles without a slot to see change nothing, and are left out where that is known.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from deepinfer_jax.numerics.pallas import decoding, packed, scores

_FLOAT_MAX = np.finfo(np.float32).max
_FEW = 32  # rows of which every tile has a program; more of them fill the chip


def tile_slots(dtype: Any) -> int:
    """Slots of a tile, whose shape fixes the order of sums."""
    return 64 if dtype == jnp.bfloat16 else 16


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Some heads of a row; `place` [heads, width] is where they stand in arrays [T, H, K]."""

    q: jax.Array
    place: Any
    inside: Any
    scale: float

    @classmethod
    def of(cls, q_ref: Any, heads: int, scale: float) -> _Heads:
        """Those of this program."""
        row, first = pl.program_id(0), pl.program_id(1) * heads
        (_, h, k), width = q_ref.shape, scores.power(q_ref.shape[2])
        head, column = first + lax.iota(jnp.int32, heads), lax.iota(jnp.int32, width)
        inside = (head < h)[:, None] & (column < k)[None, :]
        place = row, pl.ds(first, heads), pl.ds(0, width)
        q = triton.load(q_ref.at[place], mask=inside, other=jnp.zeros((), q_ref.dtype))
        return cls(q, place, inside, scale)

    def tile(self, keys: jax.Array, seen: jax.Array) -> Any:
        """(largest score [heads], sum of weights [heads], weighted sum of values [heads, width])
        of the slots `keys` [slots, width], which are zeros where not `seen`.
        """
        s = scores.dot(self.q, keys, trans_b=True) * np.float32(self.scale)
        s = jnp.where(seen[None, :], s, -jnp.inf)
        top = jnp.max(s, axis=1)
        p = jnp.exp(s - _base(top)[:, None])
        return top, jnp.sum(p, axis=1), scores.dot(p.astype(keys.dtype), keys)

    def write(self, out_ref: Any, carry: Any, sink_ref: Any) -> None:
        heads = self.q.shape[0]
        first, h = pl.program_id(1) * heads, out_ref.shape[1]
        mask = first + lax.iota(jnp.int32, heads) < h
        sink = triton.load(sink_ref.at[pl.ds(first, heads)], mask=mask, other=np.float32(0))
        triton.store(out_ref.at[self.place], _result(carry, sink), mask=self.inside)


def _base(top: jax.Array) -> jax.Array:
    return jnp.where(top == -jnp.inf, np.float32(0), top)


def _nothing(heads: int, width: int) -> Any:
    """What no slot gives, as `_Heads.tile`."""
    zero = jnp.zeros((heads,), jnp.float32)
    return jnp.full((heads,), -jnp.inf, jnp.float32), zero, jnp.zeros((heads, width), jnp.float32)


def _joined(carry: Any, part: Any) -> Any:
    """What the slots of both give. One product is pinned, so that the other one is fused."""
    (top, z, value), (high, more, extra) = carry, part
    now = jnp.maximum(top, high)
    fade, gain = jnp.exp(top - _base(now)), jnp.exp(high - _base(now))
    z = z * fade + jnp.minimum(more * gain, _FLOAT_MAX)
    return now, z, value * fade[:, None] + jnp.minimum(extra * gain[:, None], _FLOAT_MAX)


def _result(carry: Any, sink: jax.Array) -> jax.Array:
    """Attention [heads, width], with the sink [heads]."""
    top, z, value = carry
    return value / (z + jnp.exp(sink - _base(top)))[:, None]


def _row_kernel(q_ref, keys_ref, mask_ref, sink_ref, out_ref, *, heads, scale, parts):
    """Over keys [T, S, K] that stand in memory."""
    tile, width = tile_slots(q_ref.dtype), scores.power(q_ref.shape[2])
    mine, row = _Heads.of(q_ref, heads, scale), pl.program_id(0)
    carry = _nothing(*mine.q.shape)
    for start, end in parts:

        def visit(i, carry, start=start, end=end):
            first = start + i * tile
            where = row, pl.ds(first, tile)
            mask = first + lax.iota(jnp.int32, tile) < end
            seen = triton.load(mask_ref.at[where], mask=mask, other=0) != 0
            inside = seen[:, None] & (lax.iota(jnp.int32, width) < keys_ref.shape[2])[None, :]
            keys = triton.load(
                keys_ref.at[(*where, pl.ds(0, width))], mask=inside,
                other=jnp.zeros((), keys_ref.dtype),
            )  # fmt: skip
            return _joined(carry, mine.tile(keys, seen))

        carry = lax.fori_loop(0, pl.cdiv(end - start, tile), visit, carry)
    mine.write(out_ref, carry, sink_ref)


def _heads_at_once(q: jax.Array) -> int:
    """64, however few there are: a product of fewer rows takes another instruction, for which
    Triton permutes K where keys come from bytes.
    """
    return 64 if q.dtype == jnp.bfloat16 else 16


def _call(kernel, operands, q, grid, outputs, interpret, name, **static):
    return pl.pallas_call(
        functools.partial(kernel, heads=_heads_at_once(q), **static),
        grid=(q.shape[0], pl.cdiv(q.shape[1], _heads_at_once(q)), *grid),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in outputs],
        compiler_params=triton.CompilerParams(
            num_warps=8 if q.dtype == jnp.bfloat16 else 4, num_stages=1
        ),
        interpret=interpret,
        name=name,
    )(*operands)


def attend(
    q: jax.Array, keys: jax.Array, mask: jax.Array, sink: jax.Array, scale: float, window: int,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """Attention of one query row: q [H, K], keys [S, K], mask [S] bool, sink [H] -> float32 [H, K].

    window: slots that come first, in tiles of their own.
    """
    count = keys.shape[0]
    parts = tuple((a, b) for a, b in ((0, window), (window, count)) if a < b)
    operands = q[None], keys[None], mask.astype(jnp.int32)[None], sink
    (out,) = _call(
        _row_kernel, operands, q[None], (), [(1, *q.shape)], interpret, "attention", scale=scale,
        parts=parts,
    )  # fmt: skip
    return out[0]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Tiles of a row: `count` at most, of which first .. end have slots to see; `get` reads one."""

    count: int
    first: Any
    end: Any
    get: Callable[[Any], tuple[jax.Array, jax.Array]]


def _tiles(refs: Any, row: Any, window: int, assembly: bool) -> list[_Tiles]:
    """Those of the window, of new rows and of the ring, then those of chosen entries."""
    layer, slots, positions, floors, firsts, starts, q_ref, new_ref, ring_ref, *chosen = refs
    tile, k = tile_slots(q_ref.dtype), q_ref.shape[2]
    number = lax.iota(jnp.int32, tile)
    vectors = functools.partial(packed.Vectors, width=k, dtype=q_ref.dtype, assembly=assembly)
    slot, position = slots[row], positions[row]
    least, start = jnp.maximum(floors[row], 0), starts[slot]
    old, new = vectors(ring_ref, "window"), vectors(new_ref, "window")

    def look(i):
        inner = i * tile + number
        wanted = position - window + 1 + inner
        seen = (wanted >= least) & (inner < window)
        fresh = wanted >= start
        at = jnp.where(seen & fresh, firsts[slot] + wanted - start, 0)
        keys = new.load((at,), seen & fresh)
        place = lax.rem(jnp.where(seen, wanted, 0), jnp.int32(ring_ref.shape[2]))
        kept = old.load((layer[()], slot, place), seen & ~fresh)
        return jnp.where(fresh[:, None], keys, kept), seen

    empty = jnp.clip(least - (position - window + 1), 0, window) // tile
    count = pl.cdiv(window, tile)
    near = _Tiles(count, empty, count, look)
    if not chosen:
        return [near]
    source_ref, count_ref, selected_ref, pages_ref, data_ref = chosen
    entries, size, per_slot = vectors(data_ref, "main"), data_ref.shape[2], pages_ref.shape[1]

    def read(i):
        at = selected_ref.at[row, pl.ds(i * tile, tile)]
        ids = triton.load(at, mask=i * tile + number < selected_ref.shape[1], other=-1)
        seen = ids >= 0
        safe = jnp.where(seen, jnp.minimum(ids, per_slot * size - 1), 0)
        where = packed.place(pages_ref, slot, safe, size, seen)
        return entries.load((source_ref[()], *where), seen), seen

    end = pl.cdiv(count_ref[row], tile)
    return [near, _Tiles(pl.cdiv(selected_ref.shape[1], tile), 0, end, read)]


def _whole_kernel(*refs, heads, scale, window, assembly):
    """All tiles of a row."""
    *given, sink_ref, out_ref = refs
    mine = _Heads.of(given[6], heads, scale)
    carry = _nothing(*mine.q.shape)
    for tiles in _tiles(given, pl.program_id(0), window, assembly):

        def visit(i, carry, get=tiles.get):
            return _joined(carry, mine.tile(*get(i)))

        carry = lax.fori_loop(tiles.first, tiles.end, visit, carry)
    mine.write(out_ref, carry, sink_ref)


def _part_kernel(*refs, heads, scale, window, assembly):
    """One tile of a row: top and sum [T, tiles, heads], value [T, tiles, heads, width]."""
    *given, top_ref, sum_ref, value_ref = refs
    mine, number, before = _Heads.of(given[6], heads, scale), pl.program_id(2), 0
    place = pl.program_id(0), number, pl.ds(pl.program_id(1) * heads, heads)
    for tiles in _tiles(given, pl.program_id(0), window, assembly):

        @pl.when((number >= before) & (number < before + tiles.count))
        def _(get=tiles.get, before=before):
            top, z, value = mine.tile(*get(number - before))
            triton.store(top_ref.at[place], top)
            triton.store(sum_ref.at[place], z)
            triton.store(value_ref.at[(*place, pl.ds(0, value.shape[1]))], value)

        before += tiles.count


_COLUMNS = 64  # of values that a program joins


def _join_kernel(top_ref, sum_ref, value_ref, sink_ref, out_ref, *, heads):
    """Some columns of the tiles of a row, joined in order."""
    row, first, column = pl.program_id(0), pl.program_id(1) * heads, pl.program_id(2) * _COLUMNS
    head, inner = first + lax.iota(jnp.int32, heads), column + lax.iota(jnp.int32, _COLUMNS)

    def visit(i, carry):
        place = row, i, pl.ds(first, heads)
        value = value_ref.at[(*place, pl.ds(column, _COLUMNS))]
        mask = jnp.broadcast_to((inner < value_ref.shape[3])[None], (heads, _COLUMNS))
        value = triton.load(value, mask=mask, other=np.float32(0))
        return _joined(carry, (top_ref[place], sum_ref[place], value))

    carry = lax.fori_loop(0, top_ref.shape[1], visit, _nothing(heads, _COLUMNS))
    sink = triton.load(sink_ref.at[pl.ds(first, heads)], mask=head < out_ref.shape[1], other=0.0)
    inside = (head < out_ref.shape[1])[:, None] & (inner < out_ref.shape[2])[None, :]
    where = out_ref.at[row, pl.ds(first, heads), pl.ds(column, _COLUMNS)]
    triton.store(where, _result(carry, sink), mask=inside)


def attend_cache(
    q: jax.Array, fresh: jax.Array, ring: tuple[Any, Any], entries: tuple[Any, Any, Any] | None,
    spans: tuple[Any, Any], rows: tuple[Any, Any, Any], selected: jax.Array, sink: jax.Array,
    window: int, scale: float, interpret: bool, apart: bool | None = None,
) -> jax.Array:  # fmt: skip
    """`attend` of T rows over what a cache holds of their slots -> float32 [T, H, K].

    Arguments as in `kernels_bridge.ffi.attend_cache`, data packed in bytes or floats. Selected
    entries come first in their rows, -1 behind. apart: whether every tile has a program of its own,
    default: where there are few rows.
    """
    data, layer = ring
    numbers = (jnp.asarray(each, jnp.int32) for each in (layer, *rows, *spans))
    count, chosen = pl.cdiv(window, tile_slots(q.dtype)), ()
    if entries is not None:
        kv, source, pages = entries
        most = jnp.sum(selected >= 0, axis=1, dtype=jnp.int32)
        chosen = jnp.asarray(source, jnp.int32), most, selected, pages, kv
        count += pl.cdiv(selected.shape[1], tile_slots(q.dtype))
    given = (*numbers, q, fresh, data, *chosen)
    how = {"scale": scale, "window": window, "assembly": decoding.assembly(interpret)}
    t, h, k = q.shape
    if not (t <= _FEW if apart is None else apart):
        name = "attention_cache"
        return _call(_whole_kernel, (*given, sink), q, (), [q.shape], interpret, name, **how)[0]
    filled = t, count, pl.cdiv(h, _heads_at_once(q)) * _heads_at_once(q)
    shapes = [filled, filled, (*filled, scores.power(k))]
    parts = _call(_part_kernel, given, q, (count,), shapes, interpret, "attention_tiles", **how)
    columns = (pl.cdiv(k, _COLUMNS),)
    return _call(_join_kernel, (*parts, sink), q, columns, [q.shape], interpret, "attention_join")[
        0
    ]
