"""Logical axis names and the rules that lay them out on a device mesh.

A `Spec` names each of its dimensions ("expert", "vocab", ...); `Rules` says which mesh axis, if
any, a name is split over. Only the two together give a sharding, so the model knows no meshes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None
LOGICAL = frozenset(
    "confidence_in draft_layer embed engram_in engram_rows expert expert_mlp group_in heads index "
    "index_heads index_source kv kv_source layer markov mix o_rank q_rank stream stream_embed taps "
    "vision vision_layer vocab".split()
)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axis (or several, or None); names that are not listed are not split."""

    table: tuple[tuple[str, MeshAxes], ...] = ()

    @classmethod
    def of(cls, **table: MeshAxes) -> Rules:
        """`Rules.of(expert="model", vocab=("data", "model"))`, independent of the order given."""
        return cls(tuple(sorted(table.items())))

    def __post_init__(self) -> None:
        names = [name for name, _ in self.table]
        unknown = sorted(set(names) - LOGICAL)
        if unknown:
            raise ValueError(
                f"unknown logical axes {', '.join(unknown)}; known: {', '.join(sorted(LOGICAL))}"
            )
        if len(set(names)) != len(names):
            raise ValueError(f"each logical axis may have one rule, got {self.table}")

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Mesh axes that the logical axis is split over, outermost first; empty when it is not."""
        rule = dict(self.table).get(axis) if axis is not None else None
        return (rule,) if isinstance(rule, str) else tuple(rule or ())


def make_mesh(sizes: Mapping[str, int], devices: Any = None) -> Mesh:
    """A mesh of the named sizes whose axes the compiler may choose freely (`Auto`).

    Args:
      sizes: mesh axis -> number of devices along it, outermost first.
      devices: the devices to use; default all of this program.

    Raises ValueError when there are not as many devices as the sizes ask for.
    """
    devices = jax.devices() if devices is None else list(devices)
    wanted = math.prod(sizes.values())
    if wanted != len(devices):
        raise ValueError(
            f"a mesh {dict(sizes)} needs {wanted} devices, got {len(devices)}; change the sizes or "
            "pass as many devices"
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=devices)


def sharding_of(spec: Any, mesh: Mesh, rules: Rules) -> NamedSharding:
    """Layout of one leaf.

    Args:
      spec: a `params.Spec`, or anything with `shape`, `axes` and `template` (the name in errors).
      mesh: the devices.
      rules: logical -> mesh axes.

    Raises:
      ValueError: a rule names an axis that the mesh lacks, two dimensions of the leaf fall on one
        mesh axis, or a dimension is not divisible; names the leaf, the dimension and the sizes.
    """
    placed = tuple(rules.mesh_axes(axis) for axis in spec.axes)
    used = [name for names in placed for name in names]
    absent = sorted(set(used) - set(mesh.axis_names))
    if absent:
        raise ValueError(f"rules use mesh axes {absent}, the mesh has {list(mesh.axis_names)}")
    if len(set(used)) != len(used):
        raise ValueError(
            f"{spec.template}: axes {spec.axes} put two dimensions on one mesh axis: {placed}"
        )
    for size, axis, names in zip(spec.shape, spec.axes, placed, strict=True):
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            raise ValueError(
                f"{spec.template}: dimension {axis!r} of size {size} is not divisible by the "
                f"{parts} parts of mesh axes {names}; change the rule for {axis!r} or the mesh"
            )
    entries = (names[0] if len(names) == 1 else (names or None) for names in placed)
    return NamedSharding(mesh, PartitionSpec(*entries))
