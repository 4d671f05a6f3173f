"""JSON that can mean one thing only: hooks for `json.loads`."""

from __future__ import annotations

import reprlib
from typing import Any


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook`: keys are all different; which of two was meant cannot be known."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {reprlib.repr(key)} appears twice")
        found[key] = value
    return found


def no_constant(name: str) -> Any:
    """`parse_constant`: NaN and the infinities are Python's, not JSON's."""
    raise ValueError(f"{name} is no JSON number")
