"""The roofline against what was measured: rounds of a model, or a slice of one, on one device."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax import strict_json
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.scale import layouts, planned
from deepinfer_jax.scale.hardware import Hardware
from deepinfer_jax.scale.workload import Call, Workload


@dataclasses.dataclass(frozen=True)
class Measured:
    """A round on one device that took `seconds`: `rows` verified by `slots` sequences of `context`
    tokens, after a pass of the drafter over `drafted` rows (0: none).
    """

    slots: int
    rows: int
    context: int
    drafted: int
    seconds: float

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("rows", 1), ("context", 1), ("drafted", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        seconds = self.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ValueError(f"seconds must be a number, got {seconds!r}")
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds must be positive, got {seconds!r}")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Predicted seconds beside measured ones. `ratios`: measured over predicted; a roofline is a
    bound from below, so that none should be under 1.
    """

    measured: tuple[Measured, ...]
    predicted: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Measured over predicted, one for each round."""
        pairs = zip(self.measured, self.predicted, strict=True)
        return tuple(each.seconds / seconds for each, seconds in pairs)

    @property
    def errors(self) -> tuple[float, ...]:
        """What the prediction is off by, as a share of what was measured."""
        return tuple(abs(1 / ratio - 1) for ratio in self.ratios)

    @property
    def factor(self) -> float:
        """The median ratio: what a prediction is to be multiplied by."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, ...]:
        """`errors` that are left once every prediction is multiplied by `factor`."""
        return tuple(abs(self.factor / ratio - 1) for ratio in self.ratios)


def compare(cfg: ModelConfig, hardware: Hardware, measured: Sequence[Measured]) -> Comparison:
    """The roofline of every measured round of `cfg` on one device of `hardware`.

    Raises ValueError where nothing was measured.
    """
    if not measured:
        raise ValueError("measured must not be empty: there is nothing to compare with")
    layout = layouts.over_experts(1)
    seconds = []
    for each in measured:
        call = Call(each.rows, each.rows, each.slots, each.context, each.drafted, shared=each.rows)
        asked = Workload(context=each.context, concurrency=each.slots, drafts=0)
        seconds.append(planned.step(cfg, layout, hardware, call, asked).seconds)
    return Comparison(tuple(measured), tuple(seconds))


def read_measured(path: str | Path) -> tuple[Measured, ...]:
    """Rounds of a JSON file: {"rounds": [{"slots", "rows", "context", "drafted", "seconds"}, ..]};
    other keys beside `rounds` say where they are from and are left alone.

    Raises ValueError for a file of another form.
    """
    rounds: Any = strict_json.read_object(Path(path)).get("rounds")
    names = {field.name for field in dataclasses.fields(Measured)}
    if not isinstance(rounds, list) or not rounds:
        raise ValueError(f"{path}: `rounds` must be a list with at least one round")
    made = []
    for number, each in enumerate(rounds):
        if not isinstance(each, dict) or set(each) != names:
            raise ValueError(f"{path}: round {number} must have {sorted(names)}, got {each!r}")
        try:
            made.append(Measured(**each))
        except ValueError as error:
            raise ValueError(f"{path}: round {number}: {error}") from None
    return tuple(made)
