"""What any policy says of a rollout: the one that sampled it, a newer one, a reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import steps, summaries
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rl.rollout import Rollout
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.tables import Tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Of the sampled tokens of a rollout: raw, processed, kept_mass [B, S-1] float32.

    As the fields of `Rollout` of these names, and zero in the same places.
    """

    raw: jax.Array
    processed: jax.Array
    kept_mass: jax.Array

    __repr__ = summaries.of_fields


def score(
    params: Any, tables: Tables, rollout: Rollout, sampling: Sampling, cfg: ModelConfig,
    numerics: Numerics, *, micro: int = 0, remat: bool = False,
) -> Logprobs:  # fmt: skip
    """The log-probs of a rollout's tokens under `params`.

    Under the weights that sampled them these are the rollout's own in every bit, whatever `micro`
    and `remat`: new, old and reference policies differ by their weights and by nothing else.
    Differentiable in `params` where they are plain floats.

    Args:
      sampling: what the replies were sampled with; temperature and truncation are inside.
      micro: sequences scored at once, a divisor of B; 0 means all of them.
      remat: recompute blocks in a backward pass.

    Jit with `cfg`, `numerics`, `micro` and `remat` static.

    Raises ValueError where `micro` does not divide the replies, or `sampling` has not one row for
    each.
    """
    b = rollout.tokens.shape[0]
    if micro < 0 or b % (micro or b):
        raise ValueError(
            f"micro (sequences scored at once) must divide the {b} replies, or be 0 for all of "
            f"them, got {micro}"
        )
    steps.check_sampling(sampling, b)

    def seen(part: tuple[jax.Array, jax.Array, Sampling]) -> Logprobs:
        tokens, lengths, own = part
        scores = steps.score(
            params, tables, tokens, lengths, cfg, numerics, sampling=own, remat=remat
        )
        return Logprobs(scores.raw, scores.processed, scores.kept_mass)

    whole = (rollout.tokens, rollout.lengths, sampling)
    if micro in (0, b):
        found = seen(whole)
    else:
        split = jax.tree.map(lambda x: jnp.reshape(x, (b // micro, micro, *x.shape[1:])), whole)
        found = jax.tree.map(lambda x: x.reshape(b, *x.shape[2:]), lax.map(seen, split))
    return jax.tree.map(lambda x: jnp.where(rollout.sampled, x, 0), found)
