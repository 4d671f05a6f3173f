"""Mixture of experts: biased choice, unbiased weights, clamped SwiGLU (docs/model.md 8)."""

from dataclasses import dataclass

import numpy as np

from .basics import Params, best, gap, silu
from .layout import Text


@dataclass(frozen=True)
class Route:
    """experts [k], best biased score first; weights [k] in the same order; gap to the next."""

    experts: np.ndarray
    weights: np.ndarray
    gap: float


def scores_of(logits: np.ndarray) -> np.ndarray:
    """sqrt(softplus(logits))."""
    return np.sqrt(np.logaddexp(0, logits))


def route(scores: np.ndarray, bias: np.ndarray, active: int, text: Text) -> Route:
    """Choose `active` experts by scores + bias [E]; the bias never enters the weights."""
    experts = best(scores + bias, active)
    weights = scores[experts]
    if active > 1 and text.get("norm_topk_prob", True):
        weights = weights / (weights.sum() + 1e-20)
    weights = weights * text["routed_scaling_factor"]
    return Route(experts, weights, gap(scores + bias, active))


def expert(params: Params, x: np.ndarray, limit: float, weight: float = 1.0) -> np.ndarray:
    """One expert on x [D]; the routing weight acts before the down projection."""
    gate = np.minimum(params.quantized_linear("w1", x), limit)
    up = np.clip(params.quantized_linear("w3", x), -limit, limit)
    return params.quantized_linear("w2", weight * silu(gate) * up)


def mixture(
    params: Params, x: np.ndarray, active: int, image: bool, text: Text
) -> tuple[np.ndarray, Route]:
    """x [D] -> [D] and the choice made; image positions choose with `bias_vl`."""
    logits = params.linear("gate", x) / text.get("gate_temp", 1.0)
    bias = params["gate.bias_vl" if image else "gate.bias"]
    chosen = route(scores_of(logits), bias, active, text)
    y = np.zeros_like(x)
    for index, weight in zip(chosen.experts, chosen.weights, strict=True):
        y = y + expert(params.under(f"experts.{index}"), x, text["swiglu_limit"], weight)
    return y + expert(params.under("shared_experts"), x, text["swiglu_limit"]), chosen
