"""A tensor as CANN's descriptors see it, and where its numbers come from.

The binding knows arrays through `Tensor` alone, so it needs neither torch nor numpy: a device
(`devices.Device`) says what the arrays of its kind are.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class DType:
    """code: CANN's aclDataType; bits: of one element."""

    code: int
    bits: int


# Names are those of numpy, ml_dtypes and torch; the codes are those of acl_base.h.
DTYPES: dict[str, DType] = {
    "float32": DType(0, 32),
    "float16": DType(1, 16),
    "int8": DType(2, 8),
    "int32": DType(3, 32),
    "uint8": DType(4, 8),
    "int16": DType(6, 16),
    "uint16": DType(7, 16),
    "uint32": DType(8, 32),
    "int64": DType(9, 64),
    "uint64": DType(10, 64),
    "float64": DType(11, 64),
    "bool": DType(12, 8),
    "bfloat16": DType(27, 16),
    "float8_e5m2": DType(35, 8),
    "float8_e4m3fn": DType(36, 8),
    "float8_e8m0fnu": DType(37, 8),
}

# aclFormat by the number of axes, as torch_npu's adapters give it to plain tensors; others are ND.
ND, NCHW, NHWC, NCDHW, NCL = 2, 0, 1, 30, 47
PLAIN_FORMATS = (ND, NCHW, NHWC, NCDHW, NCL)
_BY_RANK = {3: NCL, 4: NCHW, 5: NCDHW}


def plain_format(rank: int) -> int:
    """The aclFormat of a tensor of that many axes without an inner layout."""
    return _BY_RANK.get(rank, ND)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array without gaps, its last axis densest."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a descriptor is made of.

    pointer   address of the storage, before the offset
    shape     sizes of the axes
    strides   steps of the axes, in elements
    dtype     a name of DTYPES, or another, which is refused where it is used
    offset    elements between the storage's beginning and the first element
    elements  of the whole storage
    place     the device, as its library writes it: "npu:0", "cpu"
    layout    aclFormat of the memory, where it is known to be another than a plain one; None
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int
    elements: int
    place: str
    layout: int | None = None

    @property
    def address(self) -> int:
        """Of the first element."""
        return self.pointer + self.offset * DTYPES[self.dtype].bits // 8

    @property
    def format(self) -> int:
        """The aclFormat for the descriptor."""
        return plain_format(len(self.shape)) if self.layout is None else self.layout

    def is_dense(self, gaps: bool) -> bool:
        """Whether it has no gaps; with `gaps`, there may be some between entries of axis 0.

        The step of an axis of one entry is never taken, so it may be any.
        """
        wanted = contiguous_strides(self.shape)
        axes = range(1 if gaps else 0, len(self.shape))
        return 0 in self.shape or all(
            self.shape[axis] == 1 or self.strides[axis] == wanted[axis] for axis in axes
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def of_torch(array: Any, layout: int | None = None) -> Tensor:
    """The description of a torch tensor; torch is not imported for it."""
    storage = array.untyped_storage()
    return Tensor(
        pointer=storage.data_ptr(),
        shape=tuple(array.shape),
        strides=tuple(array.stride()),
        dtype=str(array.dtype).removeprefix("torch."),
        offset=array.storage_offset(),
        elements=storage.nbytes() // array.element_size(),
        place=str(array.device),
        layout=layout,
    )


def of_numpy(array: Any) -> Tensor:
    """The description of a numpy array: its own storage begins where its view does.

    For memory of the host, which only a stand-in for a device reads. Where an axis has one entry,
    numpy may say any step; here it is the one that a dense array has.
    """
    size = array.dtype.itemsize
    strides: tuple[int, ...] = ()
    for length, step in zip(reversed(array.shape), reversed(array.strides), strict=True):
        behind = strides[0] * array.shape[-len(strides)] if strides else 1
        strides = (step // size if length > 1 else behind, *strides)
    reach = sum((length - 1) * step for length, step in zip(array.shape, strides, strict=True))
    return Tensor(
        pointer=array.__array_interface__["data"][0],
        shape=tuple(array.shape),
        strides=strides,
        dtype=array.dtype.name,
        offset=0,
        elements=0 if 0 in array.shape else reach + 1,
        place="cpu",
    )
