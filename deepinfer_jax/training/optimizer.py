"""Muon for matrices, Adam for everything else, as pure functions over trees.

Muon steps along the nearest orthogonal matrix of the momentum (K. Jordan and others, 2024), scaled
so that an entry moves about as far as under Adam; one learning rate then serves both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Params
from deepinfer_jax.training import masters

Kind = Literal["muon", "adam", "slow", "fixed"]
_MATRICES = (".attn.", "experts.", "compressor.", "indexer.", "main_proj", "engram.0.wkv")
_SLOW = (
    "norm",
    "sink",
    ".hc_",
    "q_weight",
    "k_weight",
)  # gains and mixes: Adam at a fifth of the rate
_NOT_MATRICES = ("norm", "sink", "weights_proj")


@dataclasses.dataclass(frozen=True)
class Settings:
    """decay: weight decay of matrices per unit of learning rate; clip: norm of Adam's gradients;
    slow: share of the rate for gains and stream mixes.
    """

    momentum: float = 0.95
    first: float = 0.9
    second: float = 0.95
    eps: float = 1e-10
    decay: float = 0.1
    clip: float = 1.0
    slow: float = 0.2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """count: steps taken; first and second: trees of the masters (a scalar where not used)."""

    count: jax.Array
    first: Params
    second: Params


def kinds(cfg: ModelConfig, trained: Literal["backbone", "draft"]) -> Params:
    """The rule of every leaf: a tree of `Kind`. Only one of the two stages moves a leaf."""

    def one(path: str, spec: Any) -> Kind:
        if path.startswith("draft.") != (trained == "draft") or path.startswith("vision."):
            return "fixed"
        if path.endswith(("gate.bias", "gate.bias_vl")):
            return "fixed"
        matrix = any(part in path for part in _MATRICES)
        if matrix and not any(part in path for part in _NOT_MATRICES):
            return "muon"
        return "slow" if any(part in path for part in _SLOW) else "adam"

    return masters.over_specs(one, cfg)


def init(values: Params, rules: Params) -> Moments:
    """Moments of zero."""

    def zeros(value: jax.Array, used: bool) -> jax.Array:
        return jnp.zeros(value.shape if used else (), jnp.float32)

    first = jax.tree.map(lambda v, kind: zeros(v, kind != "fixed"), values, rules)
    second = jax.tree.map(lambda v, kind: zeros(v, kind in ("adam", "slow")), values, rules)
    return Moments(jnp.zeros((), jnp.int32), first, second)


def orthogonal(x: jax.Array) -> jax.Array:
    """About U V^T of x [..., N, K] = U S V^T: five Newton-Schulz steps."""
    turn = x.shape[-2] > x.shape[-1]
    x = x.swapaxes(-1, -2) if turn else x
    norm = jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    x = (x / (norm + 1e-12)).astype(jnp.bfloat16)
    for _ in range(5):
        gram = x @ x.swapaxes(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    x = x.astype(jnp.float32)
    return x.swapaxes(-1, -2) if turn else x


def update(
    values: Params, grads: Params, moments: Moments, rate: jax.Array, rules: Params,
    settings: Settings,
) -> tuple[Params, Moments]:  # fmt: skip
    """One step of learning rate `rate`: new masters and moments."""
    count = moments.count + 1
    adam = [
        jnp.sum(g * g)
        for g, kind in zip(jax.tree.leaves(grads), jax.tree.leaves(rules), strict=True)
        if kind in ("adam", "slow")
    ]
    shrink = jnp.minimum(1.0, settings.clip / (jnp.sqrt(sum(adam)) + 1e-12))
    step = count.astype(jnp.float32)

    def one(kind: Kind, value, grad, first, second):
        if kind == "fixed":
            return value, first, second
        if kind == "muon":
            first = settings.momentum * first + grad
            ahead = grad + settings.momentum * first
            size = 0.2 * max(value.shape[-2:]) ** 0.5
            move = size * orthogonal(ahead)
            return value * (1 - rate * settings.decay) - rate * move, first, second
        grad = grad * shrink
        first = settings.first * first + (1 - settings.first) * grad
        second = settings.second * second + (1 - settings.second) * grad * grad
        mean = first / (1 - settings.first**step)
        spread = second / (1 - settings.second**step)
        pace = rate * (settings.slow if kind == "slow" else 1.0)
        return value - pace * mean / (jnp.sqrt(spread) + settings.eps), first, second

    done = jax.tree.map(one, rules, values, grads, moments.first, moments.second)
    pick = [
        jax.tree.map(lambda _, triple, i=i: triple[i], rules, done, is_leaf=None) for i in range(3)
    ]
    return pick[0], Moments(count, pick[1], pick[2])


def schedule(progress: float, peak: float, warmup: float = 0.02, hold: float = 0.55) -> float:
    """Learning rate at `progress` in [0, 1]: rise, hold, fall to zero in a straight line."""
    if progress < warmup:
        return peak * progress / warmup
    if progress < hold:
        return peak
    return peak * max(0.0, (1 - progress) / (1 - hold))
