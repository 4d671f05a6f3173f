"""CANN's libraries at run time: where operations are looked for, and their functions by name."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend.aclnn.errors import UnavailableError

CUSTOM = Path("op_api") / "lib" / "libcust_opapi.so"
# Found by the system's loader: CANN's own operations, the functions for descriptors, the runtime.
OWN = ("libopapi.so", "libnnopbase.so", "libascendcl.so")
_PRIORITY = "load_priority="
_MEND = (
    "source CANN's set_env.sh; for operations that do not come with it, install their package and "
    "name its folder in ASCEND_CUSTOM_OPP_PATH"
)


def search_path(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Libraries in the order in which an operation is looked for, as torch_npu's adapters do.

    Packages of ASCEND_CUSTOM_OPP_PATH (`a:b`), vendors of ASCEND_OPP_PATH in the order of its
    vendors/config.ini, then CANN's own. Of the first two those that are there. The environment is
    an argument: programs pass `os.environ`, nothing below them reads it.
    """
    folders = [
        Path(each) for each in environment.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if each
    ]
    installed = environment.get("ASCEND_OPP_PATH")
    if installed:
        vendors = Path(installed) / "vendors"
        folders += [vendors / name for name in _vendors(vendors / "config.ini")]
    found = [str(folder / CUSTOM) for folder in folders if (folder / CUSTOM).is_file()]
    return (*dict.fromkeys(found), *OWN)


def _vendors(file: Path) -> list[str]:
    """Names of packages of operations, the most important first."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    line = next((each for each in lines if each.startswith(_PRIORITY)), _PRIORITY)
    return [name.strip() for name in line.removeprefix(_PRIORITY).split(",") if name.strip()]


class Library:
    """Opened libraries; what is looked up is kept, and nothing of it changes afterwards."""

    def __init__(self, paths: Sequence[str]) -> None:
        """paths: libraries in order; those that cannot be opened are remembered with the reason."""
        self._opened: list[tuple[str, ctypes.CDLL]] = []
        self._closed: list[str] = []
        self._functions: dict[str, Any] = {}
        for path in paths:
            try:
                self._opened.append((path, ctypes.CDLL(path, mode=os.RTLD_LAZY)))
            except OSError as error:
                self._closed.append(str(error))

    def function(self, name: str, restype: Any = ctypes.c_int, *argtypes: Any) -> Any:
        """A C function of the first library that has it; UnavailableError where none has."""
        return self._kept(name, (name,), restype, argtypes)[0]

    def operation(self, symbol: str) -> tuple[Any, Any]:
        """Both phases of an operation, of one library: the first that has both.

        An executor of one library's first phase means nothing to another's second.
        """
        pointer = ctypes.c_void_p
        first, second = self._kept(symbol, (f"{symbol}GetWorkspaceSize", symbol), ctypes.c_int, ())
        second.argtypes = (pointer, ctypes.c_uint64, pointer, pointer)
        return first, second

    def has(self, symbol: str) -> bool:
        """Whether an operation is there."""
        try:
            self.operation(symbol)
        except UnavailableError:
            return False
        return True

    def _kept(
        self, key: str, names: tuple[str, ...], restype: Any, argtypes: tuple[Any, ...]
    ) -> Any:
        if key not in self._functions:
            found = self._found(names)
            for each in found:
                each.restype = restype
                if argtypes:
                    each.argtypes = argtypes
            self._functions[key] = found
        return self._functions[key]

    def _found(self, names: tuple[str, ...]) -> tuple[Any, ...]:
        for _, library in self._opened:
            try:
                return tuple(getattr(library, name) for name in names)
            except AttributeError:
                continue
        opened = ", ".join(path for path, _ in self._opened) or "none that could be opened"
        closed = f" ({'; '.join(self._closed)})" if self._closed else ""
        raise UnavailableError(f"no library has {' and '.join(names)}: {opened}{closed}; {_MEND}")
