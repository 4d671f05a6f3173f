"""Coupled acceptance as something to train for: its probability, with a gradient.

The value is `sampling.acceptance_probability`, counted in whole units and therefore without a
derivative of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import sampling


@jax.custom_jvp
def acceptance(p: jax.Array, q: jax.Array) -> jax.Array:
    """Probability [...] that target `p` and draft `q` [..., V] choose one token on shared noise.

    Differentiable in both. The gradient in q asks for more than that of the total variation: it
    also says where among the ids that q has too little of, most is to be gained.
    """
    return sampling.acceptance_probability(p, q)


@acceptance.defjvp
def _acceptance_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    by_p, by_q = slopes(*primals)
    move = by_p * tangents[0] + by_q * tangents[1]
    return acceptance(*primals), jnp.sum(move, axis=-1)


def slopes(p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Derivatives of `acceptance` by every entry of p and of q [..., V].

    With ids in ascending order of p / q, P_i the sum of p from i on and Q_i that of q before i,
    the probability is the sum of t_i = 1 / (P_i / p_i + Q_i / q_i). So

        d/dq_k = (t_k / q_k)^2 Q_k - sum_(i > k) t_i^2 / q_i
        d/dp_k = (t_k / p_k)^2 (P_k - p_k) - sum_(i < k) t_i^2 / p_i
    """
    ids = lax.broadcasted_iota(jnp.int32, p.shape, p.ndim - 1)
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), jnp.inf)
    _, p, q, ids = lax.sort((ratio, p, q, ids), num_keys=1)
    both = (p > 0) & (q > 0)
    p_, q_ = jnp.where(both, p, 1.0), jnp.where(both, q, 1.0)
    after, before = _after(p), jnp.cumsum(q, axis=-1) - q
    term = jnp.where(both, 1 / (1 + after / p_ + before / q_), 0.0)
    by_p, by_q = term / p_, term / q_
    below = jnp.cumsum(term * by_p, axis=-1) - term * by_p
    move_p = by_p * by_p * after - below
    move_q = by_q * by_q * before - _after(term * by_q)
    _, move_p, move_q = lax.sort((ids, move_p, move_q), num_keys=1)
    return move_p, move_q


def _after(x: jax.Array) -> jax.Array:
    """Sums [..., V] over the entries behind each."""
    return jnp.cumsum(x[..., ::-1], axis=-1)[..., ::-1] - x
