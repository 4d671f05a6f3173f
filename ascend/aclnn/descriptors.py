"""CANN's descriptors of operands: made before a call, destroyed once behind it, come what may."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

from ascend.aclnn.errors import CallFailedError, UnavailableError
from ascend.aclnn.library import Library
from ascend.aclnn.operations import Argument
from ascend.aclnn.tensors import DTYPES, Tensor

_Pointer = ctypes.c_void_p
_Int64s = ctypes.POINTER(ctypes.c_int64)
_DIMS = (_Int64s, ctypes.c_uint64)
_CREATE: dict[str, tuple[Any, ...]] = {
    # shape, dtype, strides, offset, format, shape of the storage, its address
    "Tensor": (*_DIMS, ctypes.c_int, _Int64s, ctypes.c_int64, ctypes.c_int, *_DIMS, _Pointer),
    "TensorList": (ctypes.POINTER(_Pointer), ctypes.c_uint64),
    "IntArray": _DIMS,
    "Scalar": (_Pointer, ctypes.c_int),
}
# Python's type, C's, and the dtype of the aclScalar; True is an int, too.
_SCALARS: tuple[tuple[type, tuple[Any, str]], ...] = (
    (bool, (ctypes.c_bool, "bool")),
    (int, (ctypes.c_int64, "int64")),
    (float, (ctypes.c_double, "float64")),
)


class Descriptors:
    """Descriptors of one call, destroyed at the end of the `with` block, the last made first.

    Raises CallFailedError where one cannot be made, or, unless another error is on its way, cannot
    be destroyed.
    """

    def __init__(self, library: Library, operation: str) -> None:
        self._library, self._operation = library, operation
        self._made: list[tuple[str, int, str]] = []  # kind, address, argument

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        refused: list[tuple[int, str]] = []
        while self._made:
            kind_of, address, argument = self._made.pop()
            destroy = self._library.function(f"aclDestroy{kind_of}", ctypes.c_int, _Pointer)
            status = destroy(address)
            if status:
                refused.append((status, argument))
        if refused and error is None:
            status, argument = refused[0]
            raise CallFailedError(
                self._operation, "release", status, message(self._library), argument
            )

    def converted(self, argument: Argument, value: Any) -> Any:
        """The C value of an argument, for the first phase."""
        name = argument.name
        if argument.kind in ("tensor", "result"):
            return _Pointer(None if value is None else self._tensor(value, name))
        if argument.kind == "tensors":
            return _Pointer(self._list(value, name))
        if argument.kind == "integers":
            return _Pointer(self._create("IntArray", name, _int64s(value), len(value)))
        if argument.kind == "scalar":
            kind, dtype = next(c for python, c in _SCALARS if isinstance(value, python))
            return _Pointer(
                self._create("Scalar", name, ctypes.byref(kind(value)), DTYPES[dtype].code)
            )
        if argument.kind == "text":
            return ctypes.c_char_p(value.encode("ascii"))
        return {"integer": ctypes.c_int64, "real": ctypes.c_double, "flag": ctypes.c_bool}[
            argument.kind
        ](value)

    def _tensor(self, value: Tensor, name: str) -> int:
        rank = len(value.shape)
        return self._create(
            "Tensor", name,
            _int64s(value.shape), rank, DTYPES[value.dtype].code,
            _int64s(value.strides), value.offset, value.format,
            _int64s((value.elements,)), 1, value.pointer,
        )  # fmt: skip

    def _list(self, values: tuple[Tensor, ...], name: str) -> int:
        """A list owns its tensors from when it is made: destroying it destroys them."""
        before = len(self._made)
        members = [self._tensor(each, f"{name}[{i}]") for i, each in enumerate(values)]
        address = self._create(
            "TensorList", name, (_Pointer * len(members))(*members), len(members)
        )
        del self._made[before:-1]
        return address

    def _create(self, kind: str, argument: str, *values: Any) -> int:
        create = self._library.function(f"aclCreate{kind}", _Pointer, *_CREATE[kind])
        # What could not be destroyed is not made.
        self._library.function(f"aclDestroy{kind}", ctypes.c_int, _Pointer)
        address = create(*values)
        if not address:
            raise CallFailedError(
                self._operation, "descriptor", 0, message(self._library), argument
            )
        self._made.append((kind, address, argument))
        return address


def _int64s(values: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def message(library: Library) -> str:
    """CANN's message about the last error of this thread, "" where it has none to give."""
    try:
        said = library.function("aclGetRecentErrMsg", ctypes.c_char_p)()
    except UnavailableError:  # the error itself is what to tell
        return ""
    return said.decode("utf-8", "replace").strip() if said else ""
