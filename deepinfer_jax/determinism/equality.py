"""Equality of bits, counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def bits(value: Any) -> np.ndarray:
    """An array as unsigned integers, so that NaN equals itself and -0 differs from 0."""
    value = np.ascontiguousarray(np.asarray(value))
    return value.view(f"u{value.itemsize}") if value.dtype.kind not in "iub" else value


def unequal(got: Any, want: Any) -> np.ndarray:
    """Where two arrays of one shape and type have different bits: bool, in their shape."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(
            f"only arrays of one shape and type can be compared, got {got.dtype}{got.shape} and "
            f"{want.dtype}{want.shape}"
        )
    return bits(got) != bits(want)


def different(got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """Names whose bits differ; ValueError where the names do."""
    if got.keys() != want.keys():
        raise ValueError(f"different names: {sorted(got)} and {sorted(want)}")
    return [name for name in want if unequal(got[name], want[name]).any()]
