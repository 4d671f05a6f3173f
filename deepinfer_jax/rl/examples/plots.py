"""Pictures of training runs: how far the sides are apart, and what is learned. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.rl.examples.policy import Step, share


def smoothed(values: Sequence[float], width: int = 6) -> list[float]:
    """The mean of each value and the `width` - 1 before it."""
    return [share(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def plot_runs(runs: Mapping[str, Sequence[Step]], path: Path) -> None:
    """Write a PNG: largest |trainer - sampler| of every step, and the mean reward, run by run.

    runs: label -> its steps. A difference of exactly 0 is drawn on the axis "0".
    """
    figure: Any
    plt: Any = _pyplot()
    figure, (apart, reward) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for number, (label, log) in enumerate(runs.items()):
        color, steps = f"C{number}", [each.step for each in log]
        apart.plot(steps, [each.raw_difference for each in log], ".-", color=color, label=label)
        values = [each.reward for each in log]
        reward.plot(steps, values, ".", color=color, alpha=0.35)
        reward.plot(steps, smoothed(values), color=color, label=label)
    apart.set_yscale("symlog", linthresh=1e-7)
    apart.set_ylim(bottom=-2e-8)
    apart.set(title="largest |trainer - sampler| of a log-prob", xlabel="step", ylabel="nats")
    reward.set(title="mean reward, and its mean over 6 steps", xlabel="step", ylim=(0, 1))
    for axes in (apart, reward):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
