"""FP8 and FP4 block formats: exact decoding of weights, quantizers of activations and caches.

Everything here is elementwise or a maximum, so no result depends on an order of summation. All
decoded values are exact in bfloat16 (docs/model.md 3). Codes travel as uint8: compilers convert
whole stacks of narrow floats when one layer is sliced out of them, but leave bytes alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import summaries

Format = Literal["fp8_block", "fp8_group", "fp4_group", "bf16_bits"]
GROUP = 32  # columns (and, for fp8_block, rows) that share one e8m0 scale
MAIN_KV_GROUP = 16  # columns that share one e4m3 scale in the compressed main KV

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_DOUBLED_E2M1 = 0xC8643210  # twice the magnitude of e2m1 code c, in bits 4c .. 4c+3


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["format"]
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A weight in its released storage, or decoded to the bits of its bfloat16 values.

    format      codes                                        scale (uint8, e8m0)
    fp8_block   uint8 [..., N, K] e4m3                       [..., ceil(N/32), ceil(K/32)]
    fp8_group   uint8 [..., N, K] e4m3                       [..., N, K/32]
    fp4_group   uint8 [..., N, K/2], even column low nibble  [..., N, K/32]
    bf16_bits   uint16 [..., N, K]                           None
    """

    codes: Any
    scale: Any
    format: Format

    __repr__ = summaries.of_fields


# -- decoding --------------------------------------------------------------------------------------


def decode_e8m0(code: jax.Array) -> jax.Array:
    """uint8 exponents -> float32 2^(code-127); code 0 is the subnormal 2^-127."""
    bits = jnp.where(code == 0, jnp.uint32(1 << 22), code.astype(jnp.uint32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def decode_e4m3(code: jax.Array) -> jax.Array:
    """uint8 e4m3 (fn) codes -> float32."""
    return lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float32)


def decode_e2m1(nibble: jax.Array) -> jax.Array:
    """Integers 0..15 (bit 3 sign, bits 0-2 of {0,.5,1,1.5,2,3,4,6}) -> float32."""
    code = nibble.astype(jnp.uint32)
    doubled = (np.uint32(_DOUBLED_E2M1) >> ((code & 7) << 2)) & 15
    return doubled.astype(jnp.float32) * jnp.where(code >= 8, np.float32(-0.5), np.float32(0.5))


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """[..., K/2] bytes -> [..., K] nibbles; the even element is the low one (docs/model.md 13)."""
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], -1)


def pack_nibbles(nibbles: jax.Array) -> jax.Array:
    """[..., K] nibbles -> [..., K/2] bytes; inverse of `unpack_nibbles`."""
    pair = nibbles.astype(jnp.uint8).reshape(*nibbles.shape[:-1], -1, 2)
    return pair[..., 0] | (pair[..., 1] << 4)


def _spread(scale: jax.Array, group: int, width: int, axis: int) -> jax.Array:
    """Repeat scales along `axis` so that every element has one; the last group may be short."""
    axis = axis % scale.ndim
    wide = jnp.repeat(scale, group, axis=axis)
    return lax.slice_in_dim(wide, 0, width, axis=axis)


def dequantize(weight: Quantized, dtype: Any = jnp.bfloat16) -> jax.Array:
    """The stored weight [..., N, K] as floats; exact in bfloat16 and wider."""
    if weight.format == "bf16_bits":
        return lax.bitcast_convert_type(weight.codes, jnp.bfloat16).astype(dtype)
    scale = decode_e8m0(weight.scale)
    if weight.format == "fp4_group":
        value = decode_e2m1(unpack_nibbles(weight.codes))
    else:
        value = decode_e4m3(weight.codes)
    if weight.format == "fp8_block":
        scale = _spread(scale, GROUP, value.shape[-2], -2)
    scale = _spread(scale, GROUP, value.shape[-1], -1)
    return (value * scale).astype(dtype)


def decode_to_bits(weight: Quantized | jax.Array) -> Quantized:
    """A stored or bfloat16 weight decoded once, to the bit patterns of its bfloat16 values (exact).

    Bits and not floats, because XLA:CPU converts a whole stack of bfloat16 to float32 every time
    one layer is sliced out of it.
    """
    value = dequantize(weight) if isinstance(weight, Quantized) else weight.astype(jnp.bfloat16)
    return Quantized(lax.bitcast_convert_type(value, jnp.uint16), None, "bf16_bits")


# -- encoding --------------------------------------------------------------------------------------


