"""Our kernels for Ascend 950 in TileLang, and the forms that are kept (docs/ascend_kernels.md).

A source file of this package holds one kernel; importing it needs tilelang, importing the package
does not. A kernel is lowered for sizes and static values of one `Form`; the number of rows stays
open. `FORMS` are those whose generated source is committed: a small one of each for tests and one
with the sizes of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand or result: its name in the source, dtype, axes ("M N": letters, or sizes)."""

    name: str
    dtype: str
    axes: str

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape where the letters have these sizes; KeyError for one that has none."""
        return tuple(int(a) if a.isdecimal() else sizes[a] for a in self.axes.split())


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A source file of this package, `name`.py, and the function of that name in it.

    operands, results   in the order of the function; a result's letters stand in operands or forms
    """

    name: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """A kernel lowered for fixed sizes; two are equal where they are one.

    name     of the generated file
    sizes    letters of axes; those that have none here are open
    static   keyword arguments of the function; `blocks` cores take turns at its tasks, which like
             `threads` changes speed and no bit
    """

    name: str
    kernel: Kernel
    sizes: Mapping[str, int]
    static: Mapping[str, Any]

    @property
    def open_axes(self) -> tuple[str, ...]:
        """Letters without a size, sorted."""
        letters = {axis for each in self.kernel.operands for axis in each.axes.split()}
        return tuple(sorted(a for a in letters - set(self.sizes) if not a.isdecimal()))


NORM_ROPE = Kernel(
    "norm_rope",
    (
        Array("X", "bfloat16", "M N"),
        Array("WEIGHT", "float32", "N"),
        Array("COS", "float32", "M R"),
        Array("SIN", "float32", "M R"),
    ),
    (Array("OUT", "bfloat16", "M N"),),
)
ATTEND_ROWS = Kernel(
    "attend_rows",
    (
        Array("Q", "bfloat16", "M H D"),
        Array("ROWS", "bfloat16", "N D"),
        Array("IDS", "int32", "M S"),
        Array("SINK", "float32", "H"),
    ),
    (Array("OUT", "bfloat16", "M H D"), Array("LSE", "float32", "M H")),
)
STREAM_MIXES = Kernel(
    "stream_mixes",
    (
        Array("RAW", "float32", "M W"),
        Array("SCALE", "float32", "3"),
        Array("BASE", "float32", "W"),
    ),
    (
        Array("PRE", "float32", "M C"),
        Array("POST", "float32", "M C"),
        Array("COMB", "float32", "M Q"),
    ),
)
SELECT_BEST = Kernel(
    "select_best",
    (Array("X", "uint32", "M N"), Array("END", "int32", "M")),
    (Array("IDS", "int32", "M K"),),
)


def _form(name: str, kernel: Kernel, sizes: dict[str, int], **static: Any) -> Form:
    return Form(f"{kernel.name}-{name}", kernel, MappingProxyType(sizes), MappingProxyType(static))


def _streams(count: int) -> dict[str, int]:
    return {"C": count, "Q": count * count, "W": count * (2 + count)}


SMALL = (
    _form("small", NORM_ROPE, {"N": 96, "R": 10}, eps=1e-6, threads=32, blocks=3),
    _form(
        "small", ATTEND_ROWS, {"H": 6, "D": 32, "S": 21},
        scale=0.25, group=2, keys=8, threads=32, blocks=4,
    ),
    _form(
        "small", STREAM_MIXES, _streams(3),
        streams=3, iterations=4, eps=1e-6, threads=4, blocks=3,
    ),
    _form("small", SELECT_BEST, {"K": 5}, k=5, threads=16, blocks=3),
)  # fmt: skip
FLASH = (
    _form("flash", NORM_ROPE, {"N": 512, "R": 32}, eps=1e-20, threads=128, blocks=64),
    _form(
        "flash", ATTEND_ROWS, {"H": 64, "D": 512, "S": 640},
        scale=512**-0.5, group=16, keys=64, threads=256, blocks=64,
    ),
    _form(
        "flash", STREAM_MIXES, _streams(4),
        streams=4, iterations=20, eps=1e-6, threads=32, blocks=64,
    ),
    _form("flash", SELECT_BEST, {"K": 512}, k=512, threads=256, blocks=64),
)  # fmt: skip
FORMS = (*SMALL, *FLASH)
