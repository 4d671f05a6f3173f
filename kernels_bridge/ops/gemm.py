"""Products of FP8 rows with FP8 weights, and of grouped rows with the weights of their experts.

A value is its e4m3 code times the scale of its block: `group` columns of one row of `a`, `block`
rows by `group` columns of `b`. Scales are float32, or uint8 e8m0 exponents as the release stores
them (docs/model.md 3). Products are summed in float32 and rounded once. `fp4_gemm` is for weights
of experts, stored in FP4: two values to a byte, e8m0 scales of 32 columns.
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

_E4M3, _SCALES = ("float8_e4m3fn",), ("float32", "uint8")


def _decode(codes: jax.Array, scale: jax.Array, rows: int, columns: int) -> jax.Array:
    """codes [..., N, K] with a scale per `rows` x `columns` -> float32."""
    if scale.dtype == jnp.uint8:
        scale = quant.decode_e8m0(scale)
    wide = jnp.repeat(jnp.repeat(scale, rows, axis=-2), columns, axis=-1)
    return codes.astype(jnp.float32) * wide[..., : codes.shape[-2], : codes.shape[-1]]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[..., M, K] x [..., N, K] -> [..., M, N] float32."""
    return jnp.einsum("...mk,...nk->...mn", a, b, precision=lax.Precision.HIGHEST)


