"""Safetensors files over a memory map: every storage type of the release, nothing copied.

A file is an 8-byte little-endian header length, a JSON header (name -> storage, shape, byte range),
and the bytes of the tensors without holes. The common NumPy and JAX readers refuse F8 types, so the
header is parsed and checked here and the bytes are viewed through `ml_dtypes`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.whole_files import replacing

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_FILE_ORDER = {storage: rank for rank, storage in enumerate(DTYPES)}  # widest first: all aligned
_STORAGE = {dtype: storage for storage, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header; `start` and `stop` are byte offsets in the file."""

    storage: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0

    @property
    def dtype(self) -> np.dtype:
        """The NumPy type of one element as it is stored."""
        return DTYPES[self.storage]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, from its shape."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Shard:
    """An open file. The map lives as long as the shard or a view of it does."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    data: mmap.mmap = dataclasses.field(repr=False)

    def view(self, name: str) -> np.ndarray:
        """The tensor `name` as a read-only array over the map; no byte is read yet."""
        tensor = self.tensors[name]
        if tensor.start == tensor.stop:
            return np.empty(tensor.shape, tensor.dtype)
        count = math.prod(tensor.shape)
        flat = np.frombuffer(self.data, tensor.dtype, count, tensor.start)
        return flat.reshape(tensor.shape)

    def release(self, start: int, stop: int) -> None:
        """Drop the pages of a byte range from this process; a later access reads them again.

        Keeps the resident memory of a load at the result instead of the result plus the file.
        """
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            start -= start % mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, start, stop - start)


# -- reading ---------------------------------------------------------------------------------------


def open_shard(path: str | Path) -> Shard:
    """Map a file and check its whole header against its size.

    Raises:
      FileNotFoundError: no such file.
      ValueError: truncated, corrupt or of an unknown storage type; names the file and the fault.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no safetensors file at {path}")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            tensors, metadata = _read_header(file, size)
        except ValueError as error:
            raise ValueError(
                f"shard {path} is damaged or no safetensors file: {error}; fetch it again"
            ) from None
        return Shard(path, tensors, metadata, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def load(path: str | Path) -> dict[str, np.ndarray]:
    """Every tensor of one file by name, as read-only views over the map."""
    shard = open_shard(path)
    return {name: shard.view(name) for name in shard.tensors}


def _read_header(file: Any, size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    if size < 8:
        raise ValueError(f"{size} bytes, too short for a header length")
    length = int.from_bytes(file.read(8), "little")
    if length > min(_MAX_HEADER, size - 8):
        raise ValueError(f"header length {length} does not fit a file of {size} bytes")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    pairs = metadata.items() if isinstance(metadata, dict) else [(None, None)]
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in pairs):
        raise ValueError("__metadata__ must map strings to strings")
    tensors = {name: _entry(name, value, 8 + length) for name, value in header.items()}
    _check_layout(tensors, 8 + length, size)
    return tensors, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"its header names {twice!r} twice")
    return result


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _entry(name: str, value: Any, base: int) -> Tensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"entry {name!r} must have dtype, shape and data_offsets, got {value!r}")
    storage, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(storage, str) or storage not in DTYPES:
        raise ValueError(
            f"tensor {name!r} has unknown dtype {storage!r}; known: {', '.join(DTYPES)}"
        )
    if not _naturals(shape):
        raise ValueError(f"tensor {name!r} has shape {shape!r}, not a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has data_offsets {offsets!r}, not [start, stop]")
    tensor = Tensor(storage, tuple(shape), base + offsets[0], base + offsets[1])
    if tensor.stop - tensor.start != tensor.nbytes:
        raise ValueError(
            f"tensor {name!r} of {storage} {tensor.shape} needs {tensor.nbytes} bytes, "
            f"its data_offsets {offsets} give {tensor.stop - tensor.start}"
        )
    return tensor


def _check_layout(tensors: Mapping[str, Tensor], base: int, size: int) -> None:
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            kind = "overlaps the one before it" if tensor.start < end else "leaves a hole before it"
            raise ValueError(f"tensor {name!r} at byte {tensor.start} {kind}, which ends at {end}")
        end = tensor.stop
    if end != size:
        kind = "truncated" if end > size else "followed by unknown bytes"
        raise ValueError(f"{kind}: the header describes {end} bytes, the file has {size}")


# -- writing ---------------------------------------------------------------------------------------


def write(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one file, asking `read(name)` for one tensor at a time; equal input gives equal bytes.

    Tensors stand in order of storage width, then name, and the data starts at a multiple of 8, so
    that every tensor is aligned to its elements. The file has its name only once it is complete.

    Args:
      path: the file to make or replace.
      tensors: name -> storage and shape (byte offsets are ignored and computed here).
      read: gives the array of a name; bytes may stand in for one-byte storage.
      metadata: strings for the `__metadata__` entry.

    Raises:
      ValueError: `read` gave an array of another shape or element width; nothing is left behind.
    """
    path = Path(path)
    order = sorted(tensors, key=lambda name: (_FILE_ORDER[tensors[name].storage], name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": tensor.storage,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(_bytes_of(name, tensors[name], read(name)))


def save(
    path: str | Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays under their names in the storage of their dtype.

    Raises ValueError when a dtype has no storage name.
    """
    for name, array in arrays.items():
        if array.dtype not in _STORAGE:
            raise ValueError(f"array {name!r} of dtype {array.dtype} has no safetensors storage")
    tensors = {n: Tensor(_STORAGE[a.dtype], a.shape) for n, a in arrays.items()}
    write(path, tensors, lambda name: arrays[name], metadata)


def _bytes_of(name: str, tensor: Tensor, array: np.ndarray) -> np.ndarray:
    narrow = tensor.dtype.itemsize == 1 and array.dtype == np.uint8
    if array.shape != tensor.shape or not (array.dtype == tensor.dtype or narrow):
        raise ValueError(
            f"tensor {name!r} must be {tensor.storage} {tensor.shape}, "
            f"got {array.dtype} {array.shape}"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
