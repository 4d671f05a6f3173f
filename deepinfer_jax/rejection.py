"""Speculative sampling by rejection: the textbook rule, for comparison with coupled sampling.

A draft d drawn from q is accepted with probability min(1, p(d) / q(d)); after a rejection the token
comes from max(p - q, 0), normalised, and after the last draft from p. What comes out has
distribution p exactly (docs/speculation.md "Rejection"), but which token a seed gives depends on
which drafts were verified: only coupled sampling is independent of the schedule. For the same
reason a plan must not look at the confidence of drafts it may leave out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import sampling as samplers
from deepinfer_jax.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, gumbel, noise_words
from deepinfer_jax.sampling import Array, Sampled, Sampling

_MIX = np.uint32(0x9E3779B9)  # odd, so that no two bases give a seed the same words


def draft(
    logits: Array, sampling: Sampling, index: Array, base: Array, mask: Array | None = None
) -> jax.Array:
    """Draft tokens [T] int32 from logits [T, V] for the absolute `index` [T].

    `base` [T] int32 is where the round starts: drafts of one index made in two rounds must be
    independent, or a rejected draft would come back. `mask` [T, V] as in `sampling.transform`.
    """
    logp = samplers.transform(logits, sampling, mask)
    low = sampling.seed[..., 0] ^ (jnp.asarray(base).astype(jnp.uint32) * _MIX)
    seed = jnp.stack([low, jnp.asarray(sampling.seed[..., 1])], axis=-1)
    ids = jnp.arange(logp.shape[-1])
    return samplers.first_largest(logp + gumbel(seed, index, ids, DRAFT))


def residual(target: Array, proposal: Array) -> jax.Array:
    """log max(p - q, 0) [T, V], not normalised, from log-probabilities; `target` where all is 0.

    Nothing is left where rounding hides the difference of p and q; a rejection is then itself an
    accident of rounding, and a draw from p as good.
    """
    left = jnp.log(jnp.maximum(jnp.exp(target) - jnp.exp(proposal), 0))
    return jnp.where(jnp.any(left > -jnp.inf, axis=-1, keepdims=True), left, target)


def accepts(target: Array, proposal: Array, token: Array, uniform: Array) -> jax.Array:
    """[T] bool: uniform [T] in [0, 1) is below min(1, p / q) of the draft `token` [T]."""
    p = jnp.take_along_axis(target, token[..., None], axis=-1)[..., 0]
    q = jnp.take_along_axis(proposal, token[..., None], axis=-1)[..., 0]
    return jnp.less(uniform, jnp.exp(jnp.minimum(p - q, 0)))


def sample(
    logits: Array, draft_logits: Array, token: Array, verifying: Array, sampling: Sampling,
    index: Array, mask: Array | None = None, edited: Array | None = None,
) -> Sampled:  # fmt: skip
    """The outcome of T rows: the draft where it is accepted, another token where it is not.

    A rejected row never gives its own draft, so that rows are accepted as long as `token` returns.

    Args:
      logits, draft_logits: [T, V] of the target and of what the draft was drawn from, with edits
        if there are any.
      token: [T] the draft; verifying: [T] bool, False where there is none: a draw from the target.
      sampling, index: parameters of the rows and absolute output index [T].
      mask: [T, V] bool, what is allowed there; the drafts were drawn under it too.
      edited: [T, V], the target's logits with its edits (module `edits`).
    """
    target = samplers.transform(logits if edited is None else edited, sampling, mask)
    proposal = samplers.transform(draft_logits, sampling, mask)
    words, _ = noise_words(sampling.seed, index, jnp.zeros((1,), jnp.int32), ACCEPT)
    uniform = (words[..., 0] >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    kept = jnp.asarray(verifying) & accepts(target, proposal, token, uniform)
    ids = jnp.arange(target.shape[-1])
    other = jnp.where(jnp.asarray(verifying)[..., None], residual(target, proposal), target)
    noise = jnp.where(
        jnp.asarray(verifying)[..., None],
        gumbel(sampling.seed, index, ids, RESIDUAL),
        gumbel(sampling.seed, index, ids, TOKEN),
    )
    drawn = samplers.first_largest(other + noise)
    return samplers.judge(logits, jnp.where(kept, token, drawn), sampling, mask, edited)
