"""Pictures of runs: balance of devices, calibration of the drafter, what an engine did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_jax.engine.statistics import StepRecord
from deepinfer_jax.eplb.loads import moe_lb
from deepinfer_jax.planning.calibration import Reliability
from deepinfer_jax.plots.style import COLOURS, new_axes

_BINS = 120  # columns of a picture: a run has many more steps


def loads(before: Any, after: Any, axes: Any = None) -> Any:
    """Loads of devices [S, L, G] before and after: by device, and slowest over mean by step.

    The devices are those of the layer that was furthest out of balance before. S may differ between
    the two, which follow each other in the second picture.

    axes: two; new ones, side by side, if None. Raises ValueError for loads of different layers or
    devices.
    """
    pair = [np.asarray(loads, np.float64) for loads in (before, after)]
    shapes = [loads.shape for loads in pair]
    if any(loads.ndim != 3 or not loads.size for loads in pair) or shapes[0][1:] != shapes[1][1:]:
        raise ValueError(
            "before and after must have shape [steps, layers, devices], with the same layers and "
            f"devices and at least one step, got {shapes[0]} and {shapes[1]} (see `device_loads`)"
        )
    if axes is None:
        axes = new_axes("plots.loads", 1, 2, (10, 3.8))
    worst = int(np.argmax([moe_lb(pair[0][:, layer]) for layer in range(shapes[0][1])]))
    start = 0
    for place, (name, loads) in enumerate(zip(("before", "after"), pair, strict=True)):
        of_devices = np.sum(loads[:, worst], axis=0)
        mean = float(np.mean(of_devices)) or 1.0
        at = np.arange(len(of_devices)) + 0.4 * place - 0.2
        axes[0].bar(at, of_devices / mean, width=0.4, label=name, color=COLOURS[place])
        steps, values = np.arange(start, start + len(loads)), [moe_lb(step) for step in loads]
        label = f"{name}: {moe_lb(loads):.3f}"
        axes[1].plot(steps, values, label=label, color=COLOURS[place])
        start += len(loads)
    axes[0].axhline(1, color="0.5", linewidth=1)
    axes[0].set(xlabel="device", ylabel=f"load over mean, layer {worst}")
    axes[1].axhline(1, color="0.5", linewidth=1)
    axes[1].set(xlabel="step", ylabel="slowest device over mean (moe_lb)")
    for one in (axes[0], axes[1]):
        one.legend()
    return axes


def reliability(bins: Reliability, axes: Any = None) -> Any:
    """Frequency against prediction (`planning.reliability`), points as large as their share."""
    if axes is None:
        axes = new_axes("plots.reliability", size=(4, 3.8))
    seen = bins.count > 0
    area = 400 * bins.count[seen] / np.sum(bins.count)
    axes.plot([0, 1], [0, 1], color="0.5", linewidth=1)
    axes.scatter(bins.probability[seen], bins.frequency[seen], s=area, color=COLOURS[0])
    axes.set(xlabel="predicted", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
    return axes


def metrics(records: Sequence[StepRecord], axes: Any = None) -> Any:
    """A run over its seconds (`engine.metrics`): tokens per second, requests, pages, idle share and
    the balance of experts where calls were over a mesh.

    axes: four, five over a mesh; new ones, one below the other, if None. Raises ValueError without
    records.
    """
    if not records:
        raise ValueError("records must not be empty: there is nothing to draw")
    balanced = [record for record in records if record.moe_lb is not None]
    if axes is None:
        count = 5 if balanced else 4
        axes = new_axes("plots.metrics", count, 1, (8, 2 * count), sharex=True)
    seconds = [record.time - records[0].time for record in records]
    edges, tokens = _sums(seconds, [record.tokens for record in records])
    _, idle = _sums(seconds, [record.idle_s for record in records])
    width = edges[1] - edges[0]
    axes[0].stairs([count / width for count in tokens], edges, color=COLOURS[0])
    axes[0].set(ylabel="tokens / s")
    for place, (name, label) in enumerate({"slots": "decoding", "waiting": "waiting"}.items()):
        values = [getattr(record, name) for record in records]
        axes[1].step(seconds, values, label=label, color=COLOURS[place])
    axes[1].set(ylabel="requests")
    axes[1].legend()
    axes[2].step(seconds, [record.pages for record in records], color=COLOURS[0])
    axes[2].set(ylabel="pages in use")
    axes[3].stairs([min(1.0, part / width) for part in idle], edges, color=COLOURS[0])
    axes[3].set(ylabel="device idle", ylim=(0, 1), xlabel="" if balanced else "seconds")
    if balanced:
        times = [record.time - records[0].time for record in balanced]
        axes[4].plot(times, [record.moe_lb for record in balanced], color=COLOURS[0])
        axes[4].set(ylabel="moe_lb", xlabel="seconds")
    return axes


def _sums(seconds: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """(edges, sums) of `values` in columns of equal width."""
    width = max(seconds[-1], 1e-3) / _BINS
    found = [0.0] * _BINS
    for second, value in zip(seconds, values, strict=True):
        found[min(max(int(second / width), 0), _BINS - 1)] += value
    return [width * place for place in range(_BINS + 1)], found