def _fit_pair(name, a, a_scale, b, b_scale, group, block, lead_a: str, lead_b: str):
    sizes: dict[str, int] = {}
    fit(name, sizes, operand="a", shape=a, dims=f"{lead_a}M K", dtypes=_E4M3)
    columns = -(-sizes["K"] // group)
    dims = f"{lead_a}M {columns}"
    fit(name, sizes, operand="a_scale", shape=a_scale, dims=dims, dtypes=_SCALES)
    fit(name, sizes, operand="b", shape=b, dims=f"{lead_b}N K", dtypes=_E4M3)
    dims = f"{lead_b}{-(-sizes['N'] // block)} {columns}"
    fit(name, sizes, operand="b_scale", shape=b_scale, dims=dims, dtypes=(str(a_scale.dtype),))
    return sizes


def _plain_rule(a, a_scale, b, b_scale, *, group: int, block: int) -> Any:
    sizes = _fit_pair("fp8_gemm", a, a_scale, b, b_scale, group, block, "", "")
    return jax.ShapeDtypeStruct((sizes["M"], sizes["N"]), jnp.bfloat16)


def fp8_gemm_twin(a, a_scale, b, b_scale, *, group: int, block: int):
    """a [M, K] times b [N, K], both e4m3 -> bfloat16 [M, N]."""
    y = _dot(_decode(a, a_scale, 1, group), _decode(b, b_scale, block, group))
    return y.astype(jnp.bfloat16)


def _contiguous_rule(a, a_scale, b, b_scale, expert, *, group: int, block: int) -> Any:
    name = "grouped_contiguous"
    sizes = _fit_pair(name, a, a_scale, b, b_scale, group, block, "", "G ")
    fit(name, sizes, operand="expert", shape=expert, dims="M", dtypes=("int32",))
    return jax.ShapeDtypeStruct((sizes["M"], sizes["N"]), jnp.bfloat16)


def grouped_contiguous_twin(a, a_scale, b, b_scale, expert, *, group: int, block: int):
    """Rows a [M, K] times b [G, N, K] at `expert` [M] int32 -> bfloat16 [M, N]; zeros where -1.

    Rows of one expert stand together, in whole blocks of 128 rows of which the last are -1.
    """
    wide, rows = _decode(b, b_scale, block, group), _decode(a, a_scale, 1, group)
    y = jax.vmap(_dot, in_axes=(None, 0))(rows, wide)
    own = jnp.take_along_axis(y, jnp.maximum(expert, 0)[None, :, None], axis=0)[0]
    return jnp.where(expert[:, None] >= 0, own, 0).astype(jnp.bfloat16)


def _masked_rule(a, a_scale, b, b_scale, count, *, group: int, block: int, expected: int) -> Any:
    name = "grouped_masked"
    sizes = _fit_pair(name, a, a_scale, b, b_scale, group, block, "G ", "G ")
    fit(name, sizes, operand="count", shape=count, dims="G", dtypes=("int32",))
    if expected < 1:
        raise ValueError(f"{name}: expected must be at least 1 row of an expert, got {expected}")
    return jax.ShapeDtypeStruct((sizes["G"], sizes["M"], sizes["N"]), jnp.bfloat16)


def grouped_masked_twin(a, a_scale, b, b_scale, count, *, group: int, block: int, expected: int):
    """The first `count` [G] rows of a [G, M, K] times b [G, N, K] -> bfloat16 [G, M, N].

    Zeros in the other rows. expected: rows of an expert to be fast for; it changes no number.
    """
    y = _dot(_decode(a, a_scale, 1, group), _decode(b, b_scale, block, group))
    real = jnp.arange(a.shape[1], dtype=jnp.int32)[None, :] < count[:, None]
    return jnp.where(real[:, :, None], y, 0).astype(jnp.bfloat16)


def _fp4_rule(a, a_scale, b, b_scale) -> Any:
    sizes: dict[str, int] = {}
    name, byte = "fp4_gemm", ("uint8",)
    fit(name, sizes, operand="a", shape=a, dims="M K", dtypes=_E4M3)
    k = sizes["K"]
    if not k or k % quant.GROUP:
        raise ValueError(f"{name}: a must have whole groups of {quant.GROUP} columns, got {k}")
    groups = k // quant.GROUP
    fit(name, sizes, operand="a_scale", shape=a_scale, dims=f"M {groups}", dtypes=byte)
    fit(name, sizes, operand="b", shape=b, dims=f"N {k // 2}", dtypes=byte)
    fit(name, sizes, operand="b_scale", shape=b_scale, dims=f"N {groups}", dtypes=byte)
    return jax.ShapeDtypeStruct((sizes["M"], sizes["N"]), jnp.bfloat16)


def fp4_gemm_twin(a, a_scale, b, b_scale):
    """a [M, K] e4m3 times b [N, K/2] FP4 as the release stores it (`quant.Quantized`), e8m0 scales
    of 32 columns of a row -> bfloat16 [M, N]."""
    wide = quant.dequantize(quant.Quantized(b, b_scale, "fp4_group"), jnp.float32)
    return _dot(_decode(a, a_scale, 1, quant.GROUP), wide).astype(jnp.bfloat16)


def _op(name, what, rule, twin, run, accepts) -> Op:
    xla = Impl("xla", "xla", Capability(), "decode, then dot", twin, seen="a CPU")
    kernels = (deep_gemm.hopper(name, run, accepts), deep_gemm.blackwell(name, run, accepts))
    return Op(name, what, rule, twin, (*kernels, xla))


fp8_gemm = _op(
    "fp8_gemm", "FP8 rows times an FP8 weight", _plain_rule, fp8_gemm_twin,
    deep_gemm.run_plain, deep_gemm.accepts_pair,
)  # fmt: skip
grouped_contiguous = _op(
    "grouped_contiguous", "FP8 rows sorted by expert times the weights of their experts",
    _contiguous_rule, grouped_contiguous_twin, deep_gemm.run_contiguous,
    deep_gemm.accepts_contiguous,
)  # fmt: skip
grouped_masked = _op(
    "grouped_masked", "a few FP8 rows of every expert times its weight", _masked_rule,
    grouped_masked_twin, deep_gemm.run_masked, deep_gemm.accepts_pair,
)  # fmt: skip
fp4_gemm = Op(
    "fp4_gemm",
    "FP8 rows times an FP4 weight",
    _fp4_rule,
    fp4_gemm_twin,
    (Impl("xla", "xla", Capability(), "decode, then dot", fp4_gemm_twin, seen="a CPU"),),
)
OPS = (fp8_gemm, fp4_gemm, grouped_contiguous, grouped_masked)
