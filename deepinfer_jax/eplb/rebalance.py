"""The two published policies: from loads to a placement, without a look at the present one.

`rebalance` takes one load per expert, within nodes or globally; `rebalance_window` minimises the
sum over recorded steps of the busiest device (docs/eplb.md 3). Both are exact in their ties: the
lower index first. Legend: S steps, L layers, E experts, P slots, G devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_jax.eplb.loads import check_counts
from deepinfer_jax.eplb.placement import Placement, check_at_least, check_slots, make_placement

_TIE = 1e-4  # tokens per expert id that make equal loads unequal, as the published engine has it


def rebalance(
    weights: Any, slots: int, devices: int, *, groups: int = 1, nodes: int = 1
) -> Placement:
    """The published placement for loads `weights` [L, E], finite and not negative.

    Hierarchical where `nodes` divides `groups`: groups of experts are packed to nodes, experts
    replicated inside their node, replicas packed to its devices. Otherwise global, as the published
    rule has it: as if there were one node and one group.

    Raises ValueError where groups do not divide E, nodes the devices, or devices the slots.
    """
    loads = np.asarray(weights, np.float64)
    if loads.ndim != 2 or not loads.size:
        raise ValueError(f"weights must have shape [layers, experts], got {list(loads.shape)}")
    if not (np.isfinite(loads) & (loads >= 0)).all():
        raise ValueError("weights must be finite and not negative: they are loads, not logits")
    experts = loads.shape[1]
    check_slots(slots, experts, devices)
    for name, parts, whole, size in (
        ("groups", groups, "experts", experts),
        ("nodes", nodes, "devices", devices),
    ):
        check_at_least(name, parts, 1)
        if size % parts:
            raise ValueError(f"{name} must divide {whole}={size}, got {parts}")
    if groups % nodes:
        groups = nodes = 1
    rows = [_layer(row, slots, devices, groups, nodes) for row in loads]
    return make_placement(np.stack(rows), experts, devices)


def _layer(weights: np.ndarray, slots: int, devices: int, groups: int, nodes: int) -> np.ndarray:
    """`rebalance` of one layer: weights [E] -> experts in slots [P]."""
    members = np.arange(len(weights)).reshape(groups, -1)
    node_of, place = _pack(np.sum(weights[members], axis=1), nodes)
    parts = []
    for node in range(nodes):
        inside = np.flatnonzero(node_of == node)
        experts = members[inside[np.argsort(place[inside])]].ravel()
        local, count = _replicate(weights[experts], slots // nodes)
        device, spot = _pack((weights[experts] / count)[local], devices // nodes)
        part = np.empty(slots // nodes, np.int64)
        part[device * (slots // devices) + spot] = experts[local]
        parts.append(part)
    return np.concatenate(parts)


def _pack(weights: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """(pack, place inside it) of each item: heaviest first, each to the lightest pack with room."""
    size = len(weights) // packs
    if size == 1:
        return np.arange(packs), np.zeros(packs, np.int64)
    pack, place = np.empty(len(weights), np.int64), np.empty(len(weights), np.int64)
    load, filled = np.zeros(packs), np.zeros(packs, np.int64)
    for item in np.argsort(-weights, kind="stable"):
        to = int(np.argmin(np.where(filled < size, load, np.inf)))
        pack[item], place[item] = to, filled[to]
        load[to] += weights[item]
        filled[to] += 1
    return pack, place


def _replicate(weights: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """(expert of each replica [slots], replicas of each): the heaviest per replica gains one."""
    count = np.ones(len(weights), np.int64)
    replicas = list(range(len(weights)))
    while len(replicas) < slots:
        heaviest = int(np.argmax(weights / count))
        replicas.append(heaviest)
        count[heaviest] += 1
    return np.array(replicas), count


def rebalance_window(counts: Any, slots: int, devices: int) -> Placement:
    """The placement that the published engine moves to after steps with counts [S, L, E].

    Greedy twice, for the sum over steps of the busiest: experts get replicas, replicas get devices.
    Every step counts by itself, so experts that are busy at different times may share a device.
    """
    given = check_counts("counts", counts, 3)
    experts = given.shape[2]
    check_slots(slots, experts, devices)
    rows = [_window_layer(given[:, layer], slots, devices) for layer in range(given.shape[1])]
    return make_placement(np.stack(rows), experts, devices)


def _window_layer(tokens: np.ndarray, slots: int, devices: int) -> np.ndarray:
    """`rebalance_window` of one layer: tokens [S, E] -> experts in slots [P]."""
    replicas, count = _replicate_window(tokens, slots)
    load = (tokens / count)[:, replicas]  # [S, P]
    size = slots // devices
    if size == 1:
        return replicas
    ranks, filled = np.zeros((len(tokens), devices)), np.zeros(devices, np.int64)
    peak = np.zeros(len(tokens))
    table = np.empty((devices, size), np.int64)
    for item in np.argsort(-np.sum(load, axis=0), kind="stable"):
        with_it = np.maximum(peak[:, None], ranks + load[:, item, None])
        cost = np.where(filled < size, np.sum(with_it, axis=0), np.inf)
        to = int(np.argmin(cost))
        table[to, filled[to]] = replicas[item]
        filled[to] += 1
        ranks[:, to] += load[:, item]
        peak = np.maximum(peak, ranks[:, to])
    return table.ravel()


def _replicate_window(tokens: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """`_replicate` for the sum over steps [S, E] of the largest load per replica.

    Another replica helps in the steps where its expert is the busiest, down to the second busiest.
    """
    steps, experts = tokens.shape
    raised = tokens + _TIE * np.arange(experts)
    count = np.ones(experts, np.int64)
    replicas, step = list(range(experts)), np.arange(steps)
    while len(replicas) < slots:
        load = raised / count
        busiest = np.argmax(load, axis=1)
        peak = load[step, busiest]
        load[step, busiest] = (raised / (count + 1))[step, busiest]
        eased = load.max(axis=1)
        gain = np.bincount(busiest, weights=peak - eased, minlength=experts)
        best = int(np.argmax(gain))
        replicas.append(best)
        count[best] += 1
    return np.array(replicas), count
