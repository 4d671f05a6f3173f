"""Calls of CANN's operations: checked, in two phases, on the device's current stream."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ascend.aclnn import checking
from ascend.aclnn.descriptors import Descriptors, message
from ascend.aclnn.devices import Device
from ascend.aclnn.errors import CallFailedError
from ascend.aclnn.library import Library
from ascend.aclnn.operations import REQUIRED, Operation


def call(op: Operation, library: Library, device: Device, given: Mapping[str, Any]) -> Any:
    """Run `op` with arguments by name: its result, a tuple of several, or None.

    The first phase says how much workspace it wants, the second is queued on the stream; neither
    is waited for. Raises OperandRefusedError and UnavailableError before anything is called,
    CallFailedError for what CANN refuses.
    """
    phases = library.operation(op.symbol)
    # What could not be destroyed is not made.
    destroy = library.function("aclDestroyAclOpExecutor", ctypes.c_int, ctypes.c_void_p)
    prepared = checking.prepare(op, device, given)
    size, executor = ctypes.c_uint64(0), ctypes.c_void_p()
    with Descriptors(library, op.name) as made:
        values = [made.converted(argument, value) for argument, value in prepared.passed]
        status = phases[0](*values, ctypes.byref(size), ctypes.byref(executor))
        try:
            _succeeded(op, "workspace size", status, library)
            workspace = device.empty((size.value,), "uint8") if size.value else None
            address = None if workspace is None else device.describe(workspace).address
            stream = device.stream()
        except BaseException:  # the second phase, which takes the executor over, is not reached
            if executor.value:
                destroy(executor)
            raise
        status = phases[1](address, size, executor, stream)
        _succeeded(op, "execution", status, library)
    results = prepared.results
    return results if len(results) > 1 else results[0] if results else None


def _succeeded(op: Operation, phase: str, status: int, library: Library) -> None:
    if status:
        raise CallFailedError(op.name, phase, status, message(library))


_TYPES = {"integer": int, "real": float, "flag": bool, "text": str, "integers": tuple[int, ...],
          "scalar": int | float | bool, "tensor": Any, "tensors": list[Any]}  # fmt: skip


def signature(op: Operation) -> inspect.Signature:
    """The arguments of `op` as Python has them: by name, with types and defaults."""
    parameters = []
    for each in sorted(
        (each for each in op.arguments if each.is_given), key=lambda each: not each.is_needed
    ):
        default = each.default
        if default is REQUIRED:
            default = None if each.optional else inspect.Parameter.empty
        kind = _TYPES[each.kind]
        annotation = kind | None if each.optional and kind is not Any else kind
        parameters.append(
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )
    count = len(op.results)
    returns = tuple[(Any,) * count] if count > 1 else Any if count else None
    return inspect.Signature(parameters, return_annotation=returns)


def bind(op: Operation, library: Library, device: Device) -> Callable[..., Any]:
    """`op` as a Python function with the signature and the text of its line of the table."""

    def run(**given: Any) -> Any:
        return call(op, library, device, given)

    run.__name__ = run.__qualname__ = op.name
    run.__doc__ = describe(op)
    run.__signature__ = signature(op)  # type: ignore[attr-defined]
    return run


def describe(op: Operation) -> str:
    """The line of the table for people: what it is, every argument in C order, where from."""
    lines = [f"{op.what[0].upper()}{op.what[1:]} ({op.symbol}).", ""]
    for each in op.arguments:
        words = [each.kind if each.kind != "result" else "tensor, returned"]
        words += [each.dtypes] if isinstance(each.dtypes, str) and each.dtypes else []
        words += [f"[{each.shape}]"] if isinstance(each.shape, str) and each.shape else []
        words += ["written to"] if each.inplace else []
        words += ["may be left out"] if each.optional else []
        words += [f"one of {each.choices}"] if each.choices else []
        words += ["derived"] if each.derived is not None else []
        lines.append(f"{each.name}: {', '.join(words)}")
    return "\n".join([*lines, "", f"For {', '.join(op.chips)}. Source: {op.source}."])
