"""From the confidence head's logits to survivals. Legend: D drafts, any leading dimensions.

Both functions answer on the side they are asked on: arrays of NumPy for arrays of NumPy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray

# Beyond +-60 a float32 sigmoid is 0 or 1; the floor of a temperature keeps a quotient finite.
LOGIT_LIMIT = 60.0
LOWEST_TEMPERATURE = 1e-5


def probabilities(logits: Array, temperatures: Array) -> Any:
    """Probability that a draft is accepted, given that all before it were: float32 [..., D].

    Args:
        logits: [..., D] of the confidence head, any float type.
        temperatures: [D], one per draft (`fit_temperatures`); ones leave the head as trained.
    """
    xp = jnp if isinstance(logits, jax.Array) else np  # the host's arrays stay on the host
    z = xp.asarray(logits, np.float32)
    heat = xp.maximum(xp.asarray(temperatures, np.float32), np.float32(LOWEST_TEMPERATURE))
    if heat.shape != z.shape[-1:]:
        raise ValueError(
            f"temperatures needs one entry per draft: expected shape {z.shape[-1:]} for logits of "
            f"shape {z.shape}, got {heat.shape}"
        )
    z = xp.clip(z / xp.broadcast_to(heat, z.shape), -LOGIT_LIMIT, LOGIT_LIMIT)
    return 1 / (1 + xp.exp(-z))


def survival(probabilities: Array) -> Any:
    """Probability that a draft and all before it are accepted: [..., D] float32, falling along D.

    A product in float32 from left to right: a host that multiplies in this order
    has the same bits, and so the same plan.
    """
    xp = jnp if isinstance(probabilities, jax.Array) else np
    p = xp.asarray(probabilities, np.float32)
    running, columns = None, []
    for draft in range(p.shape[-1]):
        running = p[..., draft] if running is None else running * p[..., draft]
        columns.append(running)
    return xp.stack(columns, axis=-1) if columns else p
