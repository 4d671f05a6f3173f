"""The sampling functions compiled once for all tests, and a slow reference of truncation."""

import jax
import numpy as np

from deepinfer_jax import noise, numerics, sampling

SAMPLE = jax.jit(sampling.sample)
TRANSFORM = jax.jit(sampling.transform)
CHOOSE = jax.jit(sampling.choose)
GUMBEL = jax.jit(noise.gumbel, static_argnames="stream")
WORDS = jax.jit(noise.noise_words, static_argnames="stream")
LOGPROB = jax.jit(sampling.logprob)
LOGSUMEXP = jax.jit(numerics.logsumexp)
ACCEPTED = jax.jit(sampling.accepted)
ACCEPTANCE = jax.jit(sampling.acceptance_probability)
FIRST_LARGEST = jax.jit(sampling.first_largest)


def log_probabilities(logits, mask=None, **params):
    """`transform` of up to 8 rows over up to 11 ids through one compiled shape."""
    n, v = np.shape(logits)
    room = (0, max(8 - n, 0)), (0, max(11 - v, 0))
    padded = np.pad(np.asarray(logits, np.float32), room, constant_values=-np.inf)
    allowed = np.pad(np.ones((n, v), bool) if mask is None else mask, room, constant_values=True)
    columns = {k: np.resize(x, len(padded)) for k, x in params.items()}
    limits = sampling.make_sampling(len(padded), **columns, seeds=range(len(padded)))
    return np.asarray(TRANSFORM(padded, limits, allowed))[:n, :v]


def survivors_by_sorting(logits, temperature, top_p, top_k, min_p):
    """Kept ids and their probabilities under the temperature, or None near a boundary."""
    z = np.asarray(logits, np.float64) / np.float64(np.float32(temperature))
    share = np.exp(z - z.max())
    relative, share = share.copy(), share / share.sum()
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    before = np.concatenate([[0], np.cumsum(share[order])[:-1]])
    near = top_p < 1 and np.abs(before - top_p).min() < 1e-5
    if near or (min_p > 0 and np.abs(relative - min_p).min() < 1e-5):
        return None
    prefix = [i for i, mass in zip(order, before, strict=True) if mass <= top_p or top_p == 1]
    prefix = prefix if top_k < 0 else prefix[:top_k]
    return sorted(i for i in prefix if relative[i] >= min_p), share
