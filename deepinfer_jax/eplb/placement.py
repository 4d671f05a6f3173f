"""Which physical slot holds which expert: a value that a jitted step takes as an argument.

Legend: L layers, E logical experts (the model's), P physical slots, G devices. Slot s lives on
device s // (P / G). The replicas of an expert hold the same weights (docs/eplb.md 1).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

Array = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Experts in slots. Build and validate with `make_placement`.

    Every shape is a function of L, E and P alone, so programs outlive any rearrangement. `order`
    and `first` are the table of replicas without padding: those of expert e in layer l are
    order[l, first[l, e] : first[l, e] + count[l, e]], ascending.

    Attributes:
      physical_to_logical: [L, P] int32, the expert in each slot.
      count: [L, E] int32, replicas of each expert, at least 1.
      first: [L, E] int32, where the expert's replicas begin in `order`.
      order: [L, P] int32, slots by expert, then by number.
      devices: G, static.
    """

    physical_to_logical: Array
    count: Array
    first: Array
    order: Array
    devices: int = dataclasses.field(metadata={"static": True})

    @property
    def layers(self) -> int:
        """L."""
        return self.physical_to_logical.shape[0]

    @property
    def slots(self) -> int:
        """P."""
        return self.physical_to_logical.shape[1]

    @property
    def experts(self) -> int:
        """E."""
        return self.count.shape[1]

    @property
    def slots_per_device(self) -> int:
        """P / G."""
        return self.slots // self.devices


@dataclasses.dataclass(frozen=True, slots=True)
class Redundancy:
    """Slots beyond one per expert.

    extra: replicas to add. slots: experts and extra. slots_per_device: equal on all devices.
    """

    extra: int
    slots: int
    slots_per_device: int


def redundancy(experts: int, devices: int, least: int = 0) -> Redundancy:
    """The fewest extra replicas, `least` or more, with which every device has as many slots.

    Backbone and draft layers have their own numbers of experts: ask for each.
    """
    check_at_least("experts", experts, 1)
    check_at_least("devices", devices, 1)
    check_at_least("least", least, 0)
    extra = least + -(experts + least) % devices
    return Redundancy(extra, experts + extra, (experts + extra) // devices)


def make_placement(physical_to_logical: Any, experts: int, devices: int) -> Placement:
    """A validated `Placement`, as NumPy arrays (no device is touched).

    Args:
      physical_to_logical: [L, P] integers in [0, experts), the expert in each slot.
      experts: E; each must be in some slot of every layer.
      devices: G; must divide P.

    Raises:
      ValueError: a wrong shape, an id that is no expert, an expert without a slot; names the layer.
      TypeError: ids that are not integers.
    """
    check_at_least("experts", experts, 1)
    table = np.asarray(physical_to_logical)
    if table.ndim != 2 or not table.size:
        raise ValueError(
            "physical_to_logical must have shape [layers, slots], both at least 1, got "
            f"{table.shape}; give one layer as [1, slots]"
        )
    if table.dtype.kind not in "iu":
        raise TypeError(f"physical_to_logical must hold integers (expert ids), got {table.dtype}")
    check_slots(table.shape[1], experts, devices)
    wrong = (table < 0) | (table >= experts)
    if wrong.any():
        layer, slot = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"physical_to_logical must lie in [0, {experts}), got {table[layer, slot]} in slot "
            f"{slot} of layer {layer}; every slot holds an expert, there are no empty ones"
        )
    table = table.astype(np.int32)
    count = np.stack([np.bincount(row, minlength=experts) for row in table])
    if not count.all():
        layer, expert = (int(i) for i in np.argwhere(count == 0)[0])
        raise ValueError(
            f"every expert needs a slot, expert {expert} has none in layer {layer}; "
            f"{table.shape[1]} slots hold {np.count_nonzero(count[layer])} of {experts} experts"
        )
    first = np.cumsum(count, axis=1) - count
    order = np.argsort(table, axis=1, kind="stable")
    return Placement(
        table, count.astype(np.int32), first.astype(np.int32), order.astype(np.int32), devices
    )


def initial_placement(layers: int, experts: int, slots: int, devices: int) -> Placement:
    """Experts in order, then further replicas of experts 0, 1, 2, ... in the slots left over."""
    check_at_least("layers", layers, 1)
    check_slots(slots, experts, devices)
    row = np.arange(slots, dtype=np.int32) % np.int32(experts)
    return make_placement(np.broadcast_to(row, (layers, slots)), experts, devices)


def logical_to_physical(placement: Placement, width: int | None = None) -> np.ndarray:
    """[L, E, width] int32: the slots of each expert, ascending, -1 behind the last.

    width: at least the largest number of replicas; None takes P - E + 1, the most there can be.
    """
    width = placement.slots - placement.experts + 1 if width is None else width
    count, order = np.asarray(placement.count), np.asarray(placement.order)
    check_at_least("width", width, int(count.max()))
    replica = np.arange(width, dtype=np.int32)[None, None, :]
    place = np.minimum(np.asarray(placement.first)[..., None] + replica, placement.slots - 1)
    taken = np.take_along_axis(order[:, None, :], place, axis=2)
    return np.where(replica < count[..., None], taken, np.int32(-1))


def check_slots(slots: int, experts: int, devices: int) -> None:
    """Raise a ValueError unless `devices` share `slots` evenly and every expert finds one."""
    check_at_least("experts", experts, 1)
    check_at_least("devices", devices, 1)
    if slots < experts or slots % devices:
        fits = redundancy(experts, devices, max(0, slots - experts)).slots
        raise ValueError(
            f"slots must be a multiple of devices={devices} and at least experts={experts}, got "
            f"{slots}; the next that fits is {fits} (`redundancy` finds it)"
        )


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
