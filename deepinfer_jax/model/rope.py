"""Rotary positions: the last features of a vector, in adjacent pairs (docs/model.md 6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from deepinfer_jax import numerics
from deepinfer_jax.model import cpu_kernels
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.tables import Rotation


def at(table: Rotation, positions: jax.Array) -> Rotation:
    """The rotation of each position [...]; positions outside the table are clipped.

    Only padding and drafts beyond the end stand there: `forward.make_call` refuses other rows.
    """
    clipped = jnp.clip(positions, 0, table.cos.shape[0] - 1)
    return Rotation(table.cos[clipped], table.sin[clipped])


@numerics.in_kernel(cpu_kernels.rotated, "inverse")
@numerics.by_name("inverse")
def rotated(x: jax.Array, angle: Rotation, inverse: bool, numerics: Numerics) -> jax.Array:
    """`rotate`, by its name in the plain form."""
    return rotate(x, angle, inverse)


def rotate(x: jax.Array, angle: Rotation, inverse: bool = False) -> jax.Array:
    """Rotate the last R features of x [T, ..., K] by angle [T, R/2]; rounded to x.dtype.

    Adjacent features (2i, 2i+1) form a pair. `inverse` undoes the rotation.
    """
    width = angle.cos.shape[-1] * 2
    shape = (angle.cos.shape[0], *([1] * (x.ndim - 2)), width // 2)
    cos = angle.cos.reshape(shape)
    sin = angle.sin.reshape(shape)
    sin = -sin if inverse else sin
    plain, turned = x[..., :-width], x[..., -width:].astype(jnp.float32)
    a, b = turned[..., 0::2], turned[..., 1::2]
    pin = numerics.pin
    pair = jnp.stack([pin(a * cos) - pin(b * sin), pin(a * sin) + pin(b * cos)], axis=-1)
    return jnp.concatenate([plain, numerics.round_to(pair.reshape(turned.shape), x.dtype)], axis=-1)
