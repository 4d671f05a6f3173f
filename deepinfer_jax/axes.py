"""Logical axis names and the rules that lay them out on a device mesh.

A `Spec` names each of its dimensions ("expert", "vocab", ...); `Rules` says which mesh axis, if
any, a name is split over. Only the two together give a sharding, so the model knows no meshes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None
# The axes that meshes of this package have: sequences, rows of one sequence, experts, and columns
# of matrices, over which nothing is split as released: their partial sums would add up in another
# order on another number of devices.
MESH_AXES = DATA, CONTEXT, EXPERT, TENSOR = "data", "context", "expert", "tensor"
LOGICAL = frozenset(
    # of parameters
    "confidence_in draft_layer embed engram_in engram_rows expert expert_mlp group_in heads index "
    "index_heads index_source kv kv_source layer markov mix o_rank q_rank router stream "
    "stream_embed taps vision vision_layer vocab "
    # of caches and of what a call is given
    "entry page slot".split()
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array that is no parameter, such as one of the cache: `shape`, `dtype`, one logical axis
    name per dimension, and `template`, its name in errors.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    template: str


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axis (or several, or None); names that are not listed are not split.

    padded: logical axes whose dimensions may get unused entries at their end where they cannot be
    split evenly. For dimensions that are looked up by number only, such as the rows of tables.
    """

    table: tuple[tuple[str, MeshAxes], ...] = ()
    padded: tuple[str, ...] = ()

    @classmethod
    def of(cls, **table: MeshAxes) -> Rules:
        """`Rules.of(expert="model", vocab=("data", "model"))`, independent of the order given."""
        return cls(tuple(sorted(table.items())))

    def __post_init__(self) -> None:
        names = [name for name, _ in self.table]
        unknown = sorted({*names, *self.padded} - LOGICAL)
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


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of the named sizes without devices, for shapes and bytes."""
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def padded_shape(spec: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> tuple[int, ...]:
    """The leaf's shape with dimensions named in `rules.padded` made divisible by their parts."""

    def one(size: int, axis: str | None) -> int:
        parts = math.prod(mesh.shape.get(name, 1) for name in rules.mesh_axes(axis))
        return size + -size % parts if axis in rules.padded else size

    return tuple(one(size, axis) for size, axis in zip(spec.shape, spec.axes, strict=True))


def shard_shape(spec: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> tuple[int, ...]:
    """What one device holds of the leaf; raises as `sharding_of`."""
    return sharding_of(spec, mesh, rules).shard_shape(padded_shape(spec, mesh, rules))


def sharding_of(spec: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> NamedSharding:
    """Layout of one leaf.

    Args:
      spec: a `params.Spec`, a `Leaf`, or anything with `shape`, `axes` and `template` (its name).
      mesh: the devices, or only their numbers (`abstract_mesh`).
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
    whole = padded_shape(spec, mesh, rules)
    for size, axis, names in zip(whole, spec.axes, placed, strict=True):
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            raise ValueError(
                f"{spec.template}: dimension {axis!r} of size {size} is not divisible by the "
                f"{parts} parts of mesh axes {names}; change the rule for {axis!r} or the mesh"
            )
    entries = (names[0] if len(names) == 1 else (names or None) for names in placed)
    return NamedSharding(mesh, partition(entries))


def partition(entries: Iterable[Any]) -> PartitionSpec:
    """A `PartitionSpec` without None at its end, as JAX writes those of what programs return:
    another form of the same would compile them anew.
    """
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def shardings(tree: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> Any:
    """`sharding_of` every leaf of a tree of them, such as `params.abstract(cfg)`."""
    return jax.tree.map(lambda spec: sharding_of(spec, mesh, rules), tree)


def padded(tree: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> Any:
    """A tree of `Spec` or `Leaf` with shapes that the mesh divides, where `rules.padded` allows."""
    return jax.tree.map(
        lambda spec: dataclasses.replace(spec, shape=padded_shape(spec, mesh, rules)), tree
    )
