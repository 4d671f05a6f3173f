"""A picture of balance: devices before and after a rearrangement, and `moe_lb` of every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_jax.eplb.loads import moe_lb


def plot_loads(before: Any, after: Any, axes: Any = None) -> Any:
    """Draw loads of devices [S, L, G] before and after: by device, and slowest over mean by step.

    The devices are those of the layer that was furthest out of balance before. S may differ between
    the two, which follow each other in the second picture.

    axes: two matplotlib axes; new ones, side by side, if None. Returns them. Raises ValueError for
    loads of different layers or devices, and ImportError without matplotlib.
    """
    pair = [np.asarray(loads, np.float64) for loads in (before, after)]
    shapes = [loads.shape for loads in pair]
    if any(loads.ndim != 3 or not loads.size for loads in pair) or shapes[0][1:] != shapes[1][1:]:
        raise ValueError(
            "before and after must have shape [steps, layers, devices], with the same layers and "
            f"devices and at least one step, got {shapes[0]} and {shapes[1]} (see `device_loads`)"
        )
    if axes is None:
        axes = _new_axes()
    worst = int(np.argmax([moe_lb(pair[0][:, layer]) for layer in range(shapes[0][1])]))
    start = 0
    for place, (name, loads) in enumerate(zip(("before", "after"), pair, strict=True)):
        of_devices = np.sum(loads[:, worst], axis=0)
        mean = float(np.mean(of_devices)) or 1.0
        at = np.arange(len(of_devices)) + 0.4 * place - 0.2
        axes[0].bar(at, of_devices / mean, width=0.4, label=name)
        steps = np.arange(start, start + len(loads))
        axes[1].plot(steps, [moe_lb(step) for step in loads], label=f"{name}: {moe_lb(loads):.3f}")
        start += len(loads)
    axes[0].axhline(1, color="0.7", linewidth=1)
    axes[0].set(xlabel="device", ylabel=f"load over mean, layer {worst}")
    axes[1].axhline(1, color="0.7", linewidth=1)
    axes[1].set(xlabel="step", ylabel="moe_lb")
    for one in (axes[0], axes[1]):
        one.legend()
    return axes


def _new_axes() -> Any:
    try:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "plot_loads draws with matplotlib, which is not installed; "
            'install it with pip install "deepinfer-jax[notebooks]"'
        ) from error
    return pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")[1]
