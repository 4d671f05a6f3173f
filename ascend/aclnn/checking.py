"""What is given to an operation against its line of the table, before anything is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ascend.aclnn.devices import Device
from ascend.aclnn.errors import OperandRefusedError, UnavailableError
from ascend.aclnn.operations import REQUIRED, Argument, Bound, Operation, forms, sized
from ascend.aclnn.tensors import DTYPES, PLAIN_FORMATS, Tensor

ALIGNMENT = 32  # bytes: what the chip's vector unit moves at once
_INT64 = range(-(2**63), 2**63)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that may be made.

    passed   argument and value in C order: a Tensor or None, a tuple of Tensor, a number, a text
    results  the arrays that it makes, in order
    held     arrays that the caller does not hold
    """

    passed: tuple[tuple[Argument, Any], ...]
    results: tuple[Any, ...]
    held: tuple[Any, ...]


def prepare(op: Operation, device: Device, given: Mapping[str, Any]) -> Call:
    """The call of `op` with arguments by name; results are allocated on the device.

    Raises OperandRefusedError for what the operation does not take, UnavailableError where it has
    no kernel for the chip.
    """
    if device.chip not in op.chips:
        raise UnavailableError(
            f"{op.name} has no kernel for {device.chip}: its definition names "
            f"{', '.join(op.chips)}; compute it with other operations there"
        )
    _names_fit(op, given)
    read = {
        each.name: _read(op, each, given.get(each.name), device)
        for each in op.arguments if each.is_given
    }  # fmt: skip
    tensors = {name: value for name, value in read.items() if isinstance(value, Tensor)}
    kinds = {each.name: each.kind for each in op.arguments}
    plain = {name: value for name, value in read.items() if kinds[name] != "tensor"}
    _dtypes_fit(op, read)
    bound = Bound(tensors, plain, _axes(op, tensors, plain))
    refused = list(op.demands(bound))
    if refused:
        raise OperandRefusedError(f"{op.name}: " + "; ".join(refused))
    return _allocated(op, device, bound)


def _names_fit(op: Operation, given: Mapping[str, Any]) -> None:
    taken = [each.name for each in op.arguments if each.is_given]
    strange = [name for name in given if name not in taken]
    missing = [
        each.name for each in op.arguments if each.is_needed and given.get(each.name) is None
    ]
    if strange or missing:
        said = [f"has no argument {name}" for name in strange]
        said += [f"needs {name}, which was not given" for name in missing]
        raise OperandRefusedError(f"{op.name} {' and '.join(said)}; it takes {', '.join(taken)}")


def _read(op: Operation, argument: Argument, value: Any, device: Device) -> Any:
    """What an argument is: a Tensor (None: left out), a tuple of them, a number, a text."""
    if argument.kind == "tensor":
        return None if value is None else _tensor(op, argument, argument.name, value, device)
    if argument.kind == "tensors":
        if not isinstance(value, Sequence) or not value:
            _refuse(op, argument.name, "a list of at least one tensor", _said(value))
        return tuple(
            _tensor(op, argument, f"{argument.name}[{i}]", each, device)
            for i, each in enumerate(value)
        )
    value = argument.default if value is None else value
    if value is REQUIRED or not _PLAIN[argument.kind](value):
        _refuse(op, argument.name, _WORDS[argument.kind], _said(value))
    value = tuple(value) if argument.kind == "integers" else value
    if argument.choices and value not in argument.choices:
        _refuse(op, argument.name, " or ".join(map(repr, argument.choices)), repr(value))
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in _INT64


def _is_real(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _are_integers(value: Any) -> bool:
    """Bytes have ints for elements, too, but whoever passes them means something else."""
    listed = isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview)
    return listed and all(map(_is_integer, value))


_PLAIN = {
    "integer": _is_integer,
    "real": _is_real,
    "flag": lambda value: isinstance(value, bool),
    "text": lambda value: isinstance(value, str) and value.isascii() and "\0" not in value,
    "integers": _are_integers,
    "scalar": lambda value: isinstance(value, bool) or _is_real(value),
}
_WORDS = {
    "integer": "an int of 64 bits",
    "real": "a float",
    "flag": "True or False",
    "text": "a str of ASCII characters",
    "integers": "a sequence of ints",
    "scalar": "an int, a float or a bool",
}


def _refuse(op: Operation, name: str, expected: str, came: str, mend: str = "") -> None:
    raise OperandRefusedError(
        f"{op.name}: {name} must be {expected}; {came} came{': ' + mend if mend else ''}"
    )


def _said(value: Any) -> str:
    return "nothing" if value is REQUIRED or value is None else f"{type(value).__name__} {value!r}"


def _tensor(op: Operation, argument: Argument, name: str, value: Any, device: Device) -> Tensor:
    """The description of a tensor: on the device, plain, dense, aligned."""
    try:
        found = device.describe(value)
    except (TypeError, AttributeError) as error:
        raise OperandRefusedError(
            f"{op.name}: {name} must be an array of the device: {error}"
        ) from None
    if found.place != device.place:
        _refuse(op, name, f"on {device.place}", f"one on {found.place}", "move it there")
    if found.dtype not in DTYPES:
        _refuse(op, name, f"of {_columns(argument)}", found.dtype, "CANN has no such dtype")
    if found.layout is not None and found.layout not in PLAIN_FORMATS:
        came = f"one in the inner format {found.layout}"
        _refuse(op, name, "in a plain format", came, "cast it with npu_format_cast to 2 (ND)")
    if not found.is_dense(argument.gaps):
        where = "dense behind axis 0" if argument.gaps else "contiguous"
        came = f"strides {found.strides} of {found}"
        _refuse(op, name, where, came, "pass a contiguous copy" if not argument.inplace else
                "lay it out so; a copy would not be written to")  # fmt: skip
    if found.address % ALIGNMENT and 0 not in found.shape:
        came = f"address {found.address:#x} (offset {found.offset})"
        _refuse(op, name, f"aligned to {ALIGNMENT} bytes", came, "copy it to memory of its own")
    return found


