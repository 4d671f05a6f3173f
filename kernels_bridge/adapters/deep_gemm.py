"""DeepGEMM: FP8 products, and scores of the indexer.

Products are written into the memory they are given. Scales of rows must stand column by column,
each column padded to 16 bytes: so XLA lays them out, and the library finds nothing to do (it would
allocate for that). Scores are made by the library itself and copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_bridge import dlpack
from kernels_bridge.registry import Capability, Impl, Need
from kernels_bridge.signatures import Signature, function_of, parameters_of, signature

_MEND = "build and install deepinfer-gemm 2.8 (its own setup, nvcc 12.9 or later at run time)"
_TORCH = Need("torch", at_least="2.3")
LIBRARY = Need("deep_gemm", at_least="2.6", mend=_MEND)

_COMMON = "recipe recipe_a recipe_b compiled_dims disable_ue8m0_cast"
PRODUCTS = {
    "fp8_gemm": signature(LIBRARY, "fp8_gemm_nt", f"a b d c {_COMMON}", "a b d recipe"),
    "grouped_contiguous": signature(
        LIBRARY, "m_grouped_fp8_gemm_nt_contiguous",
        f"a b d grouped_layout {_COMMON} use_psum_layout ensure_zero_padding "
        "expected_m_for_psum_layout", "a b d grouped_layout recipe",
    ),
    "grouped_masked": signature(
        LIBRARY, "m_grouped_fp8_gemm_nt_masked", f"a b d masked_m expected_m {_COMMON}",
        "a b d masked_m expected_m recipe",
    ),
}  # fmt: skip
_LOGITS = "q kv weights cu_seq_len_k_start cu_seq_len_k_end max_seqlen_k"
# Upstream's has two parameters more: a switch, on by default, that fills what is beyond a row's
# columns and does not go with rows of their own length; and the type of the scores, float32.
LOGITS = signature(
    LIBRARY, "fp8_fp4_mqa_logits", f"{_LOGITS} clean_logits logits_dtype schedule_meta", _LOGITS
)

SEEN = "an H200 (sm_90), DeepGEMM 54e2261"
_ALIGNED = 4  # numbers of 4 bytes in 16
_TILE = 128  # rows of one expert in a contiguous layout


def _capability(major: int, needs: tuple[Need, ...]) -> Capability:
    return Capability(("cuda",), (major,), ("float8_e4m3fn",), needs)


def hopper(name: str, run: Callable[..., Any], accepts: Callable[..., list[str]]) -> Impl:
    """On sm_90: float32 scales of 1 x 128 and 128 x 128."""
    return Impl(
        "deep_gemm_sm90", "dlpack", _capability(9, (_TORCH, LIBRARY)),
        f"{PRODUCTS[name].path}, float32 scales", functools.partial(run, False),
        functools.partial(accepts, False), seen=SEEN, by_name=dlpack.UNRECORDED,
    )  # fmt: skip


def blackwell(name: str, run: Callable[..., Any], accepts: Callable[..., list[str]]) -> Impl:
    """On sm_100: e8m0 scales, four to a word, of 1 x 32 as the release has them."""
    return Impl(
        "deep_gemm_sm100", "dlpack", _capability(10, (_TORCH, LIBRARY)),
        f"{PRODUCTS[name].path}, e8m0 scales", functools.partial(run, True),
        functools.partial(accepts, True),
    )  # fmt: skip


def accepts_pair(packed: bool, a, a_scale, b, b_scale, *more, group, block, **static) -> list[str]:
    """What the products demand of shapes and scales."""
    said = []
    if packed:
        if str(a_scale.dtype) != "uint8":
            said.append(f"it takes uint8 e8m0 scales, not {a_scale.dtype}")
        if group not in (32, 128):
            said.append(f"it takes scales of 32 or 128 columns, not {group}")
    else:
        if str(a_scale.dtype) != "float32":
            said.append(f"it takes float32 scales, not {a_scale.dtype}")
        if (group, block) != (128, 128):
            said.append(f"it takes scales of 1 x 128 and 128 x 128, not {group} and {block} rows")
    if not (a.size and b.size):
        said.append("it takes no empty arrays")
    if a.shape[-1] % 16:
        said.append(f"it takes K in whole 16 bytes, not {a.shape[-1]}")
    return said


def accepts_contiguous(packed: bool, a, *more, **static) -> list[str]:
    """`accepts_pair`, and whole tiles of rows."""
    said = accepts_pair(packed, a, *more, **static)
    if a.shape[0] % _TILE:
        said.append(f"it takes rows in tiles of {_TILE} of one expert, not {a.shape[0]} rows")
    return said


def columns_first(scale: jax.Array) -> jax.Array:
    """Scales [..., M, C] of 4 bytes -> [..., C, M padded to a multiple of 4]."""
    turned = jnp.swapaxes(scale, -1, -2)
    return jnp.pad(turned, [(0, 0)] * (turned.ndim - 1) + [(0, -turned.shape[-1] % _ALIGNED)])


def words(scale: jax.Array) -> jax.Array:
    """e8m0 scales [..., M, C] uint8 -> int32 [..., M, C / 4], the first in the lowest byte."""
    padded = jnp.pad(scale, [(0, 0)] * (scale.ndim - 1) + [(0, -scale.shape[-1] % 4)])
    return lax.bitcast_convert_type(padded.reshape(*padded.shape[:-1], -1, 4), jnp.int32)


def _layout(packed: bool, a_scale, b_scale, block: int, n: int):
    """Scales as the kernels want them, each laid out by XLA."""
    if not packed:
        return columns_first(a_scale), b_scale
    wide = jnp.repeat(b_scale, block, axis=-2)[..., :n, :]
    return columns_first(words(a_scale)), columns_first(words(wide))


def _view(scale: Any, rows: int) -> Any:
    """The [..., rows, columns] that a kernel is given of a tensor from `columns_first`."""
    return scale.mT[..., :rows, :]


def _product(published: Signature, packed: bool, scales, group: int, extra, operands, shape):
    """One call of a product: (a, b, further operands) to a bfloat16 result of `shape`."""
    function = function_of(published)
    (a, b, *more), (sa, sb) = operands, scales
    recipe = (1, 1, group) if packed else (1, 128, 128)

    def kernel(results, a, sa, b, sb, *more):
        sa = _view(sa, a.shape[-2])
        sb = _view(sb, b.shape[-2]) if packed else sb
        function(a=(a, sa), b=(b, sb), d=results[0], recipe=recipe, **extra(*more))

    result = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return dlpack.call(kernel, f"{published.path}{recipe}", result, a, sa, b, sb, *more)


def run_plain(packed: bool, a, a_scale, b, b_scale, *, group: int, block: int):
    """`fp8_gemm` by `fp8_gemm_nt`."""
    scales = _layout(packed, a_scale, b_scale, block, b.shape[-2])
    shape = a.shape[0], b.shape[0]
    return _product(PRODUCTS["fp8_gemm"], packed, scales, group, dict, (a, b), shape)


def run_contiguous(packed: bool, a, a_scale, b, b_scale, expert, *, group: int, block: int):
    """`grouped_contiguous` by `m_grouped_fp8_gemm_nt_contiguous`; it leaves rows of nobody."""
    scales = _layout(packed, a_scale, b_scale, block, b.shape[-2])
    y = _product(
        PRODUCTS["grouped_contiguous"], packed, scales, group,
        lambda layout: {"grouped_layout": layout}, (a, b, expert), (a.shape[0], b.shape[1]),
    )  # fmt: skip
    return jnp.where(expert[:, None] >= 0, y, 0)


def run_masked(
    packed: bool, a, a_scale, b, b_scale, count, *, group: int, block: int, expected: int
):
    """`grouped_masked` by `m_grouped_fp8_gemm_nt_masked`; it leaves rows beyond the counts."""
    scales = _layout(packed, a_scale, b_scale, block, b.shape[-2])
    y = _product(
        PRODUCTS["grouped_masked"], packed, scales, group,
        lambda masked: {"masked_m": masked, "expected_m": expected}, (a, b, count),
        (a.shape[0], a.shape[1], b.shape[1]),
    )  # fmt: skip
    real = jnp.arange(a.shape[1], dtype=jnp.int32)[None, :] < count[:, None]
    return jnp.where(real[:, :, None], y, 0)


# -- scores of the indexer -------------------------------------------------------------------------


def accepts_logits(q, keys, key_scale, weight, first, last, **static) -> list[str]:
    """What Hopper's kernel of scores demands."""
    said = [] if q.shape[1] in (32, 64) else [f"it takes 32 or 64 heads, not {q.shape[1]}"]
    if q.shape[2] not in (32, 64, 128):
        said.append(f"it takes vectors of 32, 64 or 128 values, not {q.shape[2]}")
    if not (q.size and keys.size):
        said.append("it takes no empty arrays")
    return said


