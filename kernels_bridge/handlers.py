"""The `ffi` transport: C++ and CUDA handlers of XLA's foreign functions, built at first use.

A call costs what a kernel of XLA costs, takes no lock of Python, and can be cached, exported and
recorded (`docs/kernels.md`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kernels_bridge import building
from kernels_bridge.building import NoKernelsError

_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Library:
    """A source file with handlers.

    source   compiled alone; whatever lies beside it may be included, and makes another library
    targets  its handlers; each is a symbol `prefix` + target, and registered under that name
    another  what to do where it cannot be had, for the message
    toolchain  what compiles it
    platform   of XLA, on which they run
    """

    source: Path
    targets: tuple[str, ...]
    prefix: str = "deepinfer_"
    another: str = building.ANOTHER
    toolchain: building.Toolchain = building.HOST
    platform: str = "cpu"


def load(library: Library) -> None:
    """Build it if need be and register its handlers, once in a process.

    Raises NoKernelsError where it cannot be built or loaded.
    """
    with _LOCK:
        _register(library)


@functools.cache
def _register(library: Library) -> ctypes.CDLL:
    path = building.build(
        jax.ffi.include_dir(), source=library.source, another=library.another,
        toolchain=library.toolchain,
    )  # fmt: skip
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernelsError(
            f"{path} cannot be loaded: {error}; remove it, or set XDG_CACHE_HOME to a folder from "
            f"which programs may run, or {library.another}"
        ) from error
    for target in library.targets:
        name = library.prefix + target
        handler = jax.ffi.pycapsule(getattr(loaded, name))
        jax.ffi.register_ffi_target(name, handler, platform=library.platform)
    return loaded


def call(
    library: Library, target: str, results: Any, *operands: jax.Array,
    attributes: Mapping[str, Any] | None = None, aliases: Mapping[int, int] | None = None,
    mapped: str | None = None,
) -> Any:  # fmt: skip
    """The results of a handler: `results` is a shape with dtype, or a sequence of them.

    attributes: static numbers, of the dtype that the handler reads (`np.int64(3)`); aliases:
    operand -> result that takes over its memory; mapped: what `jax.vmap` does ("broadcast_all" for
    a handler of any leading axes, "sequential"; None: it is refused).
    """
    if target not in library.targets:
        raise ValueError(f"{library.source.name} has no handler {target!r}: {library.targets}")
    load(library)
    shapes = list(results) if isinstance(results, Sequence) else results
    made = jax.ffi.ffi_call(
        library.prefix + target, shapes, vmap_method=mapped,
        input_output_aliases=dict(aliases or {}),
    )  # fmt: skip
    return made(*operands, **(attributes or {}))
