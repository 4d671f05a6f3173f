"""Checks of operands by named sizes: one line for each operand of a rule."""

from __future__ import annotations

from collections.abc import Iterable

import jax


def fit(op: str, sizes: dict[str, int], *, operand: str, shape: jax.ShapeDtypeStruct, dims: str,
        dtypes: Iterable[str]) -> None:  # fmt: skip
    """Check one operand against `dims`, names or numbers of its axes, and bind names in `sizes`.

    Raises ValueError that names the operand, what was expected and what came.
    """
    names, dtypes = dims.split(), tuple(dtypes)
    if len(shape.shape) != len(names):
        raise ValueError(
            f"{op}: {operand} must have {len(names)} axes [{', '.join(names)}], got "
            f"{list(shape.shape)}"
        )
    for name, size in zip(names, shape.shape, strict=True):
        wanted = int(name) if name.isdecimal() else sizes.setdefault(name, size)
        if size != wanted:
            at = "" if name.isdecimal() else f", with {name}={wanted} from an operand before it"
            raise ValueError(
                f"{op}: {operand} must be [{', '.join(names)}]{at}, got {list(shape.shape)}"
            )
    if str(shape.dtype) not in dtypes:
        raise ValueError(f"{op}: {operand} must be {' or '.join(dtypes)}, got {shape.dtype}")
