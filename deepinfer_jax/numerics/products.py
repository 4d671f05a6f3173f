"""Products of rows with weights: on whole tiles of a few fixed heights (`tiles`), or in kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import quant
from deepinfer_jax.numerics import cuda, stored, tiles
from deepinfer_jax.numerics.elements import float_weight, round_to
from deepinfer_jax.numerics.pallas import products as kernels
from deepinfer_jax.numerics.settings import Numerics
from kernels_bridge import ffi


def _in_tiles(f: Callable, x: jax.Array, w: jax.Array, numerics: Numerics) -> jax.Array:
    """Apply f: [height, ...] -> [height, ...] to any number of rows, always on whole tiles."""
    count = x.shape[0]
    height = tiles.of_product(count, w.shape[-1], w.size, numerics)
    number = -(-count // height)
    padded = jnp.pad(x, [(0, number * height - count)] + [(0, 0)] * (x.ndim - 1))
    parts = padded.reshape(number, height, *x.shape[1:])
    y = f(parts[0])[None] if number == 1 else lax.map(f, parts)
    return y.reshape(number * height, *y.shape[2:])[:count]


def precision(x: jax.Array) -> Any:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def contract(x: jax.Array, w: jax.Array) -> jax.Array:
    """[M, K] x [N, K] -> float32 [M, N]."""
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())),
        precision=precision(x), preferred_element_type=jnp.float32,
    )  # fmt: skip


def dot(x: jax.Array, w: Any, numerics: Numerics) -> jax.Array:
    """x [T, K] times w [N, K] -> float32 [T, N]; rows are independent.

    w: an array of x's dtype, a float32 array (the product is one of float32 then, whatever x is),
    or a stored weight.
    """
    if not numerics.uses_pallas and not _in_bits(w, numerics):
        w = float_weight(w, x.dtype) if isinstance(w, quant.Quantized) else w
        x = x.astype(w.dtype)
    return cast(jax.Array, _dot(x, w, None, numerics, "float32"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _dot(x, w, bias, numerics, dtype, quantized=False):
    """bias: float32 [N], added before the result is rounded to `dtype`; None, or for a kernel.
    quantized: x goes through FP8 first; for a kernel that does so.
    """
    if numerics.uses_pallas:
        return _on_gpu(x[:, None], w, dtype, numerics, bias)[:, 0]
    if numerics.rows == "ffi":
        return ffi.product(x[:, None], readable(w), dtype, quantized)[:, 0]
    if numerics.rows != "tiled":
        return contract(x, w)
    return _in_tiles(lambda part: contract(part, w), x, w, numerics)


def _on_gpu(x, w, dtype, numerics, bias):
    """x [M, G, K] times w [G * N, K] in kernels -> [M, G, N]."""
    if numerics.rows == "cuda" and cuda.takes(x, w, x.shape[1]):
        return cuda.product(x, w, dtype, bias, numerics.interpret)
    return kernels.product(x, w, dtype, numerics.interpret, bias=bias)


def _dot_forward(x, w, bias, numerics, dtype, quantized=False):
    return _dot(x, w, bias, numerics, dtype, quantized), (x, w, bias is not None)


def _dot_backward(numerics, dtype, quantized, saved, g):
    x, w, biased = saved
    x = quant.qdq_fp8(x) if quantized else x  # whose own slope is taken as 1
    gb = jnp.sum(g.astype(jnp.float32), axis=0) if biased else None
    if numerics.rows == "dense":
        return *_einsum_backward("tk,nk->tn", (x, w), g), gb
    g = g.astype(jnp.float32)
    wide = float_weight(stored.alone(w), jnp.float32)
    gx = lax.dot_general(g, wide, (((1,), (0,)), ((), ()))).astype(x.dtype)
    if _is_stored(w):
        return gx, None, gb
    gw = lax.dot_general(g, x.astype(jnp.float32), (((0,), (0,)), ((), ())))
    return gx, gw.astype(w.dtype), gb


_dot.defvjp(_dot_forward, _dot_backward)


def _contract_groups(x: jax.Array, w: jax.Array) -> jax.Array:
    """[M, G, K] x [G * N, K] -> float32 [M, G, N]."""
    w = w.reshape(x.shape[1], -1, w.shape[-1])
    y = lax.dot_general(
        x, w, (((2,), (2,)), ((1,), (0,))),
        precision=precision(x), preferred_element_type=jnp.float32,
    )  # fmt: skip
    return y.transpose(1, 0, 2)


def group_dot(x: jax.Array, w: Any, numerics: Numerics) -> jax.Array:
    """x [T, G, K] times w [G * N, K], group by group -> float32 [T, G, N]; rows are independent.

    w: a weight leaf, plain or stored.
    """
    return cast(jax.Array, _group_dot(x, operand(w, numerics), numerics))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _group_dot(x, w, numerics):
    if numerics.uses_pallas:
        return _on_gpu(x, w, "float32", numerics, None)
    if numerics.rows == "ffi":
        return ffi.product(x, readable(w))
    if numerics.rows != "tiled":
        return _contract_groups(x, w)
    return _in_tiles(lambda part: _contract_groups(part, w), x, w, numerics)


def _group_dot_forward(x, w, numerics):
    return _group_dot(x, w, numerics), (x, w)


def _group_dot_backward(numerics, saved, g):
    x, w = saved
    if _is_stored(w):
        wide = float_weight(stored.alone(w), x.dtype)
        _, pull = jax.vjp(lambda x: _contract_groups(x, wide), x)
        return *pull(g), None
    if numerics.rows == "dense":
        wide = w.reshape(x.shape[1], -1, w.shape[-1])
        gx, gw = _einsum_backward("tgk,gnk->tgn", (x, wide), g)
        return gx, gw.reshape(w.shape)
    _, pull = jax.vjp(_contract_groups, x, w)
    return pull(g)


_group_dot.defvjp(_group_dot_forward, _group_dot_backward)


def einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Product of two arrays of one dtype, accumulated in float32; for `rows="dense"` only.

    The backward pass rounds the incoming gradient to the operands' dtype, as training in bfloat16
    does.
    """
    return cast(jax.Array, _einsum_trained(spec, x, w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum_trained(spec, x, w):
    return _einsum(spec, x, w)


def _einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    def product(x, w):
        return jnp.einsum(
            spec, x, w, precision=precision(x), preferred_element_type=jnp.float32
        )  # fmt: skip

    def widened(x, w):  # XLA:CPU has no batched bfloat16 product with a float32 result
        return product(x.astype(jnp.float32), w.astype(jnp.float32))

    return lax.platform_dependent(x, w, cpu=widened, default=product)


def _einsum_forward(spec, x, w):
    return _einsum(spec, x, w), (x, w)


def _einsum_backward(spec, saved, g):
    x, w = saved
    operands, out = spec.split("->")
    left, right = operands.split(",")
    g = g.astype(x.dtype)
    gx = _einsum(f"{out},{right}->{left}", g, w)
    gw = _einsum(f"{out},{left}->{right}", g, x)
    return gx.astype(x.dtype), gw.astype(w.dtype)


_einsum_trained.defvjp(_einsum_forward, _einsum_backward)


def linear(
    x: jax.Array, weight: Any, numerics: Numerics, quantized: bool = False,
    bias: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """x [T, K] through a weight leaf [N, K], rounded once to the activation dtype.

    `quantized`: the release stores this weight in FP8 or FP4, so its input is quantized to FP8
    first (`lin8`, `lin4` of docs/model.md 3.3); otherwise `lin16`. `bias` [N] is added before the
    rounding.
    """
    bias = None if bias is None else bias.astype(jnp.float32)
    if numerics.uses_pallas:  # rounded where it is made
        x = prepared(x, numerics, quantized)
        return cast(jax.Array, _dot(x, operand(weight, numerics), bias, numerics, numerics.dtype))
    if numerics.rows == "ffi" and bias is None:  # and quantized where it is read
        x, w = x.astype(numerics.dtype), operand(weight, numerics)
        quantized = quantized and numerics.quantize_activations
        return cast(jax.Array, _dot(x, w, None, numerics, numerics.dtype, quantized))
    y = linear_f32(x, weight, numerics, quantized)
    return round_to(y if bias is None else y + bias[None, :], numerics.dtype)


def linear_f32(x: jax.Array, weight: Any, numerics: Numerics, quantized: bool = False) -> jax.Array:
    """`linear` without the final rounding: float32 [T, N]."""
    return dot(prepared(x, numerics, quantized), operand(weight, numerics), numerics)


def prepared(x: jax.Array, numerics: Numerics, quantized: bool) -> jax.Array:
    """What a linear multiplies its weight with."""
    if quantized and numerics.quantize_activations:
        x = quant.qdq_fp8(x)
    return x.astype(numerics.dtype)


def operand(weight: Any, numerics: Numerics) -> Any:
    """A weight leaf as a product takes it: decoded, unless a kernel decodes it tile by tile."""
    if _is_stored(weight) and (numerics.uses_pallas or _in_bits(weight, numerics)):
        return weight
    return float_weight(weight, jnp.dtype(numerics.dtype))


def _in_bits(weight: Any, numerics: Numerics) -> bool:
    """Whether a kernel of a CPU reads a stored weight as it lies in memory."""
    return numerics.rows == "ffi" and stored.storage(weight) == "bf16_bits"


def readable(weight: Any, dtype: Any = None) -> Any:
    """A weight leaf as `kernels_bridge.ffi` takes it: an array, or a stack and the layer.

    dtype: what plain and packed weights are converted to; default: of plain ones their own.
    """
    if isinstance(weight, stored.Layered):
        return weight.stack.codes, weight.layer
    if isinstance(weight, quant.Quantized) and not stored.packed(weight):
        return weight.codes
    return weight if dtype is None else float_weight(weight, dtype)


def is_readable(weight: Any, dtype: Any) -> bool:
    """Whether `readable` converts nothing that could be large."""
    if isinstance(weight, quant.Quantized):
        return not stored.packed(weight)
    return weight.dtype in (jnp.bfloat16, jnp.dtype(dtype))


def alike(weights: Iterable[Any]) -> bool:
    """Whether weights are stored in one way, so that a kernel can take them together."""
    layered = stored.Layered
    return len({(stored.storage(w), isinstance(w, layered), _plain_type(w)) for w in weights}) == 1


def _plain_type(weight: Any) -> str:
    return "" if _is_stored(weight) else str(weight.dtype)


def _is_stored(weight: Any) -> bool:
    return isinstance(weight, quant.Quantized | stored.Layered)


def at_layer(tree: Any, layer: Any, numerics: Numerics) -> Any:
    """One layer of a stacked tree of weights, for products; `layer` may be traced.

    Stored weights stay in their stack where kernels read them from there.
    """
    if numerics.uses_pallas:
        return stored.at_layer(tree, layer)
    if numerics.rows == "ffi":
        return stored.at_layer(tree, layer, kinds=("bf16_bits",))
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, layer, 0, keepdims=False), tree)
