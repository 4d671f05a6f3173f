"""The same placement under other names: as many replicas as possible stay where they are.

Which devices share a layer's experts decides its balance; which of these sets lies on which device,
and in which slots, decides nothing. The published shuffle leaves that to chance and keeps almost
nothing; here it is an assignment problem, solved exactly (docs/eplb.md 4).
"""

from __future__ import annotations

import numpy as np

from deepinfer_jax.eplb.placement import Placement, check_at_least, make_placement
from deepinfer_jax.eplb.transfers import by_device, check_same


def relabel(old: Placement, new: Placement, *, nodes: int = 1) -> Placement:
    """`new` with devices and slots renamed so that the most slots keep the expert of `old`.

    Loads of devices are those of `new`, in another order. With `nodes` above 1, devices are renamed
    inside nodes and nodes among each other, so that what shared a node still does.

    Raises ValueError for placements of different sizes, or nodes that do not divide the devices.
    """
    check_same(old, new)
    check_nodes(nodes, new.devices)
    rows = [
        relabel_layer(before, after, new.experts, nodes)
        for before, after in zip(by_device(old), by_device(new), strict=True)
    ]
    table = np.stack(rows).reshape(new.layers, new.slots)
    return make_placement(table, new.experts, new.devices)


def relabel_layer(old: np.ndarray, new: np.ndarray, experts: int, nodes: int) -> np.ndarray:
    """`relabel` of one layer: experts of devices, [G, P / G] each."""
    taken = _assignment(_overlap(held(old, experts), held(new, experts)), nodes)
    return np.stack([_in_place(before, new[g]) for before, g in zip(old, taken, strict=True)])


def held(table: np.ndarray, experts: int) -> np.ndarray:
    """[G, E] int64: replicas of each expert on each device, from experts of devices [G, P / G]."""
    return np.stack([np.bincount(row, minlength=experts) for row in table])


def check_nodes(nodes: int, devices: int) -> None:
    """Raise a ValueError unless `nodes` divides `devices`."""
    check_at_least("nodes", nodes, 1)
    if devices % nodes:
        raise ValueError(f"nodes must divide devices={devices}, got {nodes}")


def _overlap(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """[G, G] int64: slots of old device i that keep their expert if it becomes new device j."""
    return np.stack([np.sum(np.minimum(row, new), axis=1) for row in old])


def _assignment(overlap: np.ndarray, nodes: int) -> np.ndarray:
    """[G]: which new device each old one becomes, for the largest sum of `overlap`."""
    # Loading scipy.optimize takes a second, and who only runs the model needs none of it.
    from scipy.optimize import linear_sum_assignment

    size = len(overlap) // nodes
    blocks = overlap.reshape(nodes, size, nodes, size).transpose(0, 2, 1, 3)
    inner = np.empty((nodes, nodes, size), np.int64)
    value = np.empty((nodes, nodes), np.int64)
    for pair in np.ndindex(nodes, nodes):
        rows, inner[pair] = linear_sum_assignment(blocks[pair], maximize=True)
        value[pair] = np.sum(blocks[pair][rows, inner[pair]])
    outer = linear_sum_assignment(value, maximize=True)[1]
    return np.concatenate([to * size + inner[node, to] for node, to in enumerate(outer)])


def _in_place(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The experts `new` [P / G] of a device in an order that keeps those that `old` has."""
    left = list(new)
    out = np.full(len(new), -1, np.int64)
    for slot, expert in enumerate(old):
        if expert in left:
            left.remove(expert)
            out[slot] = expert
    out[out < 0] = left
    return out