def _columns(argument: Argument) -> str:
    assert isinstance(argument.dtypes, str)
    return " or ".join(dict.fromkeys(argument.dtypes.split()))


def _dtypes_fit(op: Operation, read: Mapping[str, Any]) -> None:
    """A column of dtypes remains that all tensors are of."""
    left: set[int] | None = None
    seen: list[str] = []
    for each in op.arguments:
        value = read.get(each.name)
        if each.kind not in ("tensor", "tensors") or value is None:
            continue
        assert isinstance(each.dtypes, str)
        columns = each.dtypes.split()
        for found in value if isinstance(value, tuple) else (value,):
            if len(columns) == 1:
                fits = columns[0] == found.dtype
                wanted = columns
            else:
                may = range(len(columns)) if left is None else sorted(left)
                wanted = [columns[i] for i in may]
                left = {i for i in may if columns[i] == found.dtype}
                fits = bool(left)
            if not fits:
                beside = f" beside {', '.join(seen)}" if seen and len(columns) > 1 else ""
                expected = f"of {' or '.join(dict.fromkeys(wanted))}{beside}"
                _refuse(op, each.name, expected, found.dtype, "cast it")
        if len(columns) > 1:
            seen.append(f"{each.name} of {read_dtype(value)}")


def read_dtype(value: Tensor | tuple[Tensor, ...]) -> str:
    """The dtype of a tensor, or of the first of a list."""
    return (value[0] if isinstance(value, tuple) else value).dtype


def _axes(op: Operation, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, int]:
    """The size of every word of the shapes; they agree among all tensors."""
    words = {name: value for name, value in plain.items() if _is_integer(value)}
    binders = {name: name for name in words}
    pairs: list[tuple[str, int, str, int]] = []
    for each in op.arguments:
        found = tensors.get(each.name)
        if found is None or not each.shape:
            continue
        form = _form(op, each, found, tensors, plain)
        for axis, (word, size) in enumerate(zip(form, found.shape, strict=True)):
            pairs.append((each.name, axis, word, size))
            if word.isidentifier() and word != "_" and word not in words:
                words[word], binders[word] = size, f"{each.name} {found.shape}"
    for name, axis, word, size in pairs:
        wanted = None if word == "_" else sized(word, words)
        if wanted is not None and wanted != size:
            names = [part for part in word.replace("+", "*").split("*") if part in binders]
            why = f" ({word}, by {', '.join(binders[part] for part in names)})" if names else ""
            _refuse(op, name, f"{wanted} long in axis {axis}{why}", f"{tensors[name]}")
    return words


def _form(
    op: Operation, argument: Argument, found: Tensor, tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> tuple[str, ...]:  # fmt: skip
    """The words of the form that this call has."""
    assert isinstance(argument.shape, str)
    choices = forms(argument.shape)
    form = choices[_which(op, tensors, plain) if len(choices) > 1 else 0]
    if len(form) != len(found.shape):
        why = f' as {op.form_by}="{plain[op.form_by]}" says' if op.form_by and choices[1:] else ""
        _refuse(op, argument.name, f"of {len(form)} axes [{', '.join(form)}]{why}", str(found))
    return form


def _which(op: Operation, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> int:
    """Which of several forms the call has: by an argument, or by the first tensor with several."""
    if op.form_by:
        choices = next(each.choices for each in op.arguments if each.name == op.form_by)
        return choices.index(plain[op.form_by])
    first = next(
        each for each in op.arguments
        if each.kind == "tensor" and each.name in tensors and "|" in str(each.shape)
    )  # fmt: skip
    ranks = [len(form) for form in forms(str(first.shape))]
    rank = len(tensors[first.name].shape)
    if rank not in ranks:
        wanted = " or ".join(map(str, ranks))
        _refuse(op, first.name, f"of {wanted} axes [{first.shape}]", str(tensors[first.name]))
    return ranks.index(rank)


def _allocated(op: Operation, device: Device, bound: Bound) -> Call:
    """The call in C order, with its results and what stands for tensors that were left out."""
    passed: list[tuple[Argument, Any]] = []
    results, held = [], []
    for each in op.arguments:
        if each.kind == "result":
            dtype = each.dtypes if isinstance(each.dtypes, str) else each.dtypes(bound)
            array = device.empty(_result_shape(op, each, bound), dtype)
            results.append(array)
            value = device.describe(array)
        elif each.derived is not None:
            value = each.derived(bound.tensors)
        elif each.kind == "tensor":
            value = bound.tensors.get(each.name)
            if value is None and each.hollow:
                assert isinstance(each.dtypes, str)
                held.append(device.empty((0,), each.dtypes))
                value = device.describe(held[-1])
        else:
            value = bound.given[each.name]
        passed.append((each, value))
    return Call(tuple(passed), tuple(results), tuple(held))


def _result_shape(op: Operation, argument: Argument, bound: Bound) -> tuple[int, ...]:
    if not isinstance(argument.shape, str):
        return argument.shape(bound)
    choices = forms(argument.shape)
    form = choices[_which(op, bound.tensors, bound.given) if len(choices) > 1 else 0]
    shape = tuple(sized(word, bound.axes) for word in form)
    assert None not in shape, f"{op.name}: the table does not bind {form} of {argument.name}"
    return tuple(size for size in shape if size is not None)
