"""Functions of the model as C++ kernels, one call each, for `rows="ffi"` (`numerics.in_kernel`).

Each takes the arguments of the function in whose place it runs, by name.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import numerics as nx
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.tables import Rotation
from kernels_bridge import ffi


def mix(p: Any, streams: jax.Array, cfg: ModelConfig, numerics: Numerics) -> Any:
    """(pre, post, comb) of `hyper.mix`."""
    scale, base = p["scale"].astype(jnp.float32), p["base"].astype(jnp.float32)
    turns, eps = cfg.hc_sinkhorn_iters, cfg.hc_eps
    return ffi.mix(streams, nx.readable(p["fn"]), scale, base, turns, eps, cfg.rms_norm_eps)


def mixes_fit(cfg: ModelConfig, **_: Any) -> bool:
    return cfg.hc_mult <= ffi.MOST_STREAMS


def normed(
    weight: jax.Array, pre: jax.Array, streams: jax.Array, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """`hyper.normed`."""
    return ffi.normed(weight, pre, streams, cfg.rms_norm_eps)


def expand(y: jax.Array, mixed: Any, streams: jax.Array, numerics: Numerics) -> jax.Array:
    """`hyper.expand`."""
    return ffi.expand(y.astype(streams.dtype), mixed.post, mixed.comb, streams)


def streams_fit(streams: jax.Array, **_: Any) -> bool:
    return streams.shape[1] <= ffi.MOST_STREAMS


def rotated(x: jax.Array, angle: Rotation, inverse: bool, numerics: Numerics) -> jax.Array:
    """`rope.rotated`, of x [T, K] or [T, H, K]."""
    heads = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    return ffi.rotated(heads, angle.cos, angle.sin, inverse, x.dtype).reshape(x.shape)


def route(
    gate: Any, x: jax.Array, image: jax.Array, k: int, cfg: ModelConfig, numerics: Numerics
) -> Any:
    """(experts, weights, scores) of `moe.route`."""
    bias = gate["bias"].astype(jnp.float32)
    other = gate["bias_vl"].astype(jnp.float32) if "bias_vl" in gate else bias
    return ffi.route(
        x.astype(numerics.dtype), nx.readable(gate["weight"], numerics.dtype), bias, other, image,
        k, cfg.gate_temp, cfg.routed_scaling_factor, cfg.norm_topk_prob and k > 1,
    )  # fmt: skip


def outputs(
    stacks: Any, layer: Any, x: jax.Array, experts: jax.Array, weights: jax.Array,
    cfg: ModelConfig, numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """`moe._outputs`: what the chosen experts give, [T, k, D]."""
    whole = tuple(map(nx.readable, _weights(stacks)))
    quantized = cfg.quantized and numerics.quantize_activations
    x = x.astype(numerics.dtype)
    return ffi.experts(x, experts, weights, whole, layer, cfg.swiglu_limit, quantized)


def outputs_fit(stacks: Any, numerics: Numerics, **_: Any) -> bool:
    weights = _weights(stacks)
    return nx.alike(weights) and all(nx.is_readable(w, numerics.dtype) for w in weights)


def activate(up: jax.Array, gate: jax.Array, limit: float, numerics: Numerics) -> jax.Array:
    """`moe._activate`."""
    return ffi.activate(gate, up, limit)


def shared_expert(p: Any, x: jax.Array, cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """`moe.shared_expert`."""
    w1, w3, w2 = (nx.readable(weight, numerics.dtype) for weight in _weights(p))
    quantized = cfg.quantized and numerics.quantize_activations
    return ffi.shared(x.astype(numerics.dtype), (w1, w3, w2), cfg.swiglu_limit, quantized)


def shared_fits(p: Any, **_: Any) -> bool:
    return nx.alike(_weights(p))


def _weights(expert: Any) -> tuple[Any, Any, Any]:
    return expert["w1"], expert["w3"], expert["w2"]
