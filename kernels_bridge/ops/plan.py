"""Plans of split attention in which no sequence is split: what keeps it batch-invariant.

FlashMLA's decoding kernels divide the key blocks of all sequences evenly among parts of the chip,
and a sequence cut in two is added in another order than one that is not. Where it is cut depends on
its neighbours. The plan is an operand, though, and this one gives every part whole sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

FIELDS = 8  # first, last sequence; first, past last block; first split; two flags; nothing


def unsplit(blocks: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """Key blocks of each sequence [B] int32 -> plan [parts, 8], first split [B + 1], both int32.

    Sequences stand in their order, as evenly by count as parts allow. A part without a sequence
    has a last one before its first.
    """
    count = blocks.shape[0]
    edges = (jnp.arange(parts + 1, dtype=jnp.int32) * count) // parts
    first, last = edges[:-1], edges[1:] - 1
    end = jnp.where(last >= first, blocks[jnp.maximum(last, 0)], 0)
    nothing = jnp.zeros_like(first)
    plan = jnp.stack([first, last, nothing, end, *[nothing] * (FIELDS - 4)], axis=1)
    return plan, jnp.arange(count + 1, dtype=jnp.int32)


def key_blocks(length: jax.Array, extra: jax.Array, size: int = 64) -> jax.Array:
    """Blocks [B] int32 of `length` [B] ids and then `extra` [B] ids, each list in blocks of `size`.

    A sequence without ids has one block, so that the kernel's loop is never empty.
    """
    own = jnp.maximum((length + size - 1) // size, 1)
    return (own + (extra + size - 1) // size).astype(jnp.int32)
