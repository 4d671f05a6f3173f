"""Block formats against NumPy and ml_dtypes: every code, every bfloat16 pattern, every midpoint.

Recorded vectors of the published implementation are in tests/golden/test_ops.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax import quant
from deepinfer_jax.quant import Quantized
from tests.small import bits

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CODES = np.arange(256, dtype=np.uint8)

# -- an independent quantizer in float64 -----------------------------------------------------------


def nearest_e2m1(value: np.ndarray) -> np.ndarray:
    """Round to the grid, ties to the even code, keeping the sign; by search, not by thresholds."""
    distance = np.abs(np.abs(value)[..., None] - GRID)
    closest = distance == distance.min(axis=-1, keepdims=True)
    even_first = np.where(np.arange(8) % 2 == 0, 2, 1) * closest
    return np.copysign(GRID[even_first.argmax(axis=-1)], value)


def nearest_e4m3(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32).astype(E4M3).astype(np.float64)


def power_of_two_above(value: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(value.astype(np.float64))
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def simulated(x: np.ndarray, kind: str) -> np.ndarray:
    """Quantize and dequantize [..., K] by the formulas of docs/model.md 3.1 and 3.2."""
    group = 16 if kind == "main" else 32
    g = x.astype(np.float32).reshape(*x.shape[:-1], -1, group)
    amax = np.abs(g).max(axis=-1, keepdims=True)
    if kind == "fp8":
        scale = power_of_two_above(np.maximum(amax, np.float32(1e-4)) * np.float32(1 / 448))
    elif kind == "index":
        scale = power_of_two_above(np.maximum(amax, np.float32(6 * 2.0**-126)) * np.float32(1 / 6))
    else:
        least = np.maximum(amax, np.float32(6 * 2.0**-9))
        scale = nearest_e4m3(np.minimum(least / np.float32(6), np.float32(448)))
    limit = 448 if kind == "fp8" else 6
    value = np.clip((g / scale.astype(np.float32)).astype(np.float64), -limit, limit)
    rounded = nearest_e4m3(value) if kind == "fp8" else nearest_e2m1(value)
    return (rounded * scale).reshape(x.shape)


# -- codes -----------------------------------------------------------------------------------------


def test_every_e4m3_code_decodes() -> None:
    np.testing.assert_array_equal(quant.decode_e4m3(CODES), CODES.view(E4M3).astype(np.float32))


def test_every_e8m0_code_decodes() -> None:
    """Code 255 is no number. Bits, because 2^-127 is a subnormal that comparisons may flush."""
    got = quant.decode_e8m0(CODES[:255])
    np.testing.assert_array_equal(bits(got), bits(np.ldexp(np.float32(1), np.arange(255) - 127)))


def test_every_nibble_decodes_and_encodes() -> None:
    nibbles = np.arange(16, dtype=np.uint8)
    values = np.concatenate([GRID, -GRID]).astype(np.float32)
    np.testing.assert_array_equal(bits(quant.decode_e2m1(nibbles)), bits(values))
    np.testing.assert_array_equal(quant.encode_e2m1(jnp.asarray(values)), nibbles)


def test_nibbles_pack_low_first() -> None:
    assert int(quant.pack_nibbles(jnp.asarray([0x3, 0xA], jnp.uint8))[0]) == 0xA3
    every = CODES.reshape(4, 64)
    np.testing.assert_array_equal(quant.pack_nibbles(quant.unpack_nibbles(every)), every)


def test_power_of_two_above() -> None:
    """At, just below and just above powers of two, where logarithms go wrong."""
    powers = np.ldexp(np.float32(1), np.arange(-120, 120))
    for value in (powers, np.nextafter(powers, 0), np.nextafter(powers, np.float32(np.inf))):
        np.testing.assert_array_equal(quant.pow2ceil(value), power_of_two_above(value))


# -- every bfloat16 --------------------------------------------------------------------------------

PATTERNS = np.arange(1 << 16, dtype=np.uint16)
EXPONENT = (PATTERNS >> 7) & 255
# Infinities and NaNs are no values, the largest binade may round up to infinity, and subnormals are
# flushed by XLA on CPU.
NORMAL = PATTERNS[(EXPONENT > 0) & (EXPONENT < 254)].view(ml_dtypes.bfloat16)
SIMULATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "fp8": jax.jit(quant.qdq_fp8),
    "index": jax.jit(quant.qdq_index),
    "main": jax.jit(quant.qdq_main),
}
PACKERS = {
    "fp8": (jax.jit(quant.pack_window), quant.unpack_window, quant.window_bytes),
    "index": (jax.jit(quant.pack_index), quant.unpack_index, quant.index_bytes),
    "main": (jax.jit(quant.pack_main), quant.unpack_main, quant.main_bytes),
}
quantize = jax.jit(quant.quantize, static_argnums=1)
dequantize = jax.jit(quant.dequantize, static_argnums=1)


def rows(order: str) -> np.ndarray:
    """Every normal bfloat16 in rows of 64: neighbours in size together, or all sizes mixed."""
    values = np.sort(NORMAL)
    if order == "mixed":
        values = np.random.default_rng(8).permutation(values)
    return values[: len(values) // 64 * 64].reshape(-1, 64)


@pytest.mark.parametrize("order", ["sorted", "mixed"])
@pytest.mark.parametrize("kind", SIMULATORS)
def test_every_bfloat16_quantizes(kind: str, order: str) -> None:
    x = rows(order)
    got = np.asarray(SIMULATORS[kind](jnp.asarray(x)))
    want = simulated(x, kind)
    np.testing.assert_array_equal(want.astype(ml_dtypes.bfloat16).astype(np.float64), want)
    np.testing.assert_array_equal(got.astype(np.float64), want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("kind", SIMULATORS)
def test_every_midpoint(kind: str) -> None:
    """Halfway between neighbouring codes, and one bfloat16 to either side, at six scales."""
    codes = GRID if kind != "fp8" else np.unique(np.abs(CODES[:127].view(E4M3).astype(np.float64)))
    middle = ((codes[1:] + codes[:-1]) / 2).astype(ml_dtypes.bfloat16)
    near = [np.nextafter(middle, ml_dtypes.bfloat16(s * 1e3)) for s in (-1, 1)]
    values = np.concatenate([middle, *near, -middle])
    group = 16 if kind == "main" else 32
    values = np.resize(values, (-(-len(values) // (group - 1)), group - 1)).astype(np.float32)
    top = np.full((len(values), 1), codes[-1], np.float32)  # fixes the group's scale at 1
    x = np.concatenate([top, values], axis=1)
    x = np.concatenate([x * 2.0**e for e in (-6, -3, 0, 1, 4, 5)]).astype(ml_dtypes.bfloat16)
    got = np.asarray(SIMULATORS[kind](jnp.asarray(x)))
    np.testing.assert_array_equal(got.astype(np.float64), simulated(x, kind))


def test_every_midpoint_at_every_scale_of_the_main_quantizer() -> None:
    """Its scales are no powers of two: times the reciprocal would miss 42 of these ties."""
    scales = np.unique(np.abs(CODES[1:127].view(E4M3).astype(np.float32)))[:, None]
    middle = np.array([(a + b) / 2 for a, b in itertools.pairwise(GRID)], np.float32)[None, :]
    exact = (middle * scales).astype(ml_dtypes.bfloat16)
    assert np.array_equal(exact.astype(np.float32), middle * scales)
    near = [np.nextafter(exact, ml_dtypes.bfloat16(s * 1e6)) for s in (-1, 1)]
    top = (6 * scales).astype(ml_dtypes.bfloat16)  # fixes the scale
    x = np.concatenate([top, exact, -exact, top], axis=1)
    x = np.concatenate([x, np.concatenate([top, *near, top], axis=1)])
    got = np.asarray(SIMULATORS["main"](jnp.asarray(x)))
    np.testing.assert_array_equal(got.astype(np.float64), simulated(x, "main"))


def test_conformance_vectors() -> None:
    """One vector through every quantizer."""
    x = (3.3 * np.sin(0.37 * np.arange(32))).astype(ml_dtypes.bfloat16)
    x = jnp.asarray(np.broadcast_to(np.tile(x, 2), rows("sorted").shape))  # a shape compiled above
    want = {
        "fp8": [0, 1.25, 2.25, 3, 3.25, 3.25, 2.5, 1.75],
        "index": [0, 1, 2, 3, 3, 3, 3, 1.5],
        "main": [0, 1.125, 2.25, 3.375, 3.375, 3.375, 2.25, 1.6875],
    }
    for kind, values in want.items():
        got = np.asarray(SIMULATORS[kind](x))
        np.testing.assert_array_equal(got[0, :8].astype(np.float64), values)
    packed = {kind: np.asarray(pack(x))[0] for kind, (pack, *_) in PACKERS.items()}
    np.testing.assert_array_equal(packed["fp8"][64:], [127 - 7, 127 - 7])
    np.testing.assert_array_equal(packed["index"][32:], [127, 127])
    np.testing.assert_array_equal(packed["main"][32:].view(E4M3).astype(float), [0.5625] * 4)


# -- packed rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PACKERS)
def test_packed_rows_hold_what_the_simulation_gives(kind: str) -> None:
    pack, unpack, size = PACKERS[kind]
    x = jnp.asarray(rows("mixed"))
    packed = pack(x)
    assert (packed.shape, packed.dtype) == ((len(x), size(64)), jnp.uint8)
    back = jax.jit(unpack, static_argnums=(1, 2))(packed, 64, jnp.bfloat16)
    np.testing.assert_array_equal(bits(back), bits(SIMULATORS[kind](x)))


def test_released_row_sizes() -> None:
    """docs/model.md 10: 528 bytes per window row, 288 and 68 per compressed entry."""
    assert (quant.window_bytes(512), quant.main_bytes(512), quant.index_bytes(128)) == (
        528,
        288,
        68,
    )


@pytest.mark.parametrize("kind", SIMULATORS)
def test_simulation_is_a_fixed_point_and_passes_gradients(kind: str) -> None:
    """Where the e4m3 scale of `main` is a subnormal, rounding it can lose the largest code."""
    x = rows("sorted")
    if kind == "main":
        x = np.where(np.abs(x) < 6 * 2.0**-6, ml_dtypes.bfloat16(0), x)
    x = jnp.asarray(x)
    once, tangent = jax.jvp(SIMULATORS[kind], (x,), (x,))
    np.testing.assert_array_equal(bits(SIMULATORS[kind](once)), bits(once))
    np.testing.assert_array_equal(bits(tangent), bits(x))


@pytest.mark.parametrize("call", [quant.qdq_fp8, quant.qdq_main, quant.pack_index])
def test_a_width_that_is_no_multiple_is_refused(call: Callable) -> None:
    with pytest.raises(ValueError, match=r"last axis must be a multiple of .* got 40"):
        call(jnp.zeros((3, 40), jnp.bfloat16))


# -- weights ---------------------------------------------------------------------------------------

FORMATS = ("fp8_block", "fp8_group", "fp4_group")


def random_weight(format: quant.Format) -> Quantized:
    """Codes of every kind but NaN, scales of a wide range, edge blocks where they may occur."""
    rng = np.random.default_rng(13)
    n, k = (70, 45) if format == "fp8_block" else (7, 96)
    codes = rng.integers(0, 256, (3, n, k // 2 if format == "fp4_group" else k), np.uint8)
    if format != "fp4_group":
        codes = np.where((codes & 127) == 127, np.uint8(0), codes)
    blocks = (-(-n // 32) if format == "fp8_block" else n, -(-k // 32))
    scale = rng.integers(90, 160, (3, *blocks), np.uint8)
    return Quantized(jnp.asarray(codes), jnp.asarray(scale), format)


def decoded(weight: Quantized) -> np.ndarray:
    """The formulas of docs/model.md 13 in float64."""
    codes, scale = np.asarray(weight.codes), np.asarray(weight.scale).astype(np.int64)
    if weight.format == "fp4_group":
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        value = np.concatenate([GRID, -GRID])[nibbles]
    else:
        value = codes.view(E4M3).astype(np.float64)
    n, k = value.shape[-2:]
    row = np.arange(n) // 32 if weight.format == "fp8_block" else np.arange(n)
    return value * 2.0 ** (scale[..., row[:, None], np.arange(k) // 32] - 127)


@pytest.mark.parametrize("format", FORMATS)
def test_stored_weights_decode_exactly(format: quant.Format) -> None:
    weight = random_weight(format)
    for dtype in (jnp.bfloat16, jnp.float32):
        got = np.asarray(dequantize(weight, dtype))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(np.float64), decoded(weight))


@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_a_stored_weight_keeps_its_values(format: quant.Format) -> None:
    value = dequantize(random_weight(format), jnp.float32)
    again = quantize(value, format)
    assert (again.codes.dtype, again.scale.dtype) == (jnp.uint8, jnp.uint8)
    np.testing.assert_array_equal(dequantize(again, jnp.float32), value)


@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_is_within_half_a_step(format: quant.Format) -> None:
    """Half a unit of 3 mantissa bits, or half the widest FP4 step, of the block's largest value."""
    w = np.random.default_rng(2).standard_normal((2, 64, 96)).astype(np.float32)
    stored = quantize(jnp.asarray(w), format)
    error = np.abs(decoded(stored) - w)
    step = 1 / 4 if format == "fp4_group" else 1 / 16
    assert error.max() <= np.abs(w).max() * step
    limit = 6 if format == "fp4_group" else 448
    tile = 32 if format == "fp8_block" else 1
    amax = np.abs(w.reshape(2, 64 // tile, tile, 3, 32)).max(axis=(2, 4))
    scale = power_of_two_above(amax * np.float32(1 / limit))
    np.testing.assert_array_equal(np.asarray(stored.scale).view(E8M0).astype(np.float64), scale)


def test_engram_rows_survive_activation_rounding() -> None:
    """docs/model.md 5.3: e4m3 times a power of two is already what the FP8 quantizer gives."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 127, rows("sorted").shape, np.uint8)
    codes[:, ::32] = 126  # the largest code of each group is in use, as in a stored table
    scale = rng.integers(118, 130, (len(codes), 2), np.uint8)
    value = dequantize(Quantized(jnp.asarray(codes), jnp.asarray(scale), "fp8_group"))
    np.testing.assert_array_equal(bits(SIMULATORS["fp8"](value)), bits(value))
