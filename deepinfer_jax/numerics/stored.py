"""Weights as they are stored: one layer left in its stack, and what of it a kernel can reach."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import quant


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stack", "layer"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Layered:
    """One layer of a stack of stored weights, left where it is.

    A kernel's operand is a whole array: of a weight cut out of its stack the compiler makes a copy,
    which takes twice as long as reading it. stack [layers, N, K], layer int32.
    """

    stack: quant.Quantized
    layer: jax.Array


def at_layer(tree: Any, layer: Any, kinds: Sequence[str] | None = None) -> Any:
    """One layer of a stacked tree; stored weights as `Layered`, others cut out.

    kinds: of which storage they are left in their stack; default: any.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, quant.Quantized) and (kinds is None or leaf.format in kinds):
            return Layered(leaf, jnp.asarray(layer, jnp.int32))
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, layer, 0, keepdims=False), leaf)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, quant.Quantized))


def alone(weight: Any) -> Any:
    """The weight itself, cut out of its stack."""
    if not isinstance(weight, Layered):
        return weight
    return jax.tree.map(
        lambda a: lax.dynamic_index_in_dim(a, weight.layer, 0, keepdims=False), weight.stack
    )


def after(x: jax.Array, weight: Any) -> tuple[jax.Array, Any]:
    """The two, of which the weight is not to be had before x is.

    What is made of a weight alone depends on nothing: on an H200 XLA decoded the weights of all
    layers when a call began, and held them until they were used.
    """
    if not isinstance(weight, Layered):
        return lax.optimization_barrier((x, weight))
    x, layer = lax.optimization_barrier((x, weight.layer))
    return x, dataclasses.replace(weight, layer=layer)


def arrays(weight: Any) -> list[jax.Array]:
    """The arrays of a weight leaf, in the order in which `Place` expects their refs."""
    if isinstance(weight, Layered):
        return arrays(weight.stack)
    if isinstance(weight, quant.Quantized):
        return [weight.codes] if weight.scale is None else [weight.codes, weight.scale]
    return [weight]


def shape(weight: Any) -> tuple[int, ...]:
    """[..., N, K] of a weight leaf."""
    if isinstance(weight, Layered):
        return shape(weight.stack)[1:]
    if not isinstance(weight, quant.Quantized):
        return weight.shape
    packed = 2 if weight.format == "fp4_group" else 1
    return (*weight.codes.shape[:-1], weight.codes.shape[-1] * packed)


def storage(weight: Any) -> str:
    """ "plain", or the format of a `Quantized`."""
    if isinstance(weight, Layered):
        return storage(weight.stack)
    return weight.format if isinstance(weight, quant.Quantized) else "plain"


def reachable(weight: Any) -> Any:
    """The weight, cut out of its stack where a kernel could not reach every entry of that."""
    if isinstance(weight, Layered) and any(out_of_reach(a.shape, a.dtype) for a in arrays(weight)):
        return alone(weight)
    return weight


def addressable(weight: Any, layer: jax.Array) -> tuple[Any, jax.Array]:
    """A stack [layers, ...] and the place of `layer` in it of which a kernel reaches every entry.

    Pallas for Triton counts entries with 32 signed bits in arrays of up to 2**32 bytes, with 64 in
    larger ones. A stack of bytes of a size between 2**31 and 2**32, such as the experts of the
    released drafter, has entries beyond: there the layer is copied out, which takes time and no
    bit. Raises ValueError where one layer is as large as that.
    """
    if not any(out_of_reach(a.shape, a.dtype) for a in arrays(weight)):
        return weight, layer
    if any(out_of_reach(a.shape[1:], a.dtype) for a in arrays(weight)):
        raise ValueError(
            f"one layer of the weight {shape(weight)} takes 2 to 4 GiB, which no kernel can "
            "address; spread it over several devices"
        )
    alone = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, layer), weight)
    return alone, jnp.zeros_like(layer)


def out_of_reach(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether an array has entries that no kernel reaches: see `addressable`."""
    count = math.prod(shape)
    return count > 1 << 31 and count * jnp.dtype(dtype).itemsize <= 1 << 32


def packed(weight: Any) -> bool:
    """Whether the weight is decoded by scales."""
    return storage(weight) not in ("plain", "bf16_bits")
