"""Reads golden folders: their safetensors files, their configuration, their modes.

Independent of the package under test on purpose: a misread byte in both would cancel out. Files may
be compressed (`NAME.xz`); both spellings are found.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import lzma
import shutil
import struct
from pathlib import Path
from typing import NoReturn

import ml_dtypes
import numpy as np
import pytest

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
PREFIX, SUFFIX = "golden_", ".safetensors"
HERE = Path(__file__).parent


class Arrays(dict[str, np.ndarray]):
    """Arrays by name, in the storage dtype of the file."""

    def wide(self, name: str) -> np.ndarray:
        """The array with floats widened to float32 and integers to int64 (both exact)."""
        value = self[name]
        if value.dtype.kind in "iub":
            return value.astype(np.int64)
        return value.astype(np.float32)

    def numbered(self, stem: str) -> dict[int, str]:
        """Names `stem.N` by N, ascending: one array per layer, draft layer or image."""
        names = [n for n in self if n.startswith(stem + ".")]
        tails = {n[len(stem) + 1 :]: n for n in names}
        return {t: tails[str(t)] for t in sorted(int(t) for t in tails if t.isdigit())}


def missing(root: Path, what: str) -> NoReturn:
    """Skip where a folder given with --golden-dir lacks something; this one must lack nothing."""
    if root == HERE:
        pytest.fail(f"no {what} in {root}: what it checked is unchecked now")
    pytest.skip(f"no {what} in {root}")


def find(folder: Path, name: str) -> Path | None:
    """`folder/name` or `folder/name.xz`, whichever exists."""
    for path in (folder / name, folder / f"{name}.xz"):
        if path.is_file():
            return path
    return None


def read(path: Path) -> Arrays:
    """All arrays of one safetensors file, compressed or plain."""
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    out = Arrays()
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(data[start:end], DTYPES[entry["dtype"]])
        out[name] = flat.reshape(entry["shape"])
    return out


@dataclasses.dataclass(frozen=True)
class Folder:
    """One model folder: `config.json`, `inputs`, `model`, and a golden file per numeric mode."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def modes(self) -> tuple[str, ...]:
        """Numeric modes recorded here, sorted: some of `fp32`, `fp32_kvq`, `native`."""
        names = [p.name.removesuffix(".xz") for p in self.path.glob(f"{PREFIX}*")]
        inner = {n[len(PREFIX) : -len(SUFFIX)] for n in names if n.endswith(SUFFIX)}
        return tuple(sorted(inner))

    def golden(self, mode: str) -> Arrays:
        """The recorded outputs of a mode."""
        return self._read(f"{PREFIX}{mode}{SUFFIX}")

    @property
    def inputs(self) -> Arrays:
        """Tokens, Engram constants, image patches."""
        return self._read(f"inputs{SUFFIX}")

    def unpacked_model(self, scratch: Path) -> Path:
        """A folder with `config.json` and a plain `model.safetensors`, for the package's loader."""
        packed = find(self.path, f"model{SUFFIX}")
        if packed is None or packed.suffix != ".xz":
            return self.path
        target = scratch / self.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.path / "config.json", target)
        (target / f"model{SUFFIX}").write_bytes(lzma.decompress(packed.read_bytes()))
        return target

    def _read(self, name: str) -> Arrays:
        path = find(self.path, name)
        if path is None:
            raise FileNotFoundError(f"no {name} or {name}.xz in {self.path}")
        return _cached(path)


@functools.cache
def _cached(path: Path) -> Arrays:
    return read(path)


def folders(root: Path) -> list[Folder]:
    """Model folders below `root`: those with a `config.json` and at least one golden file."""
    found = [Folder(p.parent) for p in sorted(root.glob("*/config.json"))]
    if (root / "config.json").is_file():
        found.append(Folder(root))
    return [f for f in found if f.modes]
