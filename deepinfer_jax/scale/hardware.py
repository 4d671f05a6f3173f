"""What a device can do, from the data sheets in `configs/hardware`: bytes, bytes a second, flops.

Every figure names its source; where a vendor gives a sum over both directions or counts zeros
(sparsity), the file says what was made of it.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from deepinfer_jax import resources, strict_json

Precision = Literal["fp4", "fp8", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp4", "fp8", "bf16")  # from narrow to wide
_FIGURES = ("memory", "bandwidth", "link", "domain", "network")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device; times in seconds, sizes in bytes, rates a second.

    memory      of a device
    bandwidth   of that memory
    flops       dense peak of matrix products by precision, ((precision, rate), ..)
    link        what a device can send (and at once receive) to others of its domain
    domain      devices that such links connect
    network     what a device can send to devices of other domains
    sources     ((figure, where it is from), ..): all of the above, as `flops.bf16`
    measured    ((figure, what this package reached), ..) of `bandwidth` and `flops.*`; may be empty
    """

    name: str
    memory: float
    bandwidth: float
    flops: tuple[tuple[Precision, float], ...]
    link: float
    domain: int
    network: float
    sources: tuple[tuple[str, str], ...]
    measured: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for figure, value in self.figures().items():
            ok = isinstance(value, int | float) and not isinstance(value, bool)
            if not ok or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{self.name}: {figure} must be a positive number, got {value!r}")
        if "bf16" not in dict(self.flops):
            raise ValueError(f"{self.name}: flops must have bf16, got {[p for p, _ in self.flops]}")
        unknown = sorted({p for p, _ in self.flops} - set(PRECISIONS))
        if unknown:
            raise ValueError(f"{self.name}: flops has {unknown}, known are {list(PRECISIONS)}")
        missing = sorted(set(self.figures()) - {name for name, text in self.sources if text})
        if missing:
            raise ValueError(
                f"{self.name}: no source for {', '.join(missing)}; name the data sheet under "
                "`sources`"
            )

    def figures(self) -> dict[str, Any]:
        """Every number by the name that `sources` has for it."""
        plain = {name: getattr(self, name) for name in _FIGURES}
        peaks = {f"flops.{name}": rate for name, rate in self.flops}
        return plain | peaks | {f"measured.{name}": rate for name, rate in self.measured}

    def rate(self, precision: Precision) -> float:
        """Peak at a precision, or at the next wider one that the device has."""
        rates = dict(self.flops)
        wider = PRECISIONS[PRECISIONS.index(precision) :]
        return next(rates[each] for each in wider if each in rates)

    def as_measured(self) -> Hardware:
        """The same with what was reached in place of the data sheet, where it was measured.

        Precisions that were not measured keep their ratio to bf16. Raises ValueError where nothing
        was measured.
        """
        found = dict(self.measured)
        if not found:
            raise ValueError(f"nothing was measured on {self.name}: use the data sheet's figures")
        peaks = dict(self.flops)
        share = found.get("flops.bf16", peaks["bf16"]) / peaks["bf16"]
        flops = tuple((p, found.get(f"flops.{p}", rate * share)) for p, rate in self.flops)
        bandwidth = found.get("bandwidth", self.bandwidth)
        return dataclasses.replace(self, bandwidth=bandwidth, flops=flops)


def hardware_names() -> tuple[str, ...]:
    """Names that `load_hardware` knows, sorted."""
    return resources.table_names("hardware")


def load_hardware(name: str | Path) -> Hardware:
    """A device of `hardware_names()`, or of a JSON file of the same form.

    Raises ValueError for an unknown name and for a file that lacks a figure or its source.
    """
    path = resources.table_file("hardware", "hardware", name)
    data = strict_json.read_object(path, "see those in configs/hardware")
    fields = {field.name for field in dataclasses.fields(Hardware)}
    wrong = sorted(
        set(data) ^ (fields | {"measured"} if "measured" in data else fields - {"measured"})
    )
    if wrong:
        raise ValueError(f"{path}: keys must be {', '.join(sorted(fields))}; look at {wrong}")
    for name_ in ("flops", "sources", "measured"):
        if name_ in data:
            if not isinstance(data[name_], dict):
                raise ValueError(f"{path}: {name_} must be an object, got {data[name_]!r}")
            data[name_] = tuple(data[name_].items())
    try:
        return Hardware(**data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
