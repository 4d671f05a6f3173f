"""Our C++ kernels on bare pointers, for whoever holds the memory: built and loaded at first use.

The operations of `csrc/direct.cc`, all in float32, for an executor whose tensors are not XLA's. A
call costs about what one small operation of torch costs, whatever the function does inside.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from kernels_bridge import building
from kernels_bridge.building import NoKernelsError

SOURCE = building.SOURCE.with_name("direct.cc")
# Of every function: pointers, then numbers: i an int64, f a float.
SIGNATURES = {
    "mixes": (6, "iiif"), "raw_mixes": (3, "iiif"), "rms_norm": (3, "iif"), "normed": (4, "iiif"),
    "expand": (5, "iii"), "rotated": (4, "iiiif"), "route": (8, "iiiiffi"),
    "experts": (6, "iiiiif"), "shared_expert": (4, "iiif"), "group_product": (3, "iiii"),
    "store": (4, "iiiiii"), "attend": (13, "iiiiiiiiiiiiif"), "scores": (8, "iiiiiiiiiii"),
    "select": (3, "iiii"), "candidates": (3, "iiii"), "hashed": (6, "iii"),
}  # fmt: skip
_NUMBERS = {"i": ctypes.c_int64, "f": ctypes.c_float}


@functools.cache
def load(another: str) -> ctypes.CDLL:
    """Build the library if need be and load it, once in a process.

    another: what to do where it cannot be had, for the message. Raises NoKernelsError.
    """
    path = building.build(None, source=SOURCE, another=another)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernelsError(
            f"{path} cannot be loaded: {error}; remove it, or set XDG_CACHE_HOME to a folder from "
            f"which programs may run, or {another}"
        ) from error


@functools.cache
def function(name: str, another: str) -> Callable[..., int]:
    """An operation by its name: (addresses, numbers) -> 0, or 1 where an index points outside.

    Raises NoKernelsError as `load` does.
    """
    pointers, numbers = SIGNATURES[name]
    found: Any = getattr(load(another), f"direct_{name}")
    found.argtypes = [*[ctypes.c_void_p] * pointers, *(_NUMBERS[each] for each in numbers)]
    found.restype = ctypes.c_int
    return found