def run_logits(q, keys, key_scale, weight, first, last):
    """`index_logits` by `fp8_fp4_mqa_logits`."""
    operands = (q, keys, key_scale, weight, first, last)

    def given(q, keys, key_scale, weight, first, last):
        return (q, None), (keys, key_scale), weight, first, last

    return _logits(given, operands, jnp.float32, keys.shape[0])


def accepts_packed(q, keys, weight, first, last, **static) -> list[str]:
    """What Blackwell's kernel of scores demands: 64 or 128 values, one word of scales each."""
    said = []
    if q.shape[1] not in (8, 16, 32, 64):
        said.append(f"it takes 8, 16, 32 or 64 heads, not {q.shape[1]}")
    if q.shape[2] != 68:
        said.append(f"it takes vectors of 128 values in 68 bytes, not of {q.shape[2]} bytes")
    if not (q.size and keys.size):
        said.append("it takes no empty arrays")
    return said


def run_packed(q, keys, weight, first, last):
    """`index_logits_packed` by `fp8_fp4_mqa_logits`: bytes cut into nibbles and words of scales."""

    def cut(packed):
        codes, scales = packed[..., :64], packed[..., 64:]
        return lax.bitcast_convert_type(codes, jnp.int8), words(scales)[..., 0]

    operands = (*cut(q), *cut(keys), weight.astype(jnp.bfloat16), first, last)

    def given(q, q_scale, keys, key_scale, weight, first, last):
        return (q, q_scale), (keys, key_scale), weight, first, last

    return _logits(given, operands, jnp.bfloat16, keys.shape[0]).astype(jnp.float32)


