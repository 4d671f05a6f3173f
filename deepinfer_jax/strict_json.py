"""JSON that can mean one thing only: hooks for `json.loads`, and files of one object."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any


def read_object(path: Path, mend: str = "get it again") -> dict[str, Any]:
    """The object that a file holds. Raises ValueError, with the path and `mend`, for another."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}); {mend}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}; {mend}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deep; {mend}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {reprlib.repr(value)}; {mend}")
    return value


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
