"""FP8 and FP4 codes to the values they stand for, exactly, inside a kernel.

Two forms of one function: in operations of JAX, and in instructions of a chip from Hopper on, which
decode two values at once. A kernel that reads stored weights has little time for each of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton

from deepinfer_jax import quant

_E2M1_SCALE = np.float32(64)


def assembly(interpret: bool) -> bool:
    """Whether kernels may use `assembled`: where they are compiled, for a chip that has it."""
    if interpret:
        return False
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    return float(capability) >= 9


def factor(scale: jax.Array, dtype: Any) -> jax.Array:
    """uint8 e8m0 scales as float32 or bfloat16, exactly."""
    if dtype != jnp.bfloat16:
        return quant.decode_e8m0(scale)
    bits = jnp.where(scale == 0, jnp.uint16(1 << 6), scale.astype(jnp.uint16) << 7)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _e2m1(nibble: jax.Array) -> jax.Array:
    """uint8 nibbles -> e4m3 codes of 2^-6 times their value: both formats count up in one order."""
    return ((nibble & 8) << 4) | ((nibble & 7) << 2)


def decoded(codes: jax.Array, factor: jax.Array, kind: str) -> jax.Array:
    """uint8 codes [..., bytes], each with the `factor` of its scale -> float32 [..., values]."""
    if kind != "fp4_group":
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32) * factor

    def value(nibble):
        return lax.bitcast_convert_type(_e2m1(nibble), jnp.float8_e4m3fn).astype(jnp.float32)

    factor = factor * _E2M1_SCALE
    return _side_by_side(value(codes & 15) * factor, value(codes >> 4) * factor)


def _side_by_side(low: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.stack([low, high], axis=-1).reshape(*low.shape[:-1], 2 * low.shape[-1])


# A code's sign and the rest of it go to the places that they have in bfloat16, two codes in a
# register. The number is then too small by a power of two alone, whether it is normal or not, and
# two exact products, by that power and by the scale, make it what it should be.

_TWO_PRODUCTS = "{.reg .b32 t, p; mov.b32 p, %s; mul.rn.bf16x2 t, $1, p; mul.rn.bf16x2 $0, t, $2;}"
_REST, _SIGN = np.int32(0x01C001C0), np.int32(-0x7FFF8000)  # exponent and mantissa; sign
_E2M1 = _TWO_PRODUCTS % "0x7E807E80"  # 2^126 twice
_E4M3_PAIR = """
prmt.b32 a, $2, 0, %s;
and.b32 t, a, 0x007F007F;
and.b32 u, a, 0x00800080;
mul.lo.u32 t, t, 16;
mad.lo.u32 t, u, 256, t;
mul.rn.bf16x2 t, t, p;
mul.rn.bf16x2 %s, t, %s;
"""
_E4M3 = (
    "{.reg .b32 a, p, t, u; mov.b32 p, 0x7B807B80;"  # 2^120 twice
    + _E4M3_PAIR % ("0x4140", "$0", "$3")
    + _E4M3_PAIR % ("0x4342", "$1", "$4")
    + "}"
)


def assembled(codes: jax.Array, factor: jax.Array, kind: str) -> jax.Array:
    """uint8 codes [..., bytes], each with the `factor` of its scale in bfloat16 -> bfloat16
    [..., values]. A NaN has no code in weights, and none here.
    """
    if kind != "fp4_group":
        (value,) = triton.elementwise_inline_asm(
            _E4M3, args=[codes, factor],
            constraints="=r,=r,r,r,r", pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
        )  # fmt: skip
        return value
    byte = codes.astype(jnp.int32)
    twice = lax.bitcast_convert_type(factor, jnp.uint16).astype(jnp.int32) * 0x10001
    # Bits 0-2 and 4-6 to 6-8 and 22-24, bits 3 and 7 to 15 and 31.
    rest, sign = (byte * 0x40040) & _REST, (byte * 0x1001000) & _SIGN
    return _halves(_scaled(rest | sign, twice))


def _scaled(pair: jax.Array, twice: jax.Array) -> jax.Array:
    """Two codes in their places, times 2^126 and the factor that stands twice in `twice`."""
    (value,) = triton.elementwise_inline_asm(
        _E2M1, args=[pair, twice],
        constraints="=r,r,r", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(pair.shape, jnp.int32)],
    )  # fmt: skip
    return value


def _halves(pair: jax.Array) -> jax.Array:
    """int32 [..., n] -> the bfloat16 numbers in them [..., 2 n], low halves first."""
    halves = [pair.astype(jnp.int16), (pair >> 16).astype(jnp.int16)]
    return _side_by_side(*(lax.bitcast_convert_type(half, jnp.bfloat16) for half in halves))


WORD_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the values of a word, as `words` gives them


def words(word: jax.Array, factor: jax.Array, assembly: bool) -> jax.Array:
    """int32 words [..., n] of eight FP4 codes, each with its `factor` -> [..., 8 n] in WORD_ORDER.

    assembly: in instructions of the chip, for a bfloat16 factor; else float32. Codes four apart are
    sixteen bits apart: they go to the halves of a register by one shift.
    """

    def shifted(by):
        return word << by if by >= 0 else word >> -by  # what a shift brings in is masked

    if not assembly:
        nibbles = [((word >> 4 * i) & 15).astype(jnp.uint8) for i in WORD_ORDER]
        value = [
            lax.bitcast_convert_type(_e2m1(each), jnp.float8_e4m3fn).astype(jnp.float32)
            for each in nibbles
        ]
        return _ordered([each * (factor * _E2M1_SCALE) for each in value])
    twice = lax.bitcast_convert_type(factor, jnp.uint16).astype(jnp.int32) * 0x10001
    places = [(shifted(6 - 4 * i) & _REST) | (shifted(12 - 4 * i) & _SIGN) for i in range(4)]
    return _halves(_ordered([_scaled(each, twice) for each in places]))


def _ordered(terms: list[jax.Array]) -> jax.Array:
    """Arrays [..., n], a power of two of them -> [..., n * terms], theirs side by side."""
    shape = (*terms[0].shape[:-1], -1)
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [jnp.stack([terms[i], terms[i + half]], axis=-1) for i in range(half)]
    return terms[0].reshape(shape)
