"""The noise of sampling: numbers that are a function of seed, position, token id and stream.

See docs/determinism.md "Noise". Legend: V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import numerics

Array = jax.Array | np.ndarray

# Streams of the noise contract. Stream 0 decides tokens; the others belong to rejection mode.
TOKEN, ACCEPT, RESIDUAL, DRAFT = range(4)

ID_BITS = 24  # of a token id
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def noise_words(
    seed: Array, index: Array, token_ids: Array, stream: int = TOKEN
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20 words (w0, w1) of the noise contract, each [..., V] uint32.

    key = (seed low, seed high), counter = (index, stream * 2^24 + token id). Own rounds rather than
    a key type of JAX: a counter per token id is what makes any subset of ids (a top-k list, a
    vocabulary shard, a padded vocabulary) draw the same values.

    Args:
      seed: [..., 2] uint32.
      index: [...] int32, absolute output index (prompt length + output count).
      token_ids: [V] or [..., V] integer, below 2^24.
      stream: which of the independent streams; a Python integer in [0, 256).
    """
    token_ids = jnp.asarray(token_ids).astype(jnp.uint32)
    index = jnp.asarray(index).astype(jnp.uint32)
    if token_ids.ndim == 1:
        token_ids = token_ids.reshape((1,) * index.ndim + token_ids.shape)
    low, high = seed[..., :1], seed[..., 1:]
    key = (low, high, low ^ high ^ _PARITY)
    x0 = index[..., None] + key[0]
    x1 = (token_ids | np.uint32(stream << ID_BITS)) + key[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + key[(group + 1) % 3]
        x1 = x1 + key[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


@functools.partial(jax.jit, static_argnames="stream")
def gumbel(seed: Array, index: Array, token_ids: Array, stream: int = TOKEN) -> jax.Array:
    """Gumbel noise [..., V] float32 (docs/determinism.md "Noise"); see `noise_words`.

    The uniform has 64 bits and goes through log1p because the noise must be fine where the
    exponential is small: that is what lets a token of probability 1e-8 win as often as it should.
    Both scalings are by powers of two, hence exact. The result is pinned: a caller adds it, and a
    last product inside `log` must not be contracted into that sum in some programs only. It is one
    program also where it is called outside of any: XLA:CPU gives `log` by itself other bits for
    some shapes (rows of 7, say) than it gives it beside other operations.
    """
    w0, w1 = noise_words(seed, index, token_ids, stream)
    uniform = w0.astype(jnp.float32) * np.float32(2.0**-32)
    uniform = uniform + w1.astype(jnp.float32) * np.float32(2.0**-64)
    uniform = jnp.clip(uniform, np.float32(2.0**-64), np.float32(1 - 2.0**-24))
    return numerics.pin(-jnp.log(-jnp.log1p(-uniform)))
