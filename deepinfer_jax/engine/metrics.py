"""Records of steps as JSON Lines, and a picture of them for notebooks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.engine.statistics import StepRecord

_KEYS = tuple(field.name for field in dataclasses.fields(StepRecord))
_BINS = 120  # columns of a picture: a run has many more steps


def to_line(record: StepRecord) -> str:
    """One JSON object with the fields of `StepRecord`, and a newline."""
    return json.dumps(dataclasses.asdict(record)) + "\n"


def read_metrics(path: Path | str) -> list[StepRecord]:
    """The records in a file of `deepinfer-jax generate --metrics`; a torn last line is left out.

    Raises ValueError, with its number, for another line that is none.
    """
    *lines, _ = Path(path).read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict) or tuple(value) != _KEYS:
                raise ValueError(f"expected the keys {', '.join(_KEYS)}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number} is no record of a step: {error}") from None
        records.append(StepRecord(**value))
    return records


def plot_metrics(records: Sequence[StepRecord], axes: Any = None) -> Any:
    """Draw a run over its seconds: tokens per second, slots and requests, pages, idle share.

    axes: four matplotlib axes; new ones, one below the other, if None. Returns them. Raises
    ValueError without records and ImportError without matplotlib.
    """
    if not records:
        raise ValueError("records must not be empty: there is nothing to draw")
    if axes is None:
        try:
            from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                "plot_metrics draws with matplotlib, which is not installed; "
                'install it with pip install "deepinfer-jax[notebooks]"'
            ) from error
        axes = pyplot.subplots(4, 1, sharex=True, figsize=(8, 8), layout="constrained")[1]
    seconds = [record.time - records[0].time for record in records]
    edges, tokens = _sums(seconds, [record.tokens for record in records])
    _, idle = _sums(seconds, [record.idle_s for record in records])
    width = edges[1] - edges[0]
    axes[0].stairs([count / width for count in tokens], edges)
    axes[0].set(ylabel="tokens / s")
    axes[1].step(seconds, [record.slots for record in records], label="decoding")
    axes[1].step(seconds, [record.waiting for record in records], label="waiting")
    axes[1].set(ylabel="requests")
    axes[1].legend()
    axes[2].step(seconds, [record.pages for record in records])
    axes[2].set(ylabel="pages in use")
    axes[3].stairs([min(1.0, part / width) for part in idle], edges)
    axes[3].set(ylabel="device idle", ylim=(0, 1), xlabel="seconds")
    return axes


def _sums(seconds: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """(edges, sums) of `values` in columns of equal width."""
    width = max(seconds[-1], 1e-3) / _BINS
    found = [0.0] * _BINS
    for second, value in zip(seconds, values, strict=True):
        found[min(max(int(second / width), 0), _BINS - 1)] += value
    return [width * place for place in range(_BINS + 1)], found
