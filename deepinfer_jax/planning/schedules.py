"""Schedules: pytrees that say how many drafts of each slot a round verifies.

Each is a function of its arguments alone. Legend: B slots, N drafts made of each.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.planning.confidence import probabilities, survival
from deepinfer_jax.planning.plan import distribute
from deepinfer_jax.planning.threshold import threshold

Array = jax.Array | np.ndarray | np.number


class Schedule(Protocol):
    """What a round asks."""

    def lengths(self, confidence: jax.Array, most: jax.Array, room: jax.Array) -> jax.Array:
        """Drafts to verify, [B] int32; what exceeds `most` or `room` is cut by the round.

        Args:
          confidence: [B, N] float32, raw.
          most: [B] int32, drafts that could become part of each slot's reply; 0 where it takes no
            part, or has one token left.
          room: scalar int32, drafts that fit into the call in all.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lengths:
    """A given number, for all or for each slot: `count` scalar or [B] int32."""

    count: Array

    def lengths(self, confidence: jax.Array, most: jax.Array, room: jax.Array) -> jax.Array:
        """As asked for."""
        return jnp.broadcast_to(jnp.asarray(self.count), most.shape).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Confident:
    """The leading drafts whose probability of being accepted is at least `tau` (scalar)."""

    tau: Array
    temperatures: Array

    def lengths(self, confidence: jax.Array, most: jax.Array, room: jax.Array) -> jax.Array:
        """Each slot by itself."""
        p = probabilities(confidence, jnp.asarray(self.temperatures))
        return threshold(p, jnp.asarray(self.tau))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fill:
    """As many as fit: those most likely to survive, of whichever slots."""

    temperatures: Array

    def lengths(self, confidence: jax.Array, most: jax.Array, room: jax.Array) -> jax.Array:
        """The slots compete for the room."""
        alive = survival(probabilities(confidence, jnp.asarray(self.temperatures)))
        return distribute(useful(alive, most), room, most > 0)


def useful(survivals: Any, most: Any) -> Any:
    """`survivals` [..., N] with 0 for drafts beyond `most` [...]: nothing could come of them."""
    xp = jnp if isinstance(survivals, jax.Array) else np
    number = xp.arange(survivals.shape[-1]).reshape((1,) * most.ndim + (-1,))
    return xp.where(number < most[..., None], survivals, np.float32(0))
