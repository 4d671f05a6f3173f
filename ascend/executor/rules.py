"""The table of primitives: name -> how a call of it becomes torch calls.

A rule is called as rule(b, eqn, *values), with the builder, the equation of the jaxpr and its
operands, and gives back one value or a sequence of them. An operand may be broadcast: its own shape
is then () or has 1 where the equation's shape has more. Elementwise rules leave it to torch to
spread it out; others ask `full` for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ascend.executor.builder import Builder
from ascend.executor.kinds import torch
from ascend.executor.values import Value

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


class UnknownPrimitiveError(NotImplementedError):
    """A primitive, or a use of one, that the executor has no torch calls for."""

    def __init__(self, name: str, why: str, source: str = "") -> None:
        where = f" (at {source})" if source else ""
        super().__init__(
            f"primitive {name!r}{where} cannot be run by the executor: {why}. Replace the function "
            "that uses it with ops={name: torch function}, or add a rule to ascend.executor"
        )
        self.name, self.source = name, source


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule under these names of primitives."""

    def enter(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return enter


def refuse(eqn: Any, why: str) -> UnknownPrimitiveError:
    """The error of an equation, with its place in the source where that is known."""
    return UnknownPrimitiveError(eqn.primitive.name, why, source_of(eqn))


def source_of(eqn: Any) -> str:
    """file:line of the innermost caller that is not JAX itself; "" where it is not known."""
    trace = getattr(eqn.source_info, "traceback", None)
    for frame in trace.frames if trace is not None else ():
        name = frame.file_name
        inside = any(part in name for part in ("/jax/", "/ascend/executor/", "<"))
        if not inside:
            return f"{name}:{frame.line_num}"
    return ""


def full(b: Builder, value: Value, shape: Sequence[int]) -> Value:
    """`value` with all of its shape: a view that repeats what was broadcast."""
    shape = tuple(shape)
    if value.shape == shape:
        return value
    return b(torch.Tensor.expand, value, size=shape)


def whole(b: Builder, value: Value, shape: Sequence[int]) -> Value:
    """`full`, each element with memory of its own, row-major."""
    value = full(b, value, shape)
    if value.meta.is_contiguous():
        return value
    return b(torch.Tensor.contiguous, value)


def aval(eqn: Any, place: int = 0) -> Any:
    """Shape and dtype of an operand of an equation."""
    return eqn.invars[place].aval


def result(eqn: Any, place: int = 0) -> Any:
    """Shape and dtype of a result of an equation."""
    return eqn.outvars[place].aval
