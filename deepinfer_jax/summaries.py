"""Short texts for values that hold arrays: what is in them and how large, never the numbers.

A dataclass takes it by `__repr__ = summaries.of_fields`. No array is read, so nothing waits for a
device, and values being traced can be shown as well.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

MOST = 8  # entries of a sequence or mapping that are shown


def of_fields(self: Any) -> str:
    """`Name(field=dtype[shape], ...; bytes)` of a dataclass; fields that are None are left out."""
    names = [field.name for field in dataclasses.fields(self) if field.repr]
    held = {name: getattr(self, name) for name in names}
    parts = [f"{name}={shown(each)}" for name, each in held.items() if each is not None]
    total = bytes_of(self)
    return f"{type(self).__name__}({', '.join(parts)}{f'; {size(total)}' if total else ''})"


def shown(value: Any) -> str:
    """One line about a value: arrays by dtype and shape, containers by what they hold."""
    if _is_array(value):
        shape = ",".join(map(str, value.shape))
        return f"{np.dtype(value.dtype).name}[{shape}]"
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        parts = [shown(each) for each in value[:MOST]] + ["..."] * (len(value) > MOST)
        return f"({', '.join(parts)}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{len(jax.tree.leaves(value))} arrays, {size(bytes_of(value))}}}"
    return repr(value)


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, also of `jax.ShapeDtypeStruct`s."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if _is_array(leaf)]
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def size(count: int) -> str:
    """A number of bytes to three digits: "890 B", "1.25 MB"."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def _is_array(value: Any) -> bool:
    """Also of tracers and shapes, not of a random key, which has no plain dtype."""
    return hasattr(value, "shape") and isinstance(getattr(value, "dtype", None), np.dtype)
