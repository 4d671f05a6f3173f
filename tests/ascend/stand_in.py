"""A stand-in for CANN and its device: libraries in C that record calls, memory of the host."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np

from ascend import aclnn
from kernels_bridge import building

SOURCES = Path(__file__).with_name("stub")
STREAM = 0x5EED0
FLAGS = ("-x", "c", "-shared", "-fPIC", "-Wall", "-Werror")


@dataclasses.dataclass(frozen=True)
class Stub:
    """The libraries: `base` is CANN's own, `custom` and `half` are packages of operations."""

    base: Path
    custom: Path
    half: Path

    @property
    def _functions(self) -> ctypes.CDLL:
        library = ctypes.CDLL(str(self.base))
        library.stub_log.restype = ctypes.c_char_p
        return library

    def reset(self, fails: str = "", status: int = 0) -> None:
        """Forget what was called; from now on the functions of these names fail."""
        self._functions.stub_reset(fails.encode(), status)

    def log(self) -> list[str]:
        """What was called since."""
        return self._functions.stub_log().decode().splitlines()

    def living(self) -> int:
        """Descriptors that were made and not destroyed."""
        return self._functions.stub_alive()

    def executors(self) -> int:
        """Executors of a first phase that neither a second one nor a destruction took over."""
        return self._functions.stub_executors()

    def wrong(self) -> int:
        """Destructions of what was destroyed, or of another kind."""
        return self._functions.stub_wrong()


def build(folder: Path) -> Stub:
    """Compile the libraries into `folder`, laid out as packages of operations are."""
    base = folder / "libopapi.so"
    packages = [folder / name / aclnn.library.CUSTOM for name in ("custom", "half")]
    for package in packages:
        package.parent.mkdir(parents=True)
    _compile(SOURCES / "base.c", base)
    beside = ("-x", "none", str(base), f"-Wl,-rpath,{folder}")
    _compile(SOURCES / "custom.c", packages[0], *beside)
    _compile(SOURCES / "half.c", packages[1])
    return Stub(base, *packages)


def _compile(source: Path, library: Path, *more: str) -> None:
    command = [building.find_compiler(), *FLAGS, str(source), *more, "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)


class Host:
    """A device in the host's memory: what `ascend.aclnn.Device` asks for."""

    place = "cpu"

    def __init__(self, chip: str = "ascend950") -> None:
        self.chip = chip
        self.made: list[tuple[tuple[int, ...], str]] = []

    def stream(self) -> int:
        return STREAM

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        self.made.append((shape, dtype))
        return zeros(shape, dtype)

    def describe(self, array: object) -> aclnn.Tensor:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"a numpy array, not {type(array).__name__}")
        return aclnn.of_numpy(array)


def zeros(shape: tuple[int, ...], dtype: str, shift: int = 0) -> np.ndarray:
    """An array that begins `shift` bytes behind a multiple of 64."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.zeros(size + 128, np.uint8)
    begin = -memory.__array_interface__["data"][0] % 64 + shift
    return memory[begin : begin + size].view(kind).reshape(shape)
