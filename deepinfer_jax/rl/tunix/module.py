"""The model as a `flax.nnx` module: trainers differentiate the `forward` that the sampler runs."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import params as parameters
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.loading import Model
from deepinfer_jax.model import head
from deepinfer_jax.model.forward import forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rl.tunix import weights
from deepinfer_jax.rows import batch_rows
from deepinfer_jax.tables import Tables, table_shapes

nnx: Any = importlib.import_module("flax.nnx")

TABLES = ("base_cos", "base_sin", "yarn_cos", "yarn_sin", "token_map")


class Constant(nnx.Variable):
    """What nobody trains: rotation tables and the Engram token map."""


class Policy(nnx.Module):
    """Weights and the trainer's pass over whole sequences.

    Every leaf of the parameter tree is an `nnx.Param` named by its path ("layers.attn.wq_a"),
    float32, drafter included: that is the table between a state of Flax and our tree. Calls take
    what tunix passes (tokens [B, S] with padding on either side, positions, an attention mask) and
    return (logits [B, S, V] float32, None). A row's logits are the sampler's in every bit.
    """

    def __init__(self, model: Model) -> None:
        self.cfg: ModelConfig = model.cfg
        self.numerics: Numerics = model.numerics
        for name, leaf in parameters.by_path(parameters.widen(model.params)).items():
            setattr(self, name, nnx.Param(leaf))
        for name, leaf in zip(TABLES, jax.tree.leaves(model.tables), strict=True):
            setattr(self, name, Constant(leaf))

    def weights(self) -> dict[str, jax.Array]:
        """Name -> leaf, in the order of our tree."""
        return {name: getattr(self, name)[...] for name in weights.expected(self.cfg)}

    def tables(self) -> Tables:
        """The constants as `forward` takes them."""
        structure = jax.tree.structure(table_shapes(self.cfg, 1))
        return jax.tree.unflatten(structure, [getattr(self, name)[...] for name in TABLES])

    def __call__(
        self, input_tokens: jax.Array, positions: Any = None, cache: Any = None,
        attention_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:  # fmt: skip
        """Logits of every token's successor; arbitrary where a token is padding.

        attention_mask [B, S, S]: its diagonal says which tokens are real; default all. Positions
        are counted from the first real token of a row, as tunix counts them.
        """
        if cache is not None:
            raise ValueError("Policy has no cache: sample with TunixRollout, not with this module")
        b, s = input_tokens.shape
        real = jnp.ones((b, s), bool)
        if attention_mask is not None:
            real = jnp.diagonal(attention_mask, axis1=1, axis2=2).astype(bool)
        # Real tokens first, in order: where padding stands changes no row.
        order = jnp.argsort(~real, axis=1, stable=True)
        back = jnp.argsort(order, axis=1)
        tokens = jnp.take_along_axis(input_tokens, order, axis=1)
        lengths = jnp.count_nonzero(real, axis=1).astype(jnp.int32)
        params = weights.as_tree(self.weights(), self.cfg)
        hidden, _ = forward(
            params, self.tables(), batch_rows(tokens, lengths), None, self.cfg, self.numerics,
            length=s,
        )  # fmt: skip
        rows = jnp.take_along_axis(hidden.output.reshape(b, s, -1), back[..., None], axis=1)
        logits = head.logits(params, rows.reshape(b * s, -1), self.numerics)
        return logits.reshape(b, s, -1), None


def parts(policy: Policy) -> tuple[Any, Any, Any]:
    """(graph, state of the weights, state of the rest) of a policy; nothing is copied."""
    return nnx.split(policy, nnx.Param, ...)


def whole(trained: Any, rest: Any) -> Any:
    """The state of a policy from its two parts."""
    return nnx.merge_state(trained, rest)
