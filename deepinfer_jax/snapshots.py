"""Snapshots: what a slot carries beside its pages, kept to go on from it later, in any slot.

A prompt that begins like an earlier one goes on from there: it shares the pages of the compressed
KV and takes over rings, pooling state and n-gram history as they stood at that position. Nothing
is computed, so a warm start gives the bits of a cold one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import summaries
from deepinfer_jax.cache import Cache, slot_axis, zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Snapshots:
    """States of S slots, in the shapes of the same fields of `Cache` with S for B."""

    window: jax.Array
    draft: jax.Array
    pending: jax.Array
    history: jax.Array
    lengths: jax.Array

    __repr__ = summaries.of_fields


# Axis of the slots in each part of the state.
_PARTS = {field.name: slot_axis(field.name) for field in dataclasses.fields(Snapshots)}


def init_snapshots(cache: Cache, count: int) -> Snapshots:
    """Room for `count` snapshots of slots of `cache`. Raises ValueError for fewer than one."""
    if count < 1:
        raise ValueError(f"count of snapshots must be at least 1, got {count}")

    def room(name: str, axis: int) -> Any:
        like = getattr(cache, name)
        shape = (*like.shape[:axis], count, *like.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, like.dtype)

    return zeros(Snapshots(**{name: room(name, axis) for name, axis in _PARTS.items()}))


def take(snapshots: Snapshots, cache: Cache, slots: jax.Array, places: jax.Array) -> Snapshots:
    """`snapshots` with the states of `slots` [n] in `places` [n]; a place beyond S is dropped."""
    return _copied(snapshots, cache, slots, places)


def restore(cache: Cache, snapshots: Snapshots, places: jax.Array, slots: jax.Array) -> Cache:
    """`cache` with the states of `places` [n] in `slots` [n]; a slot beyond B is dropped.

    Pages are left alone: their owner sets them.
    """
    return _copied(cache, snapshots, places, slots)


def _copied(into, source, places: jax.Array, to: jax.Array):
    def part(name: str, axis: int) -> jax.Array:
        old, new = getattr(into, name), jnp.take(getattr(source, name), places, axis=axis)
        return old.at[(slice(None),) * axis + (to,)].set(new, mode="drop")

    return dataclasses.replace(into, **{name: part(name, axis) for name, axis in _PARTS.items()})
