"""Pictures of training runs: how far the sides are apart, and what is learned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer_jax.plots.style import COLOURS, new_axes


def smoothed(values: Sequence[float], width: int = 6) -> list[float]:
    """The mean of each value and the `width` - 1 before it."""
    parts = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [math.fsum(part) / len(part) for part in parts]


def runs(logs: Mapping[str, Sequence[Any]], axes: Any = None) -> Any:
    """Largest |trainer - sampler| of every step, and the mean reward, run by run.

    logs: label -> its steps, records with `step`, `raw_difference` and `reward` as in
    `rl.examples`. A difference of exactly 0 is drawn at "0". axes: two; new ones, side by side, if
    None.
    """
    if axes is None:
        axes = new_axes("plots.runs", 1, 2, (10, 3.8))
    apart, reward = axes
    for number, (label, log) in enumerate(logs.items()):
        color, steps = COLOURS[number % len(COLOURS)], [each.step for each in log]
        apart.plot(steps, [each.raw_difference for each in log], ".-", color=color, label=label)
        values = [each.reward for each in log]
        reward.plot(steps, values, ".", color=color, alpha=0.35)
        reward.plot(steps, smoothed(values), color=color, label=label)
    apart.set_yscale("symlog", linthresh=1e-7)
    apart.set_ylim(bottom=-2e-8)
    apart.set(title="largest |trainer - sampler| of a log-prob", xlabel="step", ylabel="nats")
    reward.set(title="mean reward, and its mean over 6 steps", xlabel="step", ylim=(0, 1))
    for one in axes:
        one.legend()
    return axes
