"""What other libraries publish about their functions, as data: names and defaults of parameters.

An adapter calls a library by these names. Before its first call the installed function is compared
with them, so that another release is refused by name and not by what it does with our operands.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from kernels_bridge.registry import KernelRefusedError, Need


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function of a library.

    need        the library and the releases that publish it so
    path        attribute path below the module, "EPBuffer.dispatch"
    parameters  all names, in order
    used        those that an adapter passes by name
    """

    need: Need
    path: str
    parameters: tuple[str, ...]
    used: tuple[str, ...]

    def __post_init__(self) -> None:
        strange = set(self.used) - set(self.parameters)
        if strange:
            raise ValueError(f"{self.path} has no parameters {sorted(strange)}")


def signature(need: Need, path: str, parameters: str, used: str) -> Signature:
    """A signature with its names in two texts."""
    return Signature(need, path, tuple(parameters.split()), tuple(used.split()))


def difference(function: Callable[..., Any], published: Signature) -> str | None:
    """What of `published` the function lacks; None where it has all that an adapter passes."""
    names, open_ended = parameters_of(function)
    if not names and not open_ended:
        return "its parameters cannot be read"
    missing = [name for name in published.used if name not in names and not open_ended]
    return f"it has no parameter {', '.join(missing)}" if missing else None


def parameters_of(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Names of its parameters, and whether it takes any others by name.

    A function in C++ names its parameters in its docstring only.
    """
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):
        said = (function.__doc__ or "").partition("->")[0]
        return frozenset(re.findall(r"\b(\w+):", said)), False
    return frozenset(taken), any(p.kind is p.VAR_KEYWORD for p in taken.values())


@functools.cache
def function_of(published: Signature) -> Callable[..., Any]:
    """The installed function, compared with what was published.

    Raises KernelRefusedError where the library does not import or has another function.
    """
    name = published.need.name
    try:
        found: Any = importlib.import_module(name)
        for part in published.path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, AssertionError, OSError) as error:
        raise KernelRefusedError(
            f"{name}.{published.path} cannot be had: {error or type(error).__name__}; "
            f"{published.need.mend or 'install it anew'}"
        ) from error
    lacks = difference(found, published)
    if lacks:
        raise KernelRefusedError(
            f"{name}.{published.path} is not the one this adapter was written for: {lacks}; it "
            f"takes {', '.join(published.parameters)}"
        )
    return found
