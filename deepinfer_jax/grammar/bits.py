"""Packed masks: one bit of a 32-bit word per token id."""

import jax
import jax.numpy as jnp
import numpy as np

WORD = 32


def words(vocab: int) -> int:
    """Words that hold `vocab` bits."""
    return -(-vocab // WORD)


def pack(allowed: np.ndarray) -> np.ndarray:
    """[W] uint32 of `allowed` [V] bool, on the host; the bits beyond V are 0."""
    wide = np.zeros(words(len(allowed)) * WORD, bool)
    wide[: len(allowed)] = allowed
    return np.packbits(wide, bitorder="little").view("<u4").astype(np.uint32)


def expand(packed: jax.Array | np.ndarray, vocab: int) -> jax.Array:
    """Bool [..., V] of `packed` [..., W] int32 or uint32: id x is bit x mod 32 of word x div 32.

    Raises TypeError for another dtype and ValueError unless W is the words of `vocab`.
    """
    packed = jnp.asarray(packed)
    if packed.dtype not in (jnp.int32, jnp.uint32):
        raise TypeError(f"packed must be int32 or uint32, got {packed.dtype}")
    if packed.ndim == 0 or packed.shape[-1] != words(vocab):
        raise ValueError(
            f"packed must end in {words(vocab)} words for vocab={vocab}, got shape {packed.shape}"
        )
    unsigned = packed.astype(jnp.uint32)[..., None]
    place = jnp.arange(WORD, dtype=jnp.uint32).reshape((1,) * packed.ndim + (WORD,))
    bits = (unsigned >> place) & jnp.uint32(1)
    return bits.reshape(*packed.shape[:-1], packed.shape[-1] * WORD)[..., :vocab].astype(bool)
