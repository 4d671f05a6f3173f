"""Data and expert parallelism: the transitions over a mesh, with the bits of one device.

Sequences are split over all devices of the mesh, experts over its axis "expert" (`layout`), all
else is on every device. Devices along an axis "context" have the same sequences and share their
global KV and the work on their rows, but not that of the drafter and of the head. A row's sums all
happen on one device, in the order that they have alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from deepinfer_jax import layout, rl, steps
from deepinfer_jax.axes import CONTEXT, Rules
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.mirror import Split
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.params import Params
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.steps import Scores
from deepinfer_jax.tables import Tables


def data_expert_mesh(data: int, expert: int, cfg: ModelConfig, devices: Any = None) -> Mesh:
    """A mesh of data * expert devices; ValueError where the experts cannot be split evenly.

    Experts on slots (`layout.on_slots`) always can: `layout.device_mesh` makes a mesh for them.
    """
    for name, count in (
        ("n_routed_experts", cfg.n_routed_experts),
        ("dspark_n_routed_experts", cfg.dspark_n_routed_experts),
    ):
        drafter = name.startswith("dspark")
        if (cfg.num_nextn_predict_layers or not drafter) and expert > 0 and count % expert:
            raise ValueError(
                f"{name}={count} is not divisible by expert={expert}: choose a divisor of it"
            )
    return layout.device_mesh(data, expert, devices)


def score(
    params: Params, tables: Tables, tokens: jax.Array, lengths: jax.Array, cfg: ModelConfig,
    numerics: Numerics, mesh: Mesh, *, sampling: Sampling | None = None, remat: bool = False,
    top: int = 0, image: jax.Array | None = None, embeddings: jax.Array | None = None,
    rules: Rules = layout.EXPERTS,
) -> Scores:  # fmt: skip
    """`steps.score` with the B sequences split over the mesh; B must be a multiple of its size, not
    counting an axis "context". `rules`: how the parameters lie. Without `capture`, which sees the
    rows of one device.
    """
    every = _spread(tokens.shape[0], mesh)
    split, shared = PartitionSpec(every), _shared(tokens, mesh, every)

    def own(
        params: Params, tables: Tables, tokens: Any, lengths: Any, sampling: Any, shown: Any
    ) -> Scores:
        return steps.score(
            params, tables, tokens, lengths, cfg, numerics, sampling=sampling, remat=remat, top=top,
            image=shown[0], embeddings=shown[1], split=shared,
        )  # fmt: skip

    given = (PartitionSpec(), split, split, split, split)
    made = _like(Scores, split, routed=PartitionSpec(None, every))
    return layout.over(own, params, cfg, mesh, rules, given, made)(
        params, tables, tokens, lengths, sampling, (image, embeddings)
    )


def rollout(
    params: Params, tables: Tables, prompts: jax.Array, lengths: jax.Array, sampling: Sampling,
    stops: jax.Array, cfg: ModelConfig, numerics: Numerics, mesh: Mesh, *, new: int, size: int = 0,
    routed: bool = False, scheduled: jax.Array | None = None, limits: jax.Array | None = None,
    rules: Rules = layout.EXPERTS,
) -> rl.Rollout:  # fmt: skip
    """`rl.rollout` with the B prompts split over the mesh, and with them `sampling`, `limits`, the
    columns of `scheduled` and the rows of `stops` [B, K]; B must be a multiple of its size, not
    counting an axis "context".
    """
    every = _spread(prompts.shape[0], mesh)
    split, columns = PartitionSpec(every), PartitionSpec(None, every)
    ends = split if stops.ndim == 2 else PartitionSpec()
    shared = _shared(prompts, mesh, every)

    def own(
        params: Params, tables: Tables, prompts: Any, lengths: Any, sampling: Any, stops: Any,
        scheduled: Any, limits: Any,
    ) -> rl.Rollout:  # fmt: skip
        return rl.rollout(
            params, tables, prompts, lengths, sampling, stops, cfg, numerics, new=new, size=size,
            scheduled=scheduled, together=every, limits=limits, routed=routed, split=shared,
        )  # fmt: skip

    given = (PartitionSpec(), split, split, split, ends, columns, split)
    made = _like(rl.Rollout, split, rounds=PartitionSpec(), routed=columns)
    return layout.over(own, params, cfg, mesh, rules, given, made)(
        params, tables, prompts, lengths, sampling, stops, scheduled, limits
    )


def _like(kind: Any, every: PartitionSpec, **others: PartitionSpec) -> Any:
    """A value of the dataclass `kind` that says how its fields are split."""
    return kind(**{field.name: others.get(field.name, every) for field in dataclasses.fields(kind)})


def _spread(count: int, mesh: Mesh) -> tuple[str, ...]:
    """The axes that `count` sequences are split over."""
    every = tuple(name for name in mesh.axis_names if name != CONTEXT)
    devices = math.prod(mesh.shape[name] for name in every)
    if count % devices:
        raise ValueError(
            f"{count} sequences cannot be split over {devices} devices: pad to a multiple"
        )
    return every


def _shared(tokens: jax.Array, mesh: Mesh, every: tuple[str, ...]) -> Split | None:
    """How the rows of a device's share of tokens [B, S] are split over the axis "context"."""
    if CONTEXT not in mesh.axis_names:
        return None
    own = tokens.shape[0] // math.prod(mesh.shape[name] for name in every)
    return Split(CONTEXT, mesh.shape[CONTEXT], (tokens.shape[1],) * own)
