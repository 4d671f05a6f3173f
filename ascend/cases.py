"""Operands for every operation that the executor can run alone, and how far results may be off.

Their meaning is the operation's twin. Sizes are small and all different; a result of another order
of sums differs in its last places, so floats have a bound: of float32 a few steps of 2^-24 for each
of the numbers that are summed, of bfloat16 one step of 2^-8. Indices must be equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from kernels_bridge.ops import attention, gemm, logits, norms, selection, streams, tokens
from kernels_bridge.registry import Op

FLOAT32, BFLOAT16, EXACT = 1e-5, 2.0**-8, 0.0
_FP8 = ml_dtypes.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation, its operands, its static arguments, and the bound of differences.

    bound: of the largest difference, relative to the largest number of the result.
    """

    op: Op
    operands: Callable[[], tuple[Any, ...]]
    static: Mapping[str, Any]
    bound: float


def _normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


def _integers(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def _rows() -> tuple[Any, ...]:
    """Five queries with three heads, ids outside of the table among them."""
    ids, extra = _integers(4, -3, 14, 5, 4), _integers(5, -3, 14, 5, 7)
    return _normal(1, 5, 3, 20), _normal(2, 11, 20), ids, extra, _normal(3, 3)


def _bytes(seed: int, *shape: int, codes: int, scales: np.ndarray) -> np.ndarray:
    """Vectors as caches hold them: codes of FP4, two to a byte, and then the given scales."""
    pairs = _integers(seed, 0, 256, *shape, codes).astype(np.uint8)
    return np.concatenate([pairs, np.broadcast_to(scales, (*shape, len(scales)))], axis=-1)


def _pages() -> tuple[Any, ...]:
    """Pages of 4 tokens in FP8 and of 2 in FP4 (docs/model.md 10)."""
    q = _normal(1, 2, 3, 5, 512, dtype=ml_dtypes.bfloat16)
    window = _normal(2, 3, 4, 512, dtype=_FP8).view(np.uint8)
    powers = np.full((3, 4, 16), 126, np.uint8)
    halves = np.full(32, 0.5, _FP8).view(np.uint8)
    entries = _bytes(3, 7, 2, codes=256, scales=halves)
    ids, extra = _integers(4, -1, 12, 2, 3, 7), _integers(5, -1, 14, 2, 3, 9)
    return q, np.concatenate([window, powers], axis=-1), ids, entries, extra, _normal(6, 5)


def _scores() -> tuple[Any, ...]:
    q, keys = _normal(1, 4, 5, 12, dtype=_FP8), _normal(2, 9, 12, dtype=_FP8)
    first, last = np.array([0, 2, 5, 9], np.int32), np.array([9, 7, 5, 9], np.int32)
    return q, keys, np.abs(_normal(3, 9)), _normal(4, 4, 5), first, last


def _packed_scores() -> tuple[Any, ...]:
    powers = np.array([125, 127, 128, 126], np.uint8)
    q, keys = _bytes(1, 3, 4, codes=64, scales=powers), _bytes(2, 7, codes=64, scales=powers)
    return q, keys, _normal(3, 3, 4), np.zeros(3, np.int32), np.full(3, 7, np.int32)


def _best() -> tuple[Any, ...]:
    """Rows of few different numbers, so that ties decide."""
    values = np.array([-np.inf, -1.5, -0.0, 0.0, 0.25, 3.0], np.float32)
    return values[_integers(6, 0, 6, 40, 13)], _integers(7, 0, 14, 40)


def _weights(seed: int, *shape: int, rows: int) -> tuple[Any, Any]:
    """FP8 codes and the exponents of their blocks of `rows` by 16."""
    blocks = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // 16))
    power = _integers(seed + 1, 120, 130, *blocks).astype(np.uint8)
    return _normal(seed, *shape, dtype=_FP8), power


def _product() -> tuple[Any, ...]:
    return (*_weights(1, 7, 40, rows=1), *_weights(3, 10, 40, rows=8))


def _fp4_product() -> tuple[Any, ...]:
    scale_a, scale_b = (_integers(n, 120, 130, n, 2).astype(np.uint8) for n in (7, 10))
    b = _integers(3, 0, 256, 10, 32).astype(np.uint8)
    return _normal(1, 7, 64, dtype=_FP8), scale_a, b, scale_b


def _contiguous() -> tuple[Any, ...]:
    expert = np.array([1, 1, -1, 0, 2, 2, 0], np.int32)
    return (*_weights(1, 7, 40, rows=1), *_weights(3, 3, 10, 40, rows=8), expert)


def _masked() -> tuple[Any, ...]:
    count = np.array([5, 0, 2], np.int32)
    return (*_weights(1, 3, 5, 40, rows=1), *_weights(3, 3, 10, 40, rows=8), count)


def _normed() -> tuple[Any, ...]:
    angles = _normal(3, 3, 32)
    x = _normal(1, 3, 512, dtype=ml_dtypes.bfloat16)
    return x, _normal(2, 512), np.cos(angles), np.sin(angles)


def _mixes() -> tuple[Any, ...]:
    return _normal(1, 5, 24), np.abs(_normal(2, 3)), _normal(3, 24)


def _chosen() -> tuple[Any, ...]:
    """Noise is compared by what it makes of even choices."""
    seed = _integers(2, 0, 2**31 - 1, 7, 2).astype(np.uint32)
    return np.zeros((7, 300), np.float32), seed, _integers(3, 0, 99, 7)


def _many_rows() -> tuple[Any, ...]:
    """Two queries with the heads and lists of the released model."""
    ids, extra = _integers(4, -9, 909, 2, 128), _integers(5, -9, 909, 2, 512)
    bfloat16 = ml_dtypes.bfloat16
    rows = _normal(2, 900, 512, dtype=bfloat16)
    return _normal(1, 2, 64, 512, dtype=bfloat16), rows, ids, extra, _normal(3, 64)


def _many_columns() -> tuple[Any, ...]:
    values = np.round(_normal(6, 3, 1000), 1)
    return values, np.array([1000, 700, 30], np.int32)


NORM = Case(norms.norm_rope, _normed, {"eps": 1e-20}, BFLOAT16)
MIXES = Case(streams.stream_mixes, _mixes, {"streams": 4, "iterations": 20, "eps": 1e-6}, FLOAT32)
# What `ascend.kernels` has kernels for, in the sizes that they are made for.
KERNELS: tuple[Case, ...] = (
    NORM,
    Case(attention.attend_rows, _many_rows, {"scale": 512**-0.5}, BFLOAT16),
    MIXES,
    Case(selection.select_best, _many_columns, {"k": 512}, EXACT),
)
_BLOCKS = {"group": 16, "block": 8}
CASES: tuple[Case, ...] = (
    Case(logits.index_logits, _scores, {}, FLOAT32),
    Case(logits.index_logits_packed, _packed_scores, {}, FLOAT32),
    Case(selection.select_best, _best, {"k": 5}, EXACT),
    Case(attention.attend_rows, _rows, {"scale": 0.3}, FLOAT32),
    Case(attention.attend_pages, _pages, {"scale": 0.05}, BFLOAT16),
    Case(gemm.fp8_gemm, _product, _BLOCKS, BFLOAT16),
    Case(gemm.fp4_gemm, _fp4_product, {}, BFLOAT16),
    Case(gemm.grouped_contiguous, _contiguous, _BLOCKS, BFLOAT16),
    Case(gemm.grouped_masked, _masked, {**_BLOCKS, "expected": 2}, BFLOAT16),
    NORM,
    MIXES,
    Case(tokens.choose_token, _chosen, {}, EXACT),
)


def difference(got: Any, want: Any) -> float:
    """The largest difference of two results (arrays, or tuples of them), relative to the largest
    number of the second; inf where shapes, dtypes, NaN or infinities differ.
    """
    if isinstance(want, tuple | list):
        return max(difference(a, b) for a, b in zip(got, want, strict=True))
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return np.inf
    if not want.size:
        return 0.0
    if want.dtype.kind in "iub":
        return 0.0 if np.array_equal(got, want) else np.inf
    got, want = got.astype(np.float64), want.astype(np.float64)
    real = np.isfinite(want)
    if not np.array_equal(got[~real], want[~real], equal_nan=True):
        return np.inf
    if not real.any():
        return 0.0
    off = np.abs(np.where(np.isfinite(got[real]), got[real], np.inf) - want[real]).max()
    return float(off / max(np.abs(want[real]).max(), 1e-30))
