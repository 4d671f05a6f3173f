"""Scores of the indexer over many keys: sum over heads of relu(q . k) * weight (docs/model.md 7.3).

Of row t the columns `first` .. `last` - 1 count, all others are -inf.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import quant
from kernels_bridge.adapters import deep_gemm
from kernels_bridge.ops.operands import fit
from kernels_bridge.registry import Capability, Impl, Op

PACKED_WIDTH = 128  # values of an index vector in 68 bytes


def _fit_rest(name: str, sizes: dict[str, int], weight, first, last) -> Any:
    fit(name, sizes, operand="weight", shape=weight, dims="T H", dtypes=("float32",))
    fit(name, sizes, operand="first", shape=first, dims="T", dtypes=("int32",))
    fit(name, sizes, operand="last", shape=last, dims="T", dtypes=("int32",))
    return jax.ShapeDtypeStruct((sizes["T"], sizes["N"]), jnp.float32)


def _rule(q, keys, key_scale, weight, first, last) -> Any:
    sizes: dict[str, int] = {}
    name, e4m3 = "index_logits", ("float8_e4m3fn",)
    fit(name, sizes, operand="q", shape=q, dims="T H K", dtypes=e4m3)
    fit(name, sizes, operand="keys", shape=keys, dims="N K", dtypes=e4m3)
    fit(name, sizes, operand="key_scale", shape=key_scale, dims="N", dtypes=("float32",))
    return _fit_rest(name, sizes, weight, first, last)


def index_logits_twin(q, keys, key_scale, weight, first, last):
    """q [T, H, K] and keys [N, K] e4m3, key_scale [N], weight [T, H] float32, first and last [T]
    int32 -> float32 [T, N]. A scale of q is in `weight`."""
    wide = keys.astype(jnp.float32) * key_scale[:, None]
    return _scores(q.astype(jnp.float32), wide, weight, first, last)


def _scores(q, keys, weight, first, last):
    s = jnp.einsum("thk,nk->thn", q, keys, precision=lax.Precision.HIGHEST)
    total = jnp.sum(jnp.maximum(s, 0) * weight[:, :, None], axis=1)
    column = jnp.arange(keys.shape[0], dtype=jnp.int32)[None, :]
    seen = (column >= first[:, None]) & (column < last[:, None])
    return jnp.where(seen, total, -jnp.inf)


def _packed_rule(q, keys, weight, first, last) -> Any:
    sizes: dict[str, int] = {}
    name, count = "index_logits_packed", quant.index_bytes(PACKED_WIDTH)
    fit(name, sizes, operand="q", shape=q, dims=f"T H {count}", dtypes=("uint8",))
    fit(name, sizes, operand="keys", shape=keys, dims=f"N {count}", dtypes=("uint8",))
    return _fit_rest(name, sizes, weight, first, last)


def index_logits_packed_twin(q, keys, weight, first, last):
    """`index_logits` of vectors as the cache packs them, FP4 by 32: q [T, H, 68], keys [N, 68]
    uint8 (`quant.pack_index`) -> float32 [T, N]."""
    wide_q, wide = (quant.unpack_index(each, PACKED_WIDTH, jnp.float32) for each in (q, keys))
    return _scores(wide_q, wide, weight, first, last)


index_logits = Op(
    "index_logits",
    "scores of the indexer, FP8 queries and keys",
    _rule,
    index_logits_twin,
    (
        deep_gemm.LOGITS_HOPPER,
        Impl("xla", "xla", Capability(), "einsum", index_logits_twin, seen="a CPU"),
    ),
)
index_logits_packed = Op(
    "index_logits_packed",
    "scores of the indexer, queries and keys of 68 bytes as the cache holds them",
    _packed_rule,
    index_logits_packed_twin,
    (
        deep_gemm.LOGITS_BLACKWELL,
        Impl(
            "xla", "xla", Capability(), "decode, then einsum", index_logits_packed_twin,
            seen="a CPU",
        ),
    ),
)  # fmt: skip
OPS = (index_logits, index_logits_packed)
