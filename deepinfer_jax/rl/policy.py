"""Policy gradient on a rollout: the trainer's log-probs are the sampler's, so the ratio is 1."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import numerics as nx
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rl.rollout import Rollout
from deepinfer_jax.rl.scores import score
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.tables import Tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Agreement:
    """What one gradient was made of, scalars.

    loss: float32. tokens: int32, sampled tokens. raw, processed: largest |trainer - sampler| of the
    two log-probs, exactly 0 where sampler and trainer run the same weights and `Numerics` on one
    chip. kl: mean of ratio - 1 - log ratio over the sampled tokens, exactly 0 then; infinite, like
    `processed`, where truncation under newer weights removes a token. clipped: share of them whose
    ratio was cut. reference_kl: the same mean against a reference policy, 0 without.
    """

    loss: jax.Array
    tokens: jax.Array
    raw: jax.Array
    processed: jax.Array
    kl: jax.Array
    clipped: jax.Array
    reference_kl: jax.Array


def policy_gradient(
    params: Any, tables: Tables, rollout: Rollout, advantages: jax.Array, sampling: Sampling,
    cfg: ModelConfig, numerics: Numerics, *, remat: bool = False, micro: int = 0,
    clip: float | None = None, reference: jax.Array | None = None, beta: float = 0.0,
) -> tuple[Any, Agreement]:  # fmt: skip
    """Gradient of -mean(advantage * ratio) over the sampled tokens, and how far the sides agree.

    Args:
      params: plain floats (`params.widen`), the ones that `rollout` sampled with.
      rollout: of B replies.
      advantages: [B] float32, one per reply.
      sampling: what the replies were sampled with; the ratio is of processed log-probs.
      remat, micro: recompute blocks in the backward pass; sequences at once (`score`).
      clip: where the ratio is cut, to 1 - clip .. 1 + clip, if that lowers the gain; None: nowhere.
      reference: [B, S-1] processed log-probs under a reference policy (`score`), from which the
        gain loses `beta` times the divergence that `Agreement.reference_kl` is.

    Returns (a tree like `params`, to descend along; Agreement). Jit with `cfg`, `numerics`,
    `remat`, `micro`, `clip` and `beta` static.

    Raises ValueError for advantages, reference, clip or beta that do not fit; else as `score`.
    """
    _check(rollout, advantages, reference, clip, beta)
    counted = rollout.sampled
    count = jnp.count_nonzero(counted).astype(jnp.int32)

    def mean(x: jax.Array) -> jax.Array:
        share = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        return nx.plain_sum(jnp.where(counted, x, 0).reshape(-1), 0) * share

    def loss(params: Any) -> tuple[jax.Array, Agreement]:
        seen = score(params, tables, rollout, sampling, cfg, numerics, micro=micro, remat=remat)
        gap = jnp.where(counted, seen.processed - rollout.processed, 0)
        ratio = jnp.exp(gap)
        cut = ratio if clip is None else jnp.clip(ratio, 1 - clip, 1 + clip)
        away = jnp.zeros_like(gap) if reference is None else reference - seen.processed
        apart = mean(_divergence(away))
        gain = mean(jnp.minimum(ratio * advantages[:, None], cut * advantages[:, None]))
        value = beta * apart - gain
        return value, Agreement(
            loss=value,
            tokens=count,
            raw=jnp.max(jnp.where(counted, jnp.abs(seen.raw - rollout.raw), 0)),
            processed=jnp.max(jnp.abs(gap)),
            kl=mean(_divergence(gap)),
            clipped=mean((cut != ratio).astype(jnp.float32)),
            reference_kl=apart,
        )

    return jax.grad(loss, has_aux=True)(params)


def _check(
    rollout: Rollout, advantages: jax.Array, reference: jax.Array | None, clip: float | None,
    beta: float,
) -> None:  # fmt: skip
    """A single advantage would be broadcast to all replies, a reference of one reply as well."""
    b, s = rollout.tokens.shape
    if advantages.shape != (b,):
        raise ValueError(
            f"advantages must have shape [{b}], one for each reply, got {list(advantages.shape)}"
        )
    if reference is not None and reference.shape != (b, s - 1):
        raise ValueError(
            f"reference must have shape [{b}, {s - 1}], the processed log-probs that `score` gives "
            f"of this rollout, got {list(reference.shape)}"
        )
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"clip must be above 0 and finite, or None to cut nothing, got {clip}")
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta must be at least 0 and finite, got {beta}")
    if beta and reference is None:
        raise ValueError(f"beta={beta} weighs the divergence from a reference: pass reference")


def _divergence(gap: jax.Array) -> jax.Array:
    """exp(gap) - 1 - gap: its mean over samples of a policy is the policy's KL from the other."""
    return jnp.exp(gap) - 1 - gap
