"""Twins that are the model's own functions, as implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels_bridge.registry import Capability, Impl


def of_model(twin: Callable[..., Any], what: str) -> tuple[Impl, ...]:
    """In the forms of `Numerics(rows="tiled")`, which keep their promise on a CPU only."""
    promised = Capability(("cpu",), batch_invariant=True)
    return (
        Impl("tiled", "xla", promised, what, twin, seen="a CPU"),
        Impl("xla", "xla", Capability(), f"{what}, no promise", twin, seen="a CPU"),
    )
