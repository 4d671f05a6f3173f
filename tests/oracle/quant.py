"""Block quantizers, written as "quantize, then dequantize" (docs/model.md 3, 3.1, 3.2).

Everything here is float32 arithmetic on tables of representable values: no float8 or float4 type
of any library is used, so that a wrong cast elsewhere cannot hide behind the same wrong cast here.
"""

import numpy as np

FP8_BLOCK = 32
INDEX_BLOCK = 32
MAIN_BLOCK = 16
FP8_LARGEST = np.float32(448)
FP4_LARGEST = np.float32(6)


def _e4m3_magnitudes() -> np.ndarray:
    """The 127 finite magnitudes of e4m3fn; the position of a value is its 7-bit code."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    subnormal = np.ldexp(mantissa / 8.0, -6)
    normal = np.ldexp(1.0 + mantissa / 8.0, exponent - 7)
    return np.where(exponent == 0, subnormal, normal)


E4M3 = _e4m3_magnitudes()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def nearest_code(magnitude: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Position in `grid` of the value nearest to each magnitude >= 0; a tie takes the even code.

    Magnitudes above the largest value saturate.
    """
    middles = (grid[1:] + grid[:-1]) / 2  # exact in float64
    magnitude = np.asarray(magnitude, np.float64)
    below = np.searchsorted(middles, magnitude, side="left")
    tied = below != np.searchsorted(middles, magnitude, side="right")
    return below + (tied & (below % 2 == 1))


def round_to(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """float32 values of `x` rounded to signed values of `grid`; the sign of zero is kept."""
    value = grid[nearest_code(np.abs(x), grid)].astype(np.float32)
    return np.copysign(value, x)


def power_of_two_above(x: np.ndarray) -> np.ndarray:
    """Smallest power of two that is >= x, for positive float32 x."""
    fraction, exponent = np.frexp(np.asarray(x, np.float32))
    return np.ldexp(np.float32(1), exponent - (fraction == 0.5))


def _blocks(x: np.ndarray, size: int) -> np.ndarray:
    if x.shape[-1] % size:
        raise ValueError(f"the last axis must be a multiple of {size}, got shape {x.shape}")
    return np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, size)


def fp8_scale(x: np.ndarray) -> np.ndarray:
    """Power-of-two scale of every block of 32 of `x` [..., n] -> [..., n/32]."""
    largest = np.maximum(np.abs(_blocks(x, FP8_BLOCK)).max(axis=-1), np.float32(1e-4))
    return power_of_two_above(largest * np.float32(1 / 448))


def fp8(x: np.ndarray) -> np.ndarray:
    """Round trip through e4m3 with power-of-two scales by 32: linear inputs and window KV."""
    scale = fp8_scale(x)[..., None]
    scaled = np.clip(_blocks(x, FP8_BLOCK) / scale, -FP8_LARGEST, FP8_LARGEST)
    return (round_to(scaled, E4M3) * scale).reshape(x.shape)


def index_fp4_scale(x: np.ndarray) -> np.ndarray:
    """Power-of-two scale of every block of 32 of `x` [..., n] -> [..., n/32]."""
    floor = np.ldexp(np.float32(6), -126)
    largest = np.maximum(np.abs(_blocks(x, INDEX_BLOCK)).max(axis=-1), floor)
    return power_of_two_above(largest * np.float32(1 / 6))


def index_fp4(x: np.ndarray) -> np.ndarray:
    """Round trip through e2m1 with power-of-two scales by 32: index queries and keys."""
    scale = index_fp4_scale(x)[..., None]
    scaled = np.clip(_blocks(x, INDEX_BLOCK) / scale, -FP4_LARGEST, FP4_LARGEST)
    return (round_to(scaled, E2M1) * scale).reshape(x.shape)


def main_fp4_scale(x: np.ndarray) -> np.ndarray:
    """e4m3 scale (rounded to nearest, never 0) of every block of 16 of `x`."""
    floor = np.ldexp(np.float32(6), -9)
    largest = np.maximum(np.abs(_blocks(x, MAIN_BLOCK)).max(axis=-1), floor)
    return round_to(np.minimum(largest / np.float32(6), FP8_LARGEST), E4M3)


def main_fp4(x: np.ndarray) -> np.ndarray:
    """Round trip through e2m1 with e4m3 scales by 16: the compressed main KV."""
    scale = main_fp4_scale(x)[..., None]
    scaled = np.clip(_blocks(x, MAIN_BLOCK) / scale, -FP4_LARGEST, FP4_LARGEST)
    return (round_to(scaled, E2M1) * scale).reshape(x.shape)
