"""Measured step times on disk, and the refusal to use those of something else.

One JSON file holds what one model takes on one device under one `Numerics`. Versions of JAX are
stored for the reader; they do not make a table foreign.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from deepinfer_jax.planning.cost import check_curve
from deepinfer_jax.whole_files import replacing

FORMAT = 1
REMEDY = "run `deepinfer-jax profile` to measure it"


class MissingCostTable(FileNotFoundError):  # noqa: N818 - named for what is the matter
    """There is no cost table."""


class ForeignCostTable(ValueError):  # noqa: N818
    """The cost table belongs to another model, device or numerics, or to other slots."""


class BrokenCostTable(ValueError):  # noqa: N818
    """The file is no cost table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Times with one number of slots.

    slots     requests that a step has room for
    rows      ascending row counts that a verification is compiled for
    ms        milliseconds of a whole round with each: drafting for all slots, verifying
    plain_ms  milliseconds of a round without drafts
    """

    slots: int
    rows: tuple[int, ...]
    ms: tuple[float, ...]
    plain_ms: float

    def __post_init__(self) -> None:
        _check_kind("slots", self.slots, int)
        _check_kind("plain_ms", self.plain_ms, int | float)
        if self.slots < 1:
            raise ValueError(f"slots must be at least 1, got {self.slots}")
        if not (math.isfinite(self.plain_ms) and self.plain_ms > 0):
            raise ValueError(f"plain_ms must be positive and finite, got {self.plain_ms}")
        check_curve("rows", self.rows, "ms", self.ms)


@dataclasses.dataclass(frozen=True, slots=True)
class CostTable:
    """What `deepinfer-jax profile` measured.

    model          fingerprint of the model
    hardware       description of the device
    numerics       `Numerics.fingerprint()`
    jax, jaxlib    versions
    curves         one per number of slots, ascending
    """

    model: str
    hardware: str
    numerics: str
    jax: str
    jaxlib: str
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        for field in ("model", "hardware", "numerics", "jax", "jaxlib"):
            _check_kind(field, getattr(self, field), str)
        slots = [curve.slots for curve in self.curves]
        if not slots or slots != sorted(set(slots)):
            raise ValueError(f"curves must be of ascending numbers of slots, got {slots}")


def curve_for(table: CostTable, slots: int) -> Curve:
    """The times with `slots` slots.

    Raises MissingCostTable when that number was not measured.
    """
    for curve in table.curves:
        if curve.slots == slots:
            return curve
    known = ", ".join(str(curve.slots) for curve in table.curves)
    raise MissingCostTable(
        f"no step times for {slots} slots, only for {known}; run `deepinfer-jax profile --slots "
        f"{slots}` for this model to add them"
    )


def merged(table: CostTable, other: CostTable) -> CostTable:
    """The curves of both, those of `table` where both have them.

    Raises ForeignCostTable where they are not of the same model, hardware and numerics.
    """
    wanted = {name: getattr(table, name) for name in ("model", "hardware", "numerics")}
    _check_same(other, wanted, "the other table")
    curves = {curve.slots: curve for curve in (*other.curves, *table.curves)}
    return dataclasses.replace(table, curves=tuple(curves[n] for n in sorted(curves)))


def save_table(path: str | Path, table: CostTable) -> None:
    """Write `table` as JSON; a file at `path` is replaced whole or not at all."""
    text = json.dumps({"format": FORMAT, **dataclasses.asdict(table)}, indent=1, allow_nan=False)
    with replacing(path, text=True) as file:
        file.write(text + "\n")


def load_table(path: str | Path, *, model: str, hardware: str, numerics: str) -> CostTable:
    """The table at `path`, which must be of this model, hardware and numerics.

    Raises:
        MissingCostTable: there is no file.
        BrokenCostTable: it is not JSON, lacks a field or holds a value that is no time.
        ForeignCostTable: it was measured with something else; the message says with what.
    """
    table = read_table(path)
    _check_same(table, {"model": model, "hardware": hardware, "numerics": numerics}, str(path))
    return table


def read_table(path: str | Path) -> CostTable:
    """The table at `path`, whatever it was measured with; errors as `load_table`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingCostTable(f"no cost table at {path}; {REMEDY}") from None
    except UnicodeDecodeError as error:
        raise BrokenCostTable(f"{path} is no cost table ({error}); {REMEDY}") from error
    try:
        return _parse(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise BrokenCostTable(f"{path} is no cost table ({error}); {REMEDY}") from error


def _check_same(table: CostTable, wanted: dict[str, str], where: str) -> None:
    other = [
        f"{name} {getattr(table, name)!r} instead of {value!r}"
        for name, value in wanted.items()
        if getattr(table, name) != value
    ]
    if other:
        raise ForeignCostTable(f"{where} was measured with {', '.join(other)}; {REMEDY}")


def _parse(value: Any) -> CostTable:
    fields = _fields(value, "the file", CostTable, "format")
    if fields.pop("format") != FORMAT:
        raise ValueError(f"format {value['format']!r}, expected {FORMAT}")
    _check_kind("curves", fields["curves"], list)
    curves = []
    for number, item in enumerate(fields["curves"]):
        curve = _fields(item, f"curves[{number}]", Curve)
        for name in ("rows", "ms"):
            _check_kind(name, curve[name], list)
            curve[name] = tuple(curve[name])
        curves.append(Curve(**curve))
    return CostTable(**{**fields, "curves": tuple(curves)})


def _fields(value: Any, where: str, kind: type, *more: str) -> dict[str, Any]:
    _check_kind(where, value, dict)
    names = [*more, *(field.name for field in dataclasses.fields(kind))]
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    return {name: value[name] for name in names}


def _check_kind(name: str, value: Any, kind: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {getattr(kind, '__name__', kind)}, got {value!r:.60}")
