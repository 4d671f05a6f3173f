"""Sparse attention of queries over listed keys, with a sink: prefill rows and paged decoding.

Keys and values are one vector. A query sees two lists of ids, its window and its selected entries;
an id outside of the table is nobody. With s the scaled scores, the result is
sum(e^s v) / (sum(e^s) + e^sink), and `lse` is log(sum(e^s)) without the sink; of a query that sees
nothing they are 0 and -inf (docs/model.md 7.5).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_bridge.adapters import flash_mla
from kernels_bridge.ops import pages as formats
from kernels_bridge.ops.operands import fit
from kernels_bridge.registry import Capability, Impl, Op

_FLOATS = ("bfloat16", "float32")


def _rows_rule(q, rows, ids, extra, sink, *, scale: float) -> Any:
    sizes: dict[str, int] = {}
    name = "attend_rows"
    fit(name, sizes, operand="q", shape=q, dims="T H D", dtypes=_FLOATS)
    fit(name, sizes, operand="rows", shape=rows, dims="N D", dtypes=(str(q.dtype),))
    fit(name, sizes, operand="ids", shape=ids, dims="T S", dtypes=("int32",))
    fit(name, sizes, operand="extra", shape=extra, dims="T E", dtypes=("int32",))
    fit(name, sizes, operand="sink", shape=sink, dims="H", dtypes=("float32",))
    return q, jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)


def attend_rows_twin(q, rows, ids, extra, sink, *, scale: float):
    """q [T, H, D], rows [N, D] of its dtype, ids [T, S] and extra [T, E] int32 into rows, sink [H]
    float32 -> (out [T, H, D] of q's dtype, lse [T, H] float32)."""
    both = jnp.concatenate([ids, extra], axis=1)
    seen = (both >= 0) & (both < rows.shape[0])
    keys = rows[jnp.where(seen, both, 0)].astype(jnp.float32)
    out, lse = _attend(q.astype(jnp.float32), keys, seen, sink, scale)
    return out.astype(q.dtype), lse


def _attend(q, keys, seen, sink, scale):
    """q [T, H, D], keys [T, S, D], seen [T, S], all float32: one softmax over both lists."""
    keys = jnp.where(seen[..., None], keys, 0)  # 0 x NaN is NaN
    exact = lax.Precision.HIGHEST
    s = jnp.einsum("thd,tsd->ths", q, keys, precision=exact) * jnp.float32(scale)
    s = jnp.where(seen[:, None, :], s, -jnp.inf)
    top = lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
    top = jnp.where(jnp.isfinite(top), top, 0)
    p = jnp.where(seen[:, None, :], jnp.exp(s - top[..., None]), 0)
    z = jnp.sum(p, axis=-1)
    value = jnp.einsum("ths,tsd->thd", p, keys, precision=exact)
    some = z > 0
    total = jnp.where(some, z + jnp.exp(sink[None, :] - top), 1)
    lse = jnp.where(some, jnp.log(jnp.where(some, z, 1)) + top, -jnp.inf)
    return value / total[..., None], lse


def _pages_rule(q, pages, ids, extra_pages, extra, sink, *, scale: float) -> Any:
    sizes: dict[str, int] = {}
    name = "attend_pages"
    fit(name, sizes, operand="q", shape=q, dims=f"B T H {formats.WIDTH}", dtypes=("bfloat16",))
    fit(name, sizes, operand="pages", shape=pages, dims="P L C", dtypes=("uint8",))
    fit(name, sizes, operand="ids", shape=ids, dims="B T S", dtypes=("int32",))
    fit(name, sizes, operand="extra_pages", shape=extra_pages, dims="Q M F", dtypes=("uint8",))
    fit(name, sizes, operand="extra", shape=extra, dims="B T E", dtypes=("int32",))
    fit(name, sizes, operand="sink", shape=sink, dims="H", dtypes=("float32",))
    formats.format_of(pages.shape[-1])
    formats.format_of(extra_pages.shape[-1])
    return q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)


def attend_pages_twin(q, pages, ids, extra_pages, extra, sink, *, scale: float):
    """q [B, T, H, 512] bfloat16, pages [P, L, bytes] and extra_pages [Q, M, bytes] uint8, ids
    [B, T, S] and extra [B, T, E] int32: page times tokens of a page, plus the place in it; sink [H]
    float32 -> (out [B, T, H, 512] bfloat16, lse [B, T, H] float32).

    A length of a list is written into it: -1 from there on.
    """
    b, t, h, width = q.shape
    first, second = formats.unpack_pages(pages), formats.unpack_pages(extra_pages)
    count, ids = first.shape[0], ids.reshape(b * t, -1)
    extra = extra.reshape(b * t, extra.shape[-1])
    ids = jnp.where((ids >= 0) & (ids < count), ids, -1)
    extra = jnp.where((extra >= 0) & (extra < second.shape[0]), extra + count, -1)
    table = jnp.concatenate([first, second])
    wide = q.reshape(b * t, h, width).astype(jnp.float32)
    out, lse = attend_rows_twin(wide, table, ids, extra, sink, scale=scale)
    return out.astype(q.dtype).reshape(q.shape), lse.reshape(b, t, h)


_XLA = Capability()

attend_rows = Op(
    "attend_rows",
    "sparse attention over bfloat16 rows, window and selected entries, with a sink",
    _rows_rule,
    attend_rows_twin,
    (
        *flash_mla.ROWS,
        Impl("xla", "xla", _XLA, "gather and einsum", attend_rows_twin, seen="a CPU"),
    ),
)
attend_pages = Op(
    "attend_pages",
    "sparse attention over quantized pages, window and selected entries, with a sink",
    _pages_rule,
    attend_pages_twin,
    (
        *flash_mla.PAGES,
        Impl("xla", "xla", _XLA, "decode and gather", attend_pages_twin, seen="a CPU"),
    ),
)
OPS = (attend_rows, attend_pages)
