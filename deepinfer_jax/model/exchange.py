"""Experts that live on several devices: rows go to all of them, each output comes back once.

An expert may have replicas; which of them a row goes to is a function of its request's seed and its
position (`slots_of`), and no bit depends on it.

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

from deepinfer_jax import eplb
from deepinfer_jax.eplb import Placement
from deepinfer_jax.rows import Rows

AXIS = "expert"  # the mesh axis that expert stacks are split over
NOWHERE = 2**31 - 1  # an id beyond every expert: nobody computes it
Outputs = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def slots_of(placement: Placement, layer: jax.Array | int, experts: jax.Array, rows: Rows):
    """The physical slot of each chosen expert [T, k] of `rows`; NOWHERE where an id is nobody's."""
    seeds = rows.seeds
    if seeds is None:
        seeds = jnp.zeros((rows.slots.shape[0], 2), jnp.uint32)
    slots = eplb.choose_replicas(placement, layer, experts, seeds, rows.positions)
    return jnp.where(slots >= 0, slots, jnp.int32(NOWHERE))


def over_devices(
    outputs: Outputs, x: jax.Array, experts: jax.Array, weights: jax.Array, local: int, total: int
) -> jax.Array:
    """`outputs` [T, k, D] of rows x [T, D] with chosen `experts` and `weights` [T, k].

    outputs: (x, experts, weights) -> [rows, k, D] with the `local` experts of this device, whose
    ids start at 0; an id beyond them is nobody's. `total` is the number of all experts, or of all
    slots where `experts` are slots. Device i of the axis holds those from i * local onwards; every
    device must come here with as many rows.
    """
    devices = total // local
    x_all, experts_all, weights_all = lax.all_gather((x, experts, weights), AXIS, tiled=True)
    mine = experts_all - lax.axis_index(AXIS).astype(jnp.int32) * local
    mine = jnp.where((mine >= 0) & (mine < local), mine, NOWHERE)
    y = outputs(x_all, mine, weights_all)
    y = lax.all_to_all(y.reshape(devices, *experts.shape, -1), AXIS, 0, 0)
    owner = jnp.clip(experts // local, 0, devices - 1)
    return jnp.take_along_axis(y, owner[None, :, :, None], axis=0)[0]
