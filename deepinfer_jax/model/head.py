"""The language model head (docs/model.md 4.2)."""

from __future__ import annotations

from typing import Any

import jax

from deepinfer_jax.model import divided
from deepinfer_jax.numerics import Numerics


def logits(params: Any, output: jax.Array, numerics: Numerics) -> jax.Array:
    """float32 [T, V] of normed hidden rows [T, D]: never rounded to a narrower type."""
    return divided.products(output, params["head"], numerics)
