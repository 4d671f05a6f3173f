"""A table that stays in its file: rows are read when they are asked for, and no others."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Mapped:
    """A read-only array [rows, W] over the memory map of its shard, in place of a leaf.

    No transition takes it: `fetching` puts the rows of a call in its place. JAX refuses it by what
    `repr` says.
    """

    array: np.ndarray
    name: str

    def __repr__(self) -> str:
        return (
            f"Mapped({self.name!r} {self.array.dtype} {self.shape}: on disk; give the step "
            '`fetching.fetched(params, ...)`, or load with engram="device")'
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, W]."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """Of an entry."""
        return self.array.dtype

    @property
    def size(self) -> int:
        """Entries in all."""
        return self.array.size

    @property
    def nbytes(self) -> int:
        """Bytes in the file; none of them is in memory."""
        return self.array.nbytes

    def rows(self, index: np.ndarray) -> np.ndarray:
        """Rows at index [...]: [..., W]. Each is read from the file once, in the file's order."""
        wanted, place = np.unique(index, return_inverse=True)
        return self.array[wanted][place.reshape(index.shape)]
