"""Data and expert parallelism: the transitions over a mesh, with the bits of one device.

Sequences are split over all devices of the mesh, experts over its axis "expert", everything else is
on every device. A row's sums all happen on its own device, in the order of one device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax import rl, steps
from deepinfer_jax.axes import make_mesh
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.exchange import AXIS
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.params import Params
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.steps import Scores
from deepinfer_jax.tables import Tables

DATA = "data"


def data_expert_mesh(data: int, expert: int, cfg: ModelConfig, devices: Any = None) -> Mesh:
    """A mesh of data * expert devices; ValueError where the experts cannot be split evenly."""
    if data < 1 or expert < 1:
        raise ValueError(f"data and expert must be at least 1, got data={data}, expert={expert}")
    counts = {"n_routed_experts": cfg.n_routed_experts}
    if cfg.num_nextn_predict_layers:
        counts["dspark_n_routed_experts"] = cfg.dspark_n_routed_experts
    for name, count in counts.items():
        if count % expert:
            raise ValueError(
                f"{name}={count} is not divisible by expert={expert}: choose a divisor of it"
            )
    return make_mesh({DATA: data, AXIS: expert}, devices)


def param_specs(params: Params) -> Params:
    """How each leaf is split: expert stacks [layers, E, ...] over the experts, others not."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        inside = "experts" in jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        return PartitionSpec(None, AXIS) if inside else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)


def place(params: Params, mesh: Mesh) -> Params:
    """The parameters laid out on the mesh."""
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
        params,
        param_specs(params),
    )


def score(
    params: Params, tables: Tables, tokens: jax.Array, lengths: jax.Array, cfg: ModelConfig,
    numerics: Numerics, mesh: Mesh, *, sampling: Sampling | None = None, remat: bool = False,
    top: int = 0,
) -> Scores:  # fmt: skip
    """`steps.score` with the B sequences split over the mesh; B must be a multiple of its size."""
    _check_batch(tokens.shape[0], mesh)
    every = tuple(mesh.axis_names)
    split = PartitionSpec(every)

    def own(params: Params, tables: Tables, tokens: Any, lengths: Any, sampling: Any) -> Scores:
        return steps.score(
            params, tables, tokens, lengths, cfg, numerics, sampling=sampling, remat=remat, top=top
        )

    return jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(param_specs(params), PartitionSpec(), split, split, split),
        out_specs=_like(Scores, split, routed=PartitionSpec(None, every)),
        check_vma=False,
    )(params, tables, tokens, lengths, sampling)


def rollout(
    params: Params, tables: Tables, prompts: jax.Array, lengths: jax.Array, sampling: Sampling,
    stops: jax.Array, cfg: ModelConfig, numerics: Numerics, mesh: Mesh, *, new: int, size: int = 0,
    routed: bool = False,
) -> rl.Rollout:  # fmt: skip
    """`rl.rollout` with the B prompts split over the mesh; B must be a multiple of its size.

    Every round verifies all its `size` drafts.
    """
    _check_batch(prompts.shape[0], mesh)
    every = tuple(mesh.axis_names)
    split = PartitionSpec(every)
    own = functools.partial(
        rl.rollout, cfg=cfg, numerics=numerics, new=new, size=size, together=every, routed=routed
    )
    return jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(param_specs(params), PartitionSpec(), split, split, split, PartitionSpec()),
        out_specs=_like(
            rl.Rollout, split, rounds=PartitionSpec(), routed=PartitionSpec(None, every)
        ),
        check_vma=False,
    )(params, tables, prompts, lengths, sampling, stops)


def _like(kind: Any, every: PartitionSpec, **others: PartitionSpec) -> Any:
    """A value of the dataclass `kind` that says how its fields are split."""
    return kind(**{field.name: others.get(field.name, every) for field in dataclasses.fields(kind)})


def _check_batch(count: int, mesh: Mesh) -> None:
    if count % mesh.size:
        raise ValueError(
            f"{count} sequences cannot be split over {mesh.size} devices: pad to a multiple"
        )
