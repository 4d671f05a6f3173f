"""Schedules: pytrees that say how many drafts of each slot a round verifies.

Each has `lengths(confidence, active, room)` (see `rounds.Schedule`) and is a function of its
arguments alone. Legend: B slots, N drafts made, room: drafts that fit into the call in all.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.planning.confidence import probabilities, survival
from deepinfer_jax.planning.plan import distribute
from deepinfer_jax.planning.threshold import threshold

Array = jax.Array | np.ndarray | np.number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lengths:
    """A given number, for all or for each slot: `count` scalar or [B] int32."""

    count: Array

    def lengths(self, confidence: jax.Array, active: jax.Array, room: jax.Array) -> jax.Array:
        """[B] int32."""
        return jnp.broadcast_to(jnp.asarray(self.count), active.shape).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Confident:
    """The leading drafts whose probability of being accepted is at least `tau` (scalar)."""

    tau: Array
    temperatures: Array

    def lengths(self, confidence: jax.Array, active: jax.Array, room: jax.Array) -> jax.Array:
        """[B] int32."""
        return threshold(
            probabilities(confidence, jnp.asarray(self.temperatures)), jnp.asarray(self.tau)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fill:
    """As many as fit: those most likely to survive, of whichever slots (engine spec 2.5)."""

    temperatures: Array

    def lengths(self, confidence: jax.Array, active: jax.Array, room: jax.Array) -> jax.Array:
        """[B] int32."""
        alive = survival(probabilities(confidence, jnp.asarray(self.temperatures)))
        return distribute(alive, room, active)
