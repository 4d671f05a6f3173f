"""How many tokens went where: counts of steps, a rolling window of them, loads of devices.

On the host. Counts are of *logical* experts, so that a window may hold steps from before and after
a rearrangement (docs/eplb.md 2). Legend: S steps, L layers, E experts, P slots, G devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepinfer_jax.eplb.placement import Placement, check_at_least


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Counts of the newest steps; make one with `make_window`, add steps with `record`.

    size: steps kept at most. shape: (L, E). steps: the counts, [L, E] int64 each, oldest first.
    """

    size: int
    shape: tuple[int, int]
    steps: tuple[np.ndarray, ...] = ()

    @property
    def counts(self) -> np.ndarray:
        """[S, L, E] int64, S the steps recorded so far, `size` at most."""
        return np.stack(self.steps) if self.steps else np.zeros((0, *self.shape), np.int64)


def make_window(size: int, layers: int, experts: int) -> Window:
    """An empty window of the newest `size` steps (100 in the published engine)."""
    for name, value in (("size", size), ("layers", layers), ("experts", experts)):
        check_at_least(name, value, 1)
    return Window(size, (layers, experts))


def record(window: Window, counts: Any) -> Window:
    """The window with one more step, without its oldest one where it was full.

    counts: [L, E] integers, tokens of the step that each expert had (`count_experts`).
    """
    step = check_counts("counts", counts, 2)
    if step.shape != window.shape:
        raise ValueError(
            f"counts must have the window's shape [layers, experts] = {list(window.shape)}, got "
            f"{list(step.shape)}; backbone and draft layers need a window each"
        )
    step = np.array(step)  # a copy: the caller may go on counting in its own
    step.flags.writeable = False
    return dataclasses.replace(window, steps=(*window.steps, step)[-window.size :])


def count_experts(routed: Any, experts: int, real: Any = None) -> np.ndarray:
    """Tokens of each expert, [L, E] int64.

    Args:
      routed: [L, T, k] chosen experts of T rows, as `forward` returns them; -1 chooses nothing.
      experts: E.
      real: [T] bool, False for padding rows; None counts all.
    """
    chosen = np.asarray(routed)
    if chosen.ndim != 3 or chosen.dtype.kind not in "iu":
        raise ValueError(
            "routed must be integers of shape [layers, rows, chosen], got "
            f"{chosen.dtype} {chosen.shape}"
        )
    if chosen.size and chosen.max() >= experts:
        raise ValueError(f"routed names expert {chosen.max()}, there are experts={experts}")
    if real is not None:
        kept = np.asarray(real)
        if kept.shape != chosen.shape[1:2] or kept.dtype != bool:
            raise ValueError(
                f"real must be bool of shape [{chosen.shape[1]}], got {kept.dtype} {kept.shape}"
            )
        chosen = chosen[:, kept]
    rows = [np.bincount(row[row >= 0], minlength=experts) for row in chosen]
    return np.array(rows, np.int64).reshape(-1, experts)


def to_logical(placement: Placement, counts: Any) -> np.ndarray:
    """Counts of slots [..., L, P] as counts of experts [..., L, E], int64.

    Translate each step by the placement it ran with, never a whole window by the newest.
    """
    given = check_counts("counts", counts)
    shape = (placement.layers, placement.slots)
    if given.shape[-2:] != shape:
        raise ValueError(f"counts must end in [layers, slots] = {list(shape)}, got {given.shape}")
    ordered = np.take_along_axis(
        given, np.broadcast_to(np.asarray(placement.order), given.shape), axis=-1
    )
    layers = [
        np.add.reduceat(ordered[..., layer, :], first, axis=-1)
        for layer, first in enumerate(np.asarray(placement.first))
    ]
    return np.stack(layers, axis=-2)


def device_loads(placement: Placement, counts: Any) -> np.ndarray:
    """Loads of devices [..., L, G] float64 under counts [..., L, E] of experts.

    The replicas of an expert share its tokens evenly, which `choose_replicas` does on average.
    """
    given = check_counts("counts", counts)
    shape = (placement.layers, placement.experts)
    if given.shape[-2:] != shape:
        raise ValueError(f"counts must end in [layers, experts] = {list(shape)}, got {given.shape}")
    share = given / np.asarray(placement.count)
    table = np.broadcast_to(
        np.asarray(placement.physical_to_logical), (*given.shape[:-1], placement.slots)
    )
    return device_sums(np.take_along_axis(share, table, axis=-1), placement.devices)


def device_sums(slots: Any, devices: int) -> np.ndarray:
    """What the slots [..., P] of each device come to, [..., G]: loads, or tokens as counted."""
    slots = np.asarray(slots)
    return np.sum(slots.reshape(*slots.shape[:-1], devices, slots.shape[-1] // devices), axis=-1)


def slowest_over_mean(loads: Any) -> np.ndarray:
    """Slowest device over the mean one, for each layer and step: [..., G] -> [...] float64.

    1 is ideal, and what a step without tokens has.
    """
    given = np.asarray(loads, np.float64)
    peak, mean = given.max(axis=-1), np.mean(given, axis=-1)
    return np.divide(peak, mean, out=np.ones_like(peak), where=mean > 0)


def moe_lb(loads: Any) -> float:
    """The published figure: slowest devices over mean ones, both summed over layers and steps.

    loads: [..., G]. A step's experts take this many times as long as if all devices had the same
    load. 1 is ideal, and what no tokens have.
    """
    given = np.asarray(loads, np.float64)
    mean = float(np.sum(np.mean(given, axis=-1)))
    return float(np.sum(given.max(axis=-1))) / mean if mean > 0 else 1.0


def check_counts(name: str, counts: Any, dimensions: int | None = None) -> np.ndarray:
    """The counts as int64; ValueError where they are negative or have too few dimensions."""
    given = np.asarray(counts)
    if given.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers (tokens), got {given.dtype}")
    if given.ndim < 2 or (dimensions is not None and given.ndim != dimensions):
        wanted = {None: "[..., layers, experts]", 2: "[layers, experts]"}.get(
            dimensions, "[steps, layers, experts]"
        )
        raise ValueError(f"{name} must have shape {wanted}, got {list(given.shape)}")
    if given.size and given.min() < 0:
        raise ValueError(f"{name} must not be negative, got {given.min()}")
    return given.astype(np.int64)
