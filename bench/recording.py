"""What ran on the accelerator while a function ran, from JAX's profiler, for the scripts."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Kernel:
    """Begin and end in nanoseconds, its name, and of its program the name and the instruction."""

    begin: int
    end: int
    name: str
    program: str
    op: str = ""


def recorded(run: Callable[[], Any]) -> tuple[Any, list[Kernel]]:
    """What `run` returns, and what ran on the accelerator's streams, in order.

    Only the device is recorded, not every call of Python: that would slow the host down. Raises
    SystemExit where there is no accelerator.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            made = jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = [
            Kernel(
                event.start_ns,
                event.start_ns + event.duration_ns,
                event.name,
                _stat(event, "hlo_module"),
                _stat(event, "hlo_op"),
            )
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
            if plane.name.startswith("/device:")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    if not found:
        raise SystemExit("the profiler saw no stream of an accelerator; this script needs a GPU")
    return made, sorted(found)


def _stat(event: Any, wanted: str) -> str:
    return next((str(value) for name, value in event.stats if name == wanted), "")
