"""Functions that stay calls by their names in the jaxpr of the plain form.

An executor of jaxprs (`ascend`) can put one of its own functions in the place of a named one. Forms
that promise bits are left as they were: there the function is part of its caller.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable[..., Any])


def by_name(*static: str) -> Callable[[Function], Function]:
    """Decorator of a function with an argument `numerics`: a call of its own for `rows="batched"`.

    static: its other arguments that are no arrays.
    """

    def decorate(function: Function) -> Function:
        named = jax.jit(function, static_argnames=("numerics", *static))
        place = list(inspect.signature(function).parameters).index("numerics")

        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            numerics = more["numerics"] if "numerics" in more else args[place]
            return (named if numerics.rows == "batched" else function)(*args, **more)

        return cast(Function, call)

    return decorate
