"""Records of steps as JSON Lines (`plots.metrics` draws them)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from deepinfer_jax.engine.statistics import StepRecord

_FIELDS = dataclasses.fields(StepRecord)
_KEYS = [field.name for field in _FIELDS]
_ALWAYS = {field.name for field in _FIELDS if field.default is dataclasses.MISSING}


def to_line(record: StepRecord) -> str:
    """One JSON object with the fields of `StepRecord`, and a newline."""
    return json.dumps(dataclasses.asdict(record)) + "\n"


def read_metrics(path: Path | str) -> list[StepRecord]:
    """The records in a file of `deepinfer-jax generate --metrics`; a torn last line is left out.

    A file may have been begun by an earlier version, whose lines lack what a later one added: that
    has its default.

    Raises ValueError, with its number, for another line that is none.
    """
    *lines, _ = Path(path).read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict) or not _ALWAYS <= value.keys() <= {*_KEYS}:
                raise ValueError(f"expected the keys {', '.join(_KEYS)}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number} is no record of a step: {error}") from None
        records.append(StepRecord(**value))
    return records
