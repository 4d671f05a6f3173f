"""Placing all replicas anew, where they already are as far as balance lets them (docs/eplb.md 5).

On the host, from the loads of a whole window. Legend: E experts, P slots, G devices.
"""

from __future__ import annotations

import numpy as np

from deepinfer_jax.eplb.relabel import held


def replica_counts(tokens: np.ndarray, slots: int, devices: int) -> np.ndarray:
    """[E] int64: each further replica to the expert with the heaviest, up to one per device.

    tokens [E] int64. No other numbers make the heaviest replica lighter. Equal ones: the lower id.
    """
    count = np.ones(len(tokens), np.int64)
    for _ in range(slots - len(tokens)):
        weight = np.where(count < devices, tokens / count, -1.0)
        count[int(np.argmax(weight))] += 1
    return count


def repack_layer(old: np.ndarray, tokens: np.ndarray, target: float) -> np.ndarray:
    """Experts of devices [G, P / G] for `tokens` [E], from those that the devices have in `old`.

    Heaviest replicas first. One stays on the lightest device that has its expert and stays within
    `target` times the mean load with it; where there is none it goes to the lightest of all. Two
    replicas of an expert share a device only where no other has room.
    """
    devices, size = old.shape
    count = replica_counts(tokens, old.size, devices)
    share = tokens / count
    limit = target * int(np.sum(tokens)) / devices
    before, now = held(old, len(tokens)) > 0, np.zeros((devices, len(tokens)), bool)
    load, filled = np.zeros(devices), np.zeros(devices, np.int64)
    table = np.empty_like(old)
    items = np.repeat(np.arange(len(tokens)), count)
    for expert in items[np.argsort(-share[items], kind="stable")].tolist():
        free = (filled < size) & ~now[:, expert]
        stays = free & before[:, expert] & (load + share[expert] <= limit)
        for choice in (stays, free, filled < size):
            if choice.any():
                break
        device = int(np.argmin(np.where(choice, load, np.inf)))
        table[device, filled[device]] = expert
        now[device, expert] = True
        load[device] += share[expert]
        filled[device] += 1
    return table
