"""A picture of training runs as a file (`plots.runs`). Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deepinfer_jax import plots
from deepinfer_jax.plots.style import pyplot
from deepinfer_jax.rl.examples.policy import Step


def plot_runs(runs: Mapping[str, Sequence[Step]], path: Path) -> None:
    """Write a PNG of `plots.runs`: label -> its steps."""
    figure = plots.runs(runs)[0].figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot("plot_runs").close(figure)