def pow2ceil(a: jax.Array) -> jax.Array:
    """Smallest power of two >= a, for positive normal float32, on bits (docs/model.md 3)."""
    bits = lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32)
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & np.uint32(0xFF800000), jnp.float32)


def encode_e8m0(scale: jax.Array) -> jax.Array:
    """Exact powers of two (float32, normal) -> uint8 exponents."""
    return (lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)


def encode_e4m3(value: jax.Array) -> jax.Array:
    """float32 already inside [-448, 448] -> uint8 e4m3 codes, round to nearest even."""
    return lax.bitcast_convert_type(value.astype(jnp.float8_e4m3fn), jnp.uint8)


def _round_e4m3(value: jax.Array) -> jax.Array:
    """float32 inside [-448, 448] -> the nearest e4m3 value, ties to even, as float32."""
    fine = jnp.abs(value) < np.float32(2.0**-6)
    normal = lax.reduce_precision(value, exponent_bits=8, mantissa_bits=3)
    return jnp.where(fine, jnp.round(value * 512) * np.float32(1 / 512), normal)


def _round_e2m1(value: jax.Array) -> jax.Array:
    """float32 inside [-6, 6] -> the nearest e2m1 value, ties to the even code, as float32."""
    fine = jnp.abs(value) < 1
    normal = lax.reduce_precision(value, exponent_bits=8, mantissa_bits=1)
    return jnp.where(fine, jnp.round(value * 2) * np.float32(0.5), normal)


def encode_e2m1(value: jax.Array) -> jax.Array:
    """float32 inside [-6, 6] -> nibbles; ties to the even code, the sign of zero is kept."""
    bits = lax.bitcast_convert_type(_round_e2m1(value), jnp.uint32)
    # Exponent and first mantissa bit count the codes from 1.0 (code 2) on; 0.5 is code 1.
    steps = (bits & np.uint32(0x7FFFFFFF)) >> 22
    code = jnp.where(steps >= 254, steps - 252, (steps > 0).astype(jnp.uint32))
    return (code | ((bits >> 31) << 3)).astype(jnp.uint8)


def _groups(x: jax.Array, group: int) -> jax.Array:
    if x.shape[-1] % group:
        raise ValueError(
            f"last axis must be a multiple of {group} to be quantized, got {x.shape[-1]}"
        )
    return x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)


def _scaled(x: jax.Array, scale: jax.Array, limit: float) -> jax.Array:
    return jnp.clip(x / scale[..., None], -limit, limit)


