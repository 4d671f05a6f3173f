"""Layouts: a mesh, rules for it, and where the Engram tables are (`configs/meshes`)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, get_args

from deepinfer_jax import axes, cache, params, resources, strict_json
from deepinfer_jax.axes import CONTEXT, DATA, EXPERT, MESH_AXES, TENSOR, Rules
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics

Place = Literal["device", "host"]
_MOST = 2**31 - 1  # devices that JAX can number
_SPARED = "engram.embed"  # in the names of the tables' leaves


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies on devices.

    mesh: (axis, devices along it) for each of `axes.MESH_AXES`; rules: what is split over them;
    engram: whether the tables are in the devices' memory or in that of their hosts.
    """

    name: str
    mesh: tuple[tuple[str, int], ...]
    rules: Rules
    engram: Place = "device"
    about: str = ""
    hardware: str = ""

    def __post_init__(self) -> None:
        names = tuple(name for name, _ in self.mesh)
        if names != MESH_AXES:
            raise ValueError(f"{self.name}: mesh must have the axes {MESH_AXES}, got {names}")
        for name, size in self.mesh:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{self.name}: mesh.{name} must be at least 1, got {size!r}")
        if self.devices > _MOST:
            raise ValueError(
                f"{self.name}: a mesh has at most {_MOST} devices, got {self.devices}: {self.mesh}"
            )
        if self.size(TENSOR) != 1:
            raise ValueError(
                f"{self.name}: mesh.{TENSOR} must be 1, got {self.size(TENSOR)}: products cut over "
                "devices would add up in another order, and no bit would be that of one device"
            )
        if self.engram not in get_args(Place):
            raise ValueError(f"{self.name}: engram must be device or host, got {self.engram!r}")
        shared = self.rules.mesh_axes("entry")
        if shared not in ((), (CONTEXT,)) or set(shared) & set(self.rules.mesh_axes("slot")):
            raise ValueError(
                f"{self.name}: rules must split entry over {CONTEXT!r}, and slot over other axes, "
                f"or not at all, got {shared}: global KV is shared by devices with the same "
                "sequences (docs/parallel.md 5)"
            )
        strange = {a for n, _ in self.rules.table for a in self.rules.mesh_axes(n)} - set(names)
        if strange:
            raise ValueError(f"{self.name}: rules name mesh axes {sorted(strange)}, not {names}")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.mesh)

    def size(self, axis: str) -> int:
        """Devices along a mesh axis."""
        return dict(self.mesh)[axis]

    @property
    def ranks(self) -> int:
        """Devices that share the global KV of their sequences, and the rows."""
        return self.parts("entry")

    def parts(self, logical: str) -> int:
        """Into how many parts a logical axis is cut."""
        return math.prod(self.size(name) for name in self.rules.mesh_axes(logical))

    def check(self, cfg: ModelConfig) -> None:
        """Refuse a layout that cannot hold the model; the ValueError names the leaf."""
        mesh = axes.abstract_mesh(dict(self.mesh))
        for spec in params.specs(cfg):
            if not self.off_device(spec):
                axes.sharding_of(spec, mesh, self.rules)
        slots = self.parts("slot")
        page = math.lcm(*cfg.ratios) * self.ranks if cfg.ratios else 1
        shapes = cache.cache_shapes(
            cfg, Numerics(rows="pallas"), slots, page, paging=cache.Paging(page, slots),
            ranks=self.ranks,
        )  # fmt: skip
        cache.cache_shardings(shapes, mesh, self.rules)

    def off_device(self, spec: Any) -> bool:
        """Whether a parameter stays in the memory of the host."""
        return self.engram == "host" and _SPARED in spec.template


def over_experts(devices: int, name: str = "", *, whole_head: bool = False) -> Layout:
    """The usual layout of so many devices: sequences, experts, vocabulary and Engram over all; with
    `whole_head` embedding and head are whole on each.
    """
    every = (DATA, CONTEXT, EXPERT)
    split = {"expert": EXPERT, "engram_rows": EXPERT, "slot": every, "page": every}
    split["vocab"] = None if whole_head else EXPERT
    rules = dataclasses.replace(Rules.of(**split), padded=("engram_rows",))
    mesh = ((DATA, 1), (CONTEXT, 1), (EXPERT, devices), (TENSOR, 1))
    return Layout(name or f"{devices} devices", mesh, rules)


def layout_names() -> tuple[str, ...]:
    """Names that `load_layout` knows, sorted."""
    return resources.table_names("meshes")


def load_layout(name: str | Path) -> Layout:
    """A layout of `layout_names()`, or of a JSON file of the same form.

    Raises ValueError for an unknown name and for a file that is no layout.
    """
    path = resources.table_file("meshes", "layout", name)
    data = strict_json.read_object(path, "see those in configs/meshes")
    wanted = {"about", "hardware", "mesh", "rules", "padded", "engram"}
    if set(data) != wanted:
        raise ValueError(
            f"{path}: keys must be {', '.join(sorted(wanted))}, got {', '.join(sorted(data))}"
        )
    for key in ("mesh", "rules"):
        if not isinstance(data[key], dict):
            raise ValueError(f"{path}: {key} must be an object, got {data[key]!r}")
    try:
        rules = Rules.of(**{k: _axes(f"rules.{k}", v) for k, v in data["rules"].items()})
        return Layout(
            name=path.stem,
            mesh=tuple(data["mesh"].items()),
            rules=dataclasses.replace(rules, padded=_names("padded", data["padded"])),
            engram=data["engram"],
            about=data["about"],
            hardware=data["hardware"],
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _axes(key: str, value: Any) -> Any:
    """A rule: one mesh axis, several or none."""
    return value if value is None or isinstance(value, str) else _names(key, value)


def _names(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{key} must be names of axes, got {value!r}")
    return tuple(value)
