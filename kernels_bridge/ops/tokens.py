"""One token for every row: the largest log-probability plus noise (docs/determinism.md "Noise")."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import sampling
from kernels_bridge.ops import twins
from kernels_bridge.ops.operands import fit
from kernels_bridge.registry import Op


def _rule(logp, seed, index) -> Any:
    sizes: dict[str, int] = {}
    name = "choose_token"
    fit(name, sizes, operand="logp", shape=logp, dims="T V", dtypes=("float32",))
    fit(name, sizes, operand="seed", shape=seed, dims="T 2", dtypes=("uint32",))
    fit(name, sizes, operand="index", shape=index, dims="T", dtypes=("int32",))
    return jax.ShapeDtypeStruct((sizes["T"],), jnp.int32)


def choose_token_twin(logp, seed, index):
    """logp [T, V] float32 after all transforms, seed [T, 2] uint32, index [T] int32 of the output
    -> token [T] int32: `sampling.choose`, the same noise for every neighbour and draft."""
    return sampling.choose(logp, seed, index)


choose_token = Op(
    "choose_token",
    "the largest log-probability plus the noise of its seed and place",
    _rule,
    choose_token_twin,
    twins.of_model(choose_token_twin, "Threefry words, two logarithms, arg-max"),
)
OPS = (choose_token,)
