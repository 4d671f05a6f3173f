"""Experts that live on several devices: rows go to all of them, each output comes back once.

Inside `jax.shard_map` a device holds a slice of the expert stacks and its own rows. It computes its
experts for everybody's rows and hands the outputs back; a row's owner keeps, for each chosen
expert, the copy of the device where that expert lives. Nothing is added on the way, so the sum over
experts is that of one device, in its order (`moe.routed_experts`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "expert"  # the mesh axis that expert stacks are split over
Outputs = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def over_devices(
    outputs: Outputs, x: jax.Array, experts: jax.Array, weights: jax.Array, local: int, total: int
) -> jax.Array:
    """`outputs` [T, k, D] of rows x [T, D] with chosen `experts` and `weights` [T, k].

    outputs: (x, experts, weights) -> [rows, k, D] with the `local` experts of this device, whose
    ids start at 0; an id beyond them is nobody's. `total` is the number of all experts. Device i of
    the axis holds experts i * local onwards; every device must come here with as many rows.
    """
    devices = total // local
    x_all, experts_all, weights_all = lax.all_gather((x, experts, weights), AXIS, tiled=True)
    mine = experts_all - lax.axis_index(AXIS).astype(jnp.int32) * local
    mine = jnp.where((mine >= 0) & (mine < local), mine, jnp.iinfo(jnp.int32).max)
    y = outputs(x_all, mine, weights_all)
    y = lax.all_to_all(y.reshape(devices, *experts.shape, -1), AXIS, 0, 0)
    owner = jnp.clip(experts // local, 0, devices - 1)
    return jnp.take_along_axis(y, owner[None, :, :, None], axis=0)[0]
