"""Between a trainer's state and our parameter tree: a table of names, checked both ways."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from deepinfer_jax import params as parameters
from deepinfer_jax.checkpoint.shards import some
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Params


@functools.cache
def expected(cfg: ModelConfig) -> dict[str, Any]:
    """Name -> shape and dtype of every weight that a trainer holds, in the order of our tree."""
    return parameters.by_path(_tree(cfg))


def as_tree(leaves: Mapping[str, Any], cfg: ModelConfig) -> Params:
    """The parameter tree of named leaves."""
    structure = jax.tree.structure(_tree(cfg))
    return jax.tree.unflatten(structure, [leaves[name] for name in expected(cfg)])


def from_state(state: Any, cfg: ModelConfig) -> dict[str, Any]:
    """The leaves of an `nnx.State` of a `Policy`'s parameters, by name.

    Raises ValueError where names, shapes or dtypes are not those of `expected`: what is missing,
    unexpected or different, by name.
    """
    given = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        given[str(getattr(path[0], "key", path[0]))] = leaf
    different = parameters.leaf_differences(given, expected(cfg))
    if different:
        raise ValueError(
            f"the trainer's state does not fit the model: {some(different, '; ')}. It must hold "
            "the parameters of a deepinfer_jax.rl.tunix.Policy of this model, all and no others"
        )
    return given


@functools.cache
def _tree(cfg: ModelConfig) -> Any:
    return jax.eval_shape(parameters.widen, parameters.shapes(cfg))
