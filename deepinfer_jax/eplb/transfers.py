"""What has to move between two placements, and how much that is (docs/eplb.md 4).

A device that lacks an expert receives it once, from one of the devices that have it, and copies it
to its further slots. Legend: L layers, P slots, G devices.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from deepinfer_jax.eplb.placement import Placement, check_at_least


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """One layer's way from an old placement to a new one.

    kept: slots that already hold their expert.
    local: [n, 3] int64, (device, slot from, slot to) inside the device; by device, then slot from.
      A slot that receives its expert may be the source of further ones.
    remote: [n, 5] int64, (expert, device from, slot from, device to, slot to), ascending.
    sources: [P] int64, for each slot the old slot whose weights it gets: new = old[sources].
    """

    kept: int
    local: np.ndarray
    remote: np.ndarray
    sources: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Movement:
    """What a change of placement costs, all layers together.

    kept: slots that stay. local: copies inside devices. remote: experts sent between devices.
    bytes: remote times the bytes of an expert: what crosses the network.
    """

    kept: int
    local: int
    remote: int
    bytes: int


def transfers(old: Placement, new: Placement) -> tuple[Transfers, ...]:
    """The transfers of each layer, paired as the published engine pairs them.

    Of the S devices that have an expert and the R that need it, both ascending, each sender serves
    R div S receivers in a row; those left go to the senders in turn.
    """
    check_same(old, new)
    return tuple(
        transfer_layer(before, after)
        for before, after in zip(by_device(old), by_device(new), strict=True)
    )


def movement(old: Placement, new: Placement, expert_bytes: int = 1) -> Movement:
    """What `transfers` of all layers come to, for experts of `expert_bytes` bytes with scales."""
    check_at_least("expert_bytes", expert_bytes, 1)
    layers = transfers(old, new)
    remote = sum(len(layer.remote) for layer in layers)
    return Movement(
        sum(layer.kept for layer in layers),
        sum(len(layer.local) for layer in layers),
        remote,
        remote * expert_bytes,
    )


def by_device(placement: Placement) -> np.ndarray:
    """[L, G, P / G] int64: the experts of each device."""
    table = np.asarray(placement.physical_to_logical, np.int64)
    return table.reshape(placement.layers, placement.devices, -1)


def check_same(old: Placement, new: Placement) -> None:
    """Raise a ValueError unless both have the same layers, experts, slots and devices."""
    shapes = [(p.layers, p.experts, p.slots, p.devices) for p in (old, new)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "both placements must have the same (layers, experts, slots, devices), got "
            f"{shapes[0]} and {shapes[1]}; a change of slots or devices is a new start"
        )


def transfer_layer(old: np.ndarray, new: np.ndarray) -> Transfers:
    """`transfers` of one layer, from the experts of devices [G, P / G], before and after."""
    devices, size = new.shape
    sources = np.arange(new.size).reshape(new.shape)
    local: list[tuple[int, int, int]] = []
    wanted: dict[int, list[tuple[int, int]]] = {}  # expert -> (device, slot) that receive it
    spread: list[tuple[int, int, int]] = []
    for device in range(devices):
        held = {int(e): slot for slot, e in reversed(list(enumerate(old[device])))}
        received: dict[int, int] = {}
        for slot in np.flatnonzero(old[device] != new[device]).tolist():
            expert = int(new[device, slot])
            if expert in held:
                local.append((device, held[expert], slot))
                sources[device, slot] = device * size + held[expert]
            elif expert in received:
                spread.append((device, received[expert], slot))
            else:
                received[expert] = slot
                wanted.setdefault(expert, []).append((device, slot))
    remote = [pair for expert in sorted(wanted) for pair in _pairs(old, expert, wanted[expert])]
    for _, sender, source, receiver, slot in remote:
        sources[receiver, slot] = sender * size + source
    for device, source, slot in spread:
        sources[device, slot] = sources[device, source]
    return Transfers(
        int(np.count_nonzero(old == new)),
        np.array(sorted(local + spread), np.int64).reshape(-1, 3),
        np.array(sorted(remote), np.int64).reshape(-1, 5),
        sources.ravel(),
    )


def _pairs(
    old: np.ndarray, expert: int, receivers: list[tuple[int, int]]
) -> list[tuple[int, int, int, int, int]]:
    """(expert, device from, slot from, device to, slot to) for each of the receivers."""
    has = old == expert
    senders = [(int(d), int(np.argmax(has[d]))) for d in np.flatnonzero(has.any(axis=1))]
    each = len(receivers) // len(senders)
    turns = [sender for sender in senders for _ in range(each)]
    turns += senders[: len(receivers) - len(turns)]
    return [(expert, *s, *r) for s, r in zip(turns, receivers, strict=True)]
