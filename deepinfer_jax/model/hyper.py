"""Single-pass mHC: residual streams, collapsed and remixed at every sub-layer (docs/model.md 4).

The collapse weights of a sub-layer were made by the sub-layer before it, so a mix depends only on
the streams that enter and can run beside the sub-layer itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import numerics as nx
from deepinfer_jax import summaries
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import cpu_kernels
from deepinfer_jax.numerics import Numerics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mix:
    """pre [T, C] for the next collapse, post [T, C] for the output, comb [T, C source, C dest]."""

    pre: jax.Array
    post: jax.Array
    comb: jax.Array

    __repr__ = summaries.of_fields


def first_pre(count: int, streams: int) -> jax.Array:
    """Collapse weights of the first sub-layer: stream 0 alone. float32 [T, C]."""
    return jnp.zeros((count, streams), jnp.float32).at[:, 0].set(1)


@nx.by_name("cfg")
def raw_mixes(p: Any, streams: jax.Array, cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """Projection of all streams [T, C, D] with one common normaliser -> float32 [T, C(2+C)]."""
    z = streams.reshape(streams.shape[0], -1)
    scale = lax.rsqrt(nx.mean_square(z, numerics) + np.float32(cfg.rms_norm_eps))
    return nx.dot(z, p["fn"], numerics) * scale[:, None]


@jax.named_scope("mhc")
@nx.in_kernel(cpu_kernels.mix, "cfg", fits=cpu_kernels.mixes_fit, result=Mix)
def mix(p: Any, streams: jax.Array, cfg: ModelConfig, numerics: Numerics) -> Mix:
    """The three mixes of one sub-layer from its incoming streams [T, C, D]."""
    return split(raw_mixes(p, streams, cfg, numerics), p, cfg, numerics)


def split(mixes: jax.Array, p: Any, cfg: ModelConfig, numerics: Numerics) -> Mix:
    """Raw mixes [T, C(2+C)] -> pre, post and the doubly normalised comb."""
    made = nx.mixes(
        mixes, p["scale"], p["base"], cfg.hc_mult, cfg.hc_sinkhorn_iters, cfg.hc_eps, numerics
    )
    return Mix(*made)


@jax.named_scope("mhc")
def collapse(pre: jax.Array, streams: jax.Array, numerics: Numerics) -> jax.Array:
    """Weighted sum of the streams: pre [T, C], streams [T, C, D] -> [T, D], rounded once."""
    terms = nx.pin(pre[:, :, None] * streams.astype(jnp.float32))
    return nx.round_to(nx.axis_sum(terms, 1, numerics), numerics.dtype)


@jax.named_scope("mhc")
@nx.in_kernel(cpu_kernels.normed, "cfg")
@nx.by_name("cfg")
def normed(
    weight: jax.Array, pre: jax.Array, streams: jax.Array, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """The collapsed, normalised input [T, D] of a sub-layer."""
    u = collapse(pre, streams, numerics)
    return nx.rms_norm(u, weight, cfg.rms_norm_eps, numerics)


@jax.named_scope("mhc")
@nx.in_kernel(cpu_kernels.expand, fits=cpu_kernels.streams_fit)
@nx.by_name()
def expand(y: jax.Array, mixed: Mix, streams: jax.Array, numerics: Numerics) -> jax.Array:
    """Write a sub-layer output y [T, D] back: post * y + comb applied to the incoming streams."""
    own = nx.pin(mixed.post[:, :, None] * y.astype(jnp.float32)[:, None, :])
    carried = nx.pin(mixed.comb[..., None] * streams.astype(jnp.float32)[:, :, None, :])
    return nx.round_to(own + nx.axis_sum(carried, 1, numerics), numerics.dtype)


@jax.named_scope("mhc")
def stream_mean(streams: jax.Array, numerics: Numerics) -> jax.Array:
    """Mean over the streams [T, C, D] -> [T, D]: what DSpark taps (docs/model.md 4.2)."""
    total = nx.axis_sum(streams.astype(jnp.float32), 1, numerics)
    return nx.round_to(total / np.float32(streams.shape[1]), numerics.dtype)
