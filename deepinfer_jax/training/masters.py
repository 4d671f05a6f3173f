"""Master weights: float32 trees with the structure of `params`, and their rounding to the release.

Training keeps float32 masters. The forward pass sees what the release will store: every leaf
rounded through its own storage format, gradients passed straight through.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import numerics as nx
from deepinfer_jax import params as parameters
from deepinfer_jax import quant
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Params, Spec, is_weight

_RESIDUAL = ("wo_b", "w2")  # leaves that write to the streams: smaller at the start


def _kept(spec: Any) -> Spec:
    return spec.codes if is_weight(spec) else spec


def _shape(spec: Any) -> tuple[int, ...]:
    """Shape as floats: a byte of FP4 codes is two columns."""
    shape = _kept(spec).shape
    if is_weight(spec) and spec.format == "fp4_group":
        return (*shape[:-1], shape[-1] * 2)
    return shape


def over_specs(
    f: Callable[..., Any], cfg: ModelConfig, *trees: Any, part: str | None = None
) -> Params:
    """f(path, spec, *leaves) for every leaf of the parameter tree; a quantized weight is one leaf.

    `part` names a branch of the tree, such as "draft", that the trees are.
    """
    specs, prefix = parameters.abstract(cfg), ""
    if part is not None:
        specs, prefix = specs[part], part + "."
    return jax.tree_util.tree_map_with_path(
        lambda path, spec, *leaves: f(
            prefix + jax.tree_util.keystr(path, simple=True, separator="."), spec, *leaves
        ),
        specs,
        *trees,
        is_leaf=is_weight,
    )


def init(seed: int, cfg: ModelConfig) -> Params:
    """Master weights to start from: float32 arrays, equal for equal seeds.

    Differs from `params.init`, which serves tests, where training needs calm: streams start by
    passing themselves on, routing starts unbiased, and what writes to the streams starts small.
    """
    streams, depth = cfg.hc_mult, cfg.num_hidden_layers

    def draw(path: str, spec: Any) -> jax.Array:
        kept, shape = _kept(spec), _shape(spec)
        name = path.rpartition(".")[2]
        if path.endswith(("gate.bias", "gate.bias_vl", "attn_sink")):
            return jnp.zeros(shape, jnp.float32)
        if ".hc_" in path and name == "scale":
            return jnp.full(shape, 0.05, jnp.float32)
        if kept.constant:
            return jnp.full(shape, kept.init, jnp.float32)
        key = np.random.default_rng([seed, *path.encode()])
        value = key.standard_normal(shape, np.float32)
        if ".hc_" in path and name == "base":
            return jnp.asarray(_hyper_base(streams) + 0.1 * value)
        std = 0.5 if path == "embed" else kept.init
        if name in _RESIDUAL:
            std = std / (2 * depth) ** 0.5
        return jnp.asarray(value * np.float32(std))

    return over_specs(draw, cfg)


def _hyper_base(streams: int) -> np.ndarray:
    """Collapse to the mean, write with weight one, pass every stream to itself (about 95%)."""
    pre = np.full(streams, -np.log(streams - 1.0))
    comb = np.where(np.eye(streams) > 0, 4.0, 0.0).reshape(-1)
    return np.concatenate([pre, np.zeros(streams), comb]).astype(np.float32)


def _rounded(spec: Any, value: jax.Array) -> jax.Array:
    if is_weight(spec):
        return quant.dequantize(quant.quantize(value, spec.format), jnp.float32)
    return nx.round_to(value, spec.dtype).astype(jnp.float32)


def released(
    masters: Params, cfg: ModelConfig, amount: jax.Array | float = 1.0, part: str | None = None
) -> Params:
    """The masters as the release stores them, as float32 arrays; the gradient is the identity.

    amount: 1 gives exactly the released values; below 1/2 only bfloat16 rounding is applied.
    """

    def one(_: str, spec: Any, value: jax.Array) -> jax.Array:
        exact = jax.lax.stop_gradient(_rounded(spec, value))
        soft = jax.lax.stop_gradient(nx.round_to(value, jnp.bfloat16).astype(jnp.float32))
        if not is_weight(spec):
            return _through(value, exact)
        return _through(value, jnp.where(amount >= 0.5, exact, soft))

    return over_specs(one, cfg, masters, part=part)


@jax.custom_jvp
def _through(value: jax.Array, seen: jax.Array) -> jax.Array:
    """`seen`, with the gradient of `value`."""
    return seen


@_through.defjvp
def _through_jvp(primals, tangents):
    return _through(*primals), tangents[0]


def stored(masters: Params, cfg: ModelConfig, part: str | None = None) -> Params:
    """The masters in the storage of the release: the tree that `params` describes."""

    def one(_: str, spec: Any, value: jax.Array) -> Any:
        if is_weight(spec):
            return quant.quantize(value, spec.format)
        return nx.round_to(value, spec.dtype)

    return over_specs(one, cfg, masters, part=part)


def save(masters: Params, folder: pathlib.Path) -> None:
    """Write the masters as bfloat16, in two files of about the same size."""
    leaves = parameters.by_path(masters)
    files: tuple[dict, dict] = ({}, {})
    sizes = [0, 0]
    for path, leaf in sorted(leaves.items(), key=lambda item: -item[1].size):
        least = sizes.index(min(sizes))
        files[least][path] = np.asarray(leaf.astype(jnp.bfloat16)).view(np.uint16)
        sizes[least] += leaf.size
    for number, content in enumerate(files):
        np.savez(folder / f"masters-{number}.npz", **content)


def saved(folder: pathlib.Path) -> bool:
    """Whether `folder` holds masters that `load` can read."""
    return (folder / "masters-0.npz").is_file()


def load(folder: pathlib.Path, cfg: ModelConfig) -> Params:
    """Masters that `save` wrote, as float32."""
    content: dict[str, np.ndarray] = {}
    for number in range(2):
        content.update(np.load(folder / f"masters-{number}.npz"))

    def one(path: str, spec: Any) -> jax.Array:
        return jnp.asarray(content[path].view(jnp.bfloat16).astype(np.float32))

    return over_specs(one, cfg)