def _logits(given: Callable[..., Any], operands, dtype, count: int) -> jax.Array:
    """Scores [T, count] whose row t the library made from column 0 = first[t] on."""
    function = function_of(LOGITS)
    names, _ = parameters_of(function)

    def kernel(results, *tensors):
        q, kv, weight, first, last = given(*tensors)
        upstream = {"clean_logits": False, "logits_dtype": results[0].dtype}
        switches = upstream if names >= set(upstream) else {}
        made = function(
            q=q, kv=kv, weights=weight, cu_seq_len_k_start=first, cu_seq_len_k_end=last,
            max_seqlen_k=count, **switches,
        )  # fmt: skip
        results[0].copy_(made)

    first, last = operands[-2:]
    shape = jax.ShapeDtypeStruct((operands[0].shape[0], count), dtype)
    made = dlpack.call(kernel, f"{LOGITS.path}[{count}]", shape, *operands)
    column = jnp.arange(count, dtype=jnp.int32)[None, :]
    own = jnp.take_along_axis(made, jnp.maximum(column - first[:, None], 0), axis=1)
    seen = (column >= first[:, None]) & (column < last[:, None])
    return jnp.where(seen, own, np.asarray(-np.inf, dtype))


LOGITS_HOPPER = Impl(
    "deep_gemm_sm90", "dlpack", _capability(9, (_TORCH, LIBRARY)),
    "fp8_fp4_mqa_logits, e4m3 keys with a float32 scale each", run_logits, accepts_logits,
    seen=SEEN, by_name=dlpack.UNRECORDED,
)  # fmt: skip
LOGITS_BLACKWELL = Impl(
    "deep_gemm_sm100", "dlpack",
    Capability(("cuda",), (10,), ("uint8",), (_TORCH, LIBRARY)),
    "fp8_fp4_mqa_logits, packed FP4 queries and keys", run_packed, accepts_packed,
)  # fmt: skip
