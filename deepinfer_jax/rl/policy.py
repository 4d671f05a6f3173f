"""Policy gradient on a rollout: the trainer's log-probs are the sampler's, so the ratio is 1."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import numerics as nx
from deepinfer_jax import steps
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rl.rollout import Rollout
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.tables import Tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Agreement:
    """What one gradient was made of, scalars.

    loss: float32. tokens: int32, sampled tokens. raw, processed: largest |trainer - sampler| of the
    two log-probs, exactly 0 where sampler and trainer run the same `Numerics` on one chip. kl: mean
    of ratio - 1 - log ratio over the sampled tokens, exactly 0 then.
    """

    loss: jax.Array
    tokens: jax.Array
    raw: jax.Array
    processed: jax.Array
    kl: jax.Array


def policy_gradient(
    params: Any, tables: Tables, rollout: Rollout, advantages: jax.Array, sampling: Sampling,
    cfg: ModelConfig, numerics: Numerics, *, remat: bool = False,
) -> tuple[Any, Agreement]:  # fmt: skip
    """Gradient of -mean(advantage * ratio) over the sampled tokens, and how far the sides agree.

    Args:
      params: plain floats (`params.widen`), the ones that `rollout` sampled with.
      rollout: of B replies.
      advantages: [B] float32, one per reply.
      sampling: what the replies were sampled with; the ratio is of processed log-probs.
      remat: recompute blocks in the backward pass.

    Returns (a tree like `params`, to descend along; Agreement). Jit with `cfg`, `numerics` and
    `remat` static.
    """

    def loss(params: Any) -> tuple[jax.Array, Agreement]:
        seen = steps.score(
            params, tables, rollout.tokens, rollout.lengths, cfg, numerics, sampling=sampling,
            remat=remat,
        )  # fmt: skip
        counted = rollout.sampled
        count = jnp.count_nonzero(counted).astype(jnp.int32)
        gap = jnp.where(counted, seen.processed - rollout.processed, 0)
        ratio = jnp.exp(gap)
        mean = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        gain = jnp.where(counted, ratio * advantages[:, None], 0)
        value = -nx.plain_sum(gain.reshape(-1), 0) * mean
        difference = jnp.where(counted, jnp.abs(seen.raw - rollout.raw), 0)
        return value, Agreement(
            loss=value,
            tokens=count,
            raw=jnp.max(difference),
            processed=jnp.max(jnp.abs(gap)),
            kl=nx.plain_sum((ratio - 1 - gap).reshape(-1), 0) * mean,
        )

    return jax.grad(loss, has_aux=True)(params)