def _fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., K] -> (clamped x/scale [..., K/32, 32], scale [..., K/32]) of docs/model.md 3.1."""
    g = _groups(x, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(g), axis=-1), np.float32(1e-4))
    scale = pow2ceil(amax * np.float32(1 / _E4M3_MAX))
    return _scaled(g, scale, _E4M3_MAX), scale


def _fp4_e8m0(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    g = _groups(x, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(g), axis=-1), np.float32(6 * 2.0**-126))
    scale = pow2ceil(amax * np.float32(1 / _E2M1_MAX))
    return _scaled(g, scale, _E2M1_MAX), scale


def _fp4_e4m3(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    g = _groups(x, MAIN_KV_GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(g), axis=-1), np.float32(6 * 2.0**-9))
    scale = _round_e4m3(jnp.minimum(amax / np.float32(6), np.float32(_E4M3_MAX)))
    # Scales are no powers of two here, and compilers divide by multiplying with the reciprocal.
    # That can miss an exact tie by its last bit; without the last three bits it finds all of them.
    quotient = g * (1 / scale)[..., None]
    quotient = lax.reduce_precision(quotient, exponent_bits=8, mantissa_bits=20)
    return jnp.clip(quotient, -_E2M1_MAX, _E2M1_MAX), scale


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], -1)


def _straight_through(f):
    """Gradient of a rounding taken as the identity, as in quantization-aware training."""
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(lambda primals, tangents: (wrapped(primals[0]), tangents[0]))
    return wrapped


@_straight_through
def qdq_fp8(x: jax.Array) -> jax.Array:
    """FP8 by groups of 32 with power-of-two scales, there and back (docs/model.md 3.1).

    x [..., K] any float dtype -> same shape and dtype, values exact in bfloat16.
    """
    value, scale = _fp8(x)
    return _flat(_round_e4m3(value) * scale[..., None]).astype(x.dtype)


@_straight_through
def qdq_index(x: jax.Array) -> jax.Array:
    """FP4 by 32 with power-of-two scales, for index queries, keys (docs/model.md 3.2)."""
    value, scale = _fp4_e8m0(x)
    return _flat(_round_e2m1(value) * scale[..., None]).astype(x.dtype)


@_straight_through
def qdq_main(x: jax.Array) -> jax.Array:
    """FP4 by 16 with e4m3 scales, for the compressed main KV (docs/model.md 3.2)."""
    value, scale = _fp4_e4m3(x)
    return _flat(_round_e2m1(value) * scale[..., None]).astype(x.dtype)


# -- packed cache rows -----------------------------------------------------------------------------


def window_bytes(width: int) -> int:
    """Bytes of one packed window KV row (released: 512 + 16 = 528, docs/model.md 10)."""
    return width + width // GROUP


def main_bytes(width: int) -> int:
    """Bytes of one packed compressed KV entry (released: 256 + 32 = 288)."""
    return width // 2 + width // MAIN_KV_GROUP


def index_bytes(width: int) -> int:
    """Bytes of one packed index key (released: 64 + 4 = 68)."""
    return width // 2 + width // GROUP


def pack_window(x: jax.Array) -> jax.Array:
    """[..., K] -> uint8 [..., window_bytes(K)]: e4m3 codes, then e8m0 scales."""
    value, scale = _fp8(x)
    return jnp.concatenate([encode_e4m3(_flat(value)), encode_e8m0(scale)], axis=-1)


def unpack_window(row: jax.Array, width: int, dtype: Any) -> jax.Array:
    """Inverse of `pack_window`, equal in every bit to `qdq_fp8` of the packed vector."""
    scale = _spread(decode_e8m0(row[..., width:]), GROUP, width, -1)
    return (decode_e4m3(row[..., :width]) * scale).astype(dtype)


def pack_main(x: jax.Array) -> jax.Array:
    """[..., K] -> uint8 [..., main_bytes(K)]: e2m1 nibbles, then e4m3 scales."""
    value, scale = _fp4_e4m3(x)
    return jnp.concatenate([pack_nibbles(_flat(encode_e2m1(value))), encode_e4m3(scale)], axis=-1)


def unpack_main(row: jax.Array, width: int, dtype: Any) -> jax.Array:
    """Inverse of `pack_main`, equal in every bit to `qdq_main` of the packed vector."""
    half = width // 2
    scale = _spread(decode_e4m3(row[..., half:]), MAIN_KV_GROUP, width, -1)
    return (decode_e2m1(unpack_nibbles(row[..., :half])) * scale).astype(dtype)


def pack_index(x: jax.Array) -> jax.Array:
    """[..., K] -> uint8 [..., index_bytes(K)]: e2m1 nibbles, then e8m0 scales."""
    value, scale = _fp4_e8m0(x)
    return jnp.concatenate([pack_nibbles(_flat(encode_e2m1(value))), encode_e8m0(scale)], axis=-1)


def unpack_index(row: jax.Array, width: int, dtype: Any) -> jax.Array:
    """Inverse of `pack_index`, equal in every bit to `qdq_index` of the packed vector."""
    half = width // 2
    scale = _spread(decode_e8m0(row[..., half:]), GROUP, width, -1)
    return (decode_e2m1(unpack_nibbles(row[..., :half])) * scale).astype(dtype)


# -- weights ---------------------------------------------------------------------------------------


def _block_amax(w: jax.Array, rows: int) -> jax.Array:
    """Largest magnitude of every [rows, 32] tile of [..., N, K]; edge tiles may be smaller."""
    n, k = w.shape[-2:]
    lead = [(0, 0)] * (w.ndim - 2)
    padded = jnp.pad(jnp.abs(w), [*lead, (0, -n % rows), (0, -k % GROUP)])
    tiles = padded.reshape(*w.shape[:-2], -1, rows, padded.shape[-1] // GROUP, GROUP)
    return jnp.max(tiles, axis=(-3, -1))


def quantize(w: jax.Array, format: Format) -> Quantized:
    """Store float weights [..., N, K] in a released format; scale is pow2ceil(amax / largest)."""
    w = w.astype(jnp.float32)
    rows = GROUP if format == "fp8_block" else 1
    limit = _E2M1_MAX if format == "fp4_group" else _E4M3_MAX
    amax = jnp.maximum(_block_amax(w, rows), np.float32(1e-12))
    scale = pow2ceil(amax * np.float32(1 / limit))
    wide = _spread(_spread(scale, rows, w.shape[-2], -2), GROUP, w.shape[-1], -1)
    value = jnp.clip(w / wide, -limit, limit)
    if format == "fp4_group":
        return Quantized(pack_nibbles(encode_e2m1(value)), encode_e8m0(scale), format)
    return Quantized(encode_e4m3(value), encode_e8m0(scale), format)
