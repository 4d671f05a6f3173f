"""What a call needs of the device: a stream, memory, and what the caller's arrays are."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from ascend.aclnn import tensors
from ascend.aclnn.errors import UnavailableError
from ascend.aclnn.sources import A2, A3, A5
from ascend.aclnn.tensors import Tensor

_MEND = (
    "install CANN, then torch-npu of the release that its notes name, by hand, and source CANN's "
    "set_env.sh"
)


class Device(Protocol):
    """A device for calls; everything on it happens in the order of one stream.

    Memory of `empty` may be given up by the caller while the stream still uses it: whoever gets it
    next must be behind on the same stream, as torch's allocators see to.
    """

    @property
    def chip(self) -> str:
        """Its name in CANN: "ascend950"."""
        ...

    @property
    def place(self) -> str:
        """What `Tensor.place` is for arrays of this device."""
        ...

    def stream(self) -> int:
        """The address of the current stream (aclrtStream)."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array of the device with any contents."""
        ...

    def describe(self, array: Any) -> Tensor:
        """What an array of the caller's is; TypeError for something that is none."""
        ...


def chip_of(name: str) -> str:
    """The name in CANN of a chip by the name of a device: "Ascend950PR_9599" -> "ascend950".

    Raises UnavailableError for one that the table says nothing about.
    """
    lowered = name.lower().replace(" ", "")
    for begin, chip in (("ascend950", A5), ("ascend910_93", A3), ("ascend910b", A2)):
        if lowered.startswith(begin):
            return chip
    raise UnavailableError(
        f"the table knows operations for {A2}, {A3} and {A5}; this device calls itself {name!r}"
    )


class NPU:
    """The current NPU of torch_npu, whose current stream and allocator it uses."""

    def __init__(self, torch: Any, torch_npu: Any) -> None:
        """torch, torch_npu: the modules; `npu()` imports them."""
        self._torch, self._npu = torch, torch_npu

    @property
    def chip(self) -> str:
        return chip_of(self._torch.npu.get_device_name())

    @property
    def place(self) -> str:
        return f"npu:{self._torch.npu.current_device()}"

    def stream(self) -> int:
        """Reading the address empties torch_npu's task queue, so a call comes after all of it."""
        return self._torch.npu.current_stream().npu_stream

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self.place)

    def describe(self, array: Any) -> Tensor:
        if not self._torch.is_tensor(array):
            raise TypeError(f"a torch tensor, not {type(array).__name__}")
        layout = self._npu.get_npu_format(array) if array.device.type == "npu" else None
        plain = layout is None or layout in tensors.PLAIN_FORMATS
        return tensors.of_torch(array, None if plain else layout)


def npu() -> NPU:
    """The NPU of this process; UnavailableError where torch_npu cannot be imported."""
    try:
        torch_npu, torch = (importlib.import_module(name) for name in ("torch_npu", "torch"))
    except (ImportError, OSError) as error:
        raise UnavailableError(f"no NPU can be reached: {error}; {_MEND}") from error
    return NPU(torch, torch_npu)
