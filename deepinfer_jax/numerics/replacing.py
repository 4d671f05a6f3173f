"""C++ kernels in the place of functions for `rows="ffi"`; other forms run the functions.

What stands in the function is the definition, and the gradient: a kernel computes the same with its
own order of sums and its own exponentials.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from deepinfer_jax.numerics import stored

Function = TypeVar("Function", bound=Callable[..., Any])


def in_kernel(
    kernel: Callable[..., Any], *static: str, fits: Callable[..., bool] | None = None,
    result: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:  # fmt: skip
    """Decorator of a function with an argument `numerics`: `kernel` in its place for `rows="ffi"`.

    kernel, fits: take the function's arguments by name; fits: whether the kernel is made for them
    (default: for all), by their shapes, dtypes and static values; static: arguments that are no
    arrays; result: the class of what the function gives, whose fields the kernel gives in order.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        fixed = (*static, "numerics")

        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            given = signature.bind(*args, **more)
            given.apply_defaults()
            values = given.arguments
            if values["numerics"].rows != "ffi" or (fits is not None and not fits(**values)):
                return function(*args, **more)
            arrays = {name: value for name, value in values.items() if name not in fixed}
            made: Any = _run(kernel, function, tuple((n, values[n]) for n in fixed), arrays)
            return made if result is None else result(*made)

        return cast(Function, call)

    return decorate


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(kernel, function, fixed, arrays):
    return kernel(**arrays, **dict(fixed))


def _forward(kernel, function, fixed, arrays):
    return _run(kernel, function, fixed, arrays), arrays


def _backward(kernel, function, fixed, arrays, g):
    plain = dict(fixed)
    plain["numerics"] = dataclasses.replace(plain["numerics"], rows="batched")

    def run(arrays):
        cut = jax.tree.map(stored.alone, arrays, is_leaf=lambda a: isinstance(a, stored.Layered))
        return function(**cut, **plain)

    made, pull = jax.vjp(run, arrays)
    return pull(jax.tree.unflatten(jax.tree.structure(made), jax.tree.leaves(g)))


_run.defvjp(_forward, _backward)
