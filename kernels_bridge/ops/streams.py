"""The mixes of hyper-connections from their raw sums (docs/model.md 4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import numerics
from kernels_bridge.ops import twins
from kernels_bridge.ops.operands import fit
from kernels_bridge.registry import Op


def _rule(raw, scale, base, *, streams: int, iterations: int, eps: float) -> Any:
    sizes: dict[str, int] = {}
    name, wide = "stream_mixes", ("float32",)
    if streams < 1 or iterations < 1:
        raise ValueError(
            f"{name}: streams and iterations must be at least 1, got {streams} and {iterations}"
        )
    width = streams * (2 + streams)
    fit(name, sizes, operand="raw", shape=raw, dims=f"T {width}", dtypes=wide)
    fit(name, sizes, operand="scale", shape=scale, dims="3", dtypes=wide)
    fit(name, sizes, operand="base", shape=base, dims=f"{width}", dtypes=wide)
    short = jax.ShapeDtypeStruct((sizes["T"], streams), jnp.float32)
    return short, short, jax.ShapeDtypeStruct((sizes["T"], streams, streams), jnp.float32)


def stream_mixes_twin(raw, scale, base, *, streams: int, iterations: int, eps: float):
    """raw [T, C(2 + C)], scale [3], base [C(2 + C)] float32, C = streams -> pre [T, C], post
    [T, C], comb [T, C source, C dest] float32, normalised over both by `iterations` turns."""
    form = numerics.Numerics.fp32()
    return numerics.mixes(raw, scale, base, streams, iterations, eps, form)


stream_mixes = Op(
    "stream_mixes",
    "mixes of hyper-connections, doubly normalised",
    _rule,
    stream_mixes_twin,
    twins.of_model(stream_mixes_twin, "short sums in index order"),
)
OPS = (stream_mixes,)
