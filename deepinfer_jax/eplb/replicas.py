"""Which replica of an expert a token goes to: a function of names, never of batch or device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.eplb.placement import Array, Placement

_STREAM = np.uint32(0x65706C62)  # the name of these choices among others with the same seed


def choose_replicas(
    placement: Placement, layer: Array | int, experts: Array, seeds: Array, positions: Array
) -> jax.Array:
    """The physical slot of each chosen expert: [T, k] int32; -1 where the id is no expert.

    Replicas hold the same weights, and outputs are added in the order of *logical* ids on the
    token's owner, so no bit depends on the choice. It is keyed by the request all the same: where a
    token goes can then be repeated, whatever runs beside it. The position is part of the key, so
    that the tokens of one long request spread over the replicas.

    Args:
      layer: which layer of the placement, may be traced.
      experts: [T, k] int32, logical ids.
      seeds: [T, 2] uint32, the request's seed as (low, high), as in `Sampling`.
      positions: [T] int32, absolute positions.
    """
    experts = jnp.asarray(experts)
    first, count = (jnp.asarray(a)[layer] for a in (placement.first, placement.count))
    known = (experts >= 0) & (experts < placement.experts)
    safe = jnp.where(known, experts, 0)
    word = _mixed(jnp.asarray(seeds)[:, 0] ^ _STREAM)
    for part in (jnp.asarray(seeds)[:, 1], jnp.asarray(positions).astype(jnp.uint32)):
        word = _mixed(word ^ part)
    word = _mixed(word[:, None] ^ safe.astype(jnp.uint32))
    replica = (word % count[safe].astype(jnp.uint32)).astype(jnp.int32)
    slot = jnp.asarray(placement.order)[layer][first[safe] + replica]
    return jnp.where(known, slot, -1)


def _mixed(word: jax.Array) -> jax.Array:
    """A bijection of uint32 after which every bit depends on all: two rounds of multiply, fold.

    The constants are the first bits of the fractions of the roots of 2 and 3 and the golden ratio.
    """
    word = word + np.uint32(0x6A09E667)
    for multiplier in (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)):
        word = (word ^ (word >> np.uint32(16))) * multiplier
    return word ^ (word >> np.uint32(15))
