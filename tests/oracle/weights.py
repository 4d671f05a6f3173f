"""Read and write safetensors of the released storage types, and dequantize them (docs/model.md 13).

A tensor file is a dict name -> (storage type, raw array). Raw arrays are what NumPy can hold:
BF16 as uint16, F8_E4M3 and F8_E8M0 as uint8, packed fp4 as int8, the others as themselves.
"""

import json
import lzma
import struct
from pathlib import Path

import numpy as np

from .quant import E2M1, E4M3

RAW = {
    "BF16": np.uint16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I8": np.int8,
    "U8": np.uint8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}

Tensors = dict[str, tuple[str, np.ndarray]]


def read_tensors(path: Path) -> Tensors:
    """Every tensor of one safetensors file; `path` may also exist as `path`.xz only."""
    if path.exists():
        data = path.read_bytes()
    else:
        data = lzma.decompress(path.with_name(path.name + ".xz").read_bytes())
    (header_size,) = struct.unpack("<Q", data[:8])
    body = 8 + header_size
    tensors = {}
    for name, entry in json.loads(data[8:body]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        raw = np.frombuffer(data[body + first : body + last], RAW[entry["dtype"]])
        tensors[name] = (entry["dtype"], raw.reshape(entry["shape"]))
    return tensors


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write one safetensors file; the inverse of `read_tensors`."""
    header, offset = {}, 0
    for name, (dtype, raw) in tensors.items():
        if raw.dtype != RAW[dtype]:
            raise ValueError(f"{name}: {dtype} is held as {RAW[dtype].__name__}, got {raw.dtype}")
        span = [offset, offset + raw.nbytes]
        header[name] = {"dtype": dtype, "shape": list(raw.shape), "data_offsets": span}
        offset += raw.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, raw in tensors.values():
            file.write(np.ascontiguousarray(raw).tobytes())


def widen(dtype: str, raw: np.ndarray) -> np.ndarray:
    """The numbers a raw array stands for, without any scale; integers stay integers."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        magnitudes = np.append(E4M3, np.nan).astype(np.float32)
        return np.where(raw & 0x80, np.float32(-1), np.float32(1)) * magnitudes[raw & 0x7F]
    if dtype == "F8_E8M0":
        return np.ldexp(np.float32(1), raw.astype(np.int32) - 127)
    return raw.astype(np.float32) if dtype == "F16" else raw


def unpack_fp4(packed: np.ndarray) -> np.ndarray:
    """int8 [out, in/2] -> float32 [out, in]; the low nibble is the even column."""
    byte = packed.view(np.uint8)
    code = np.stack([byte & 15, byte >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return np.where(code & 8, -1, 1).astype(np.float32) * E2M1[code & 7].astype(np.float32)


def _dequantize(name: str, dtype: str, raw: np.ndarray, scale: np.ndarray) -> np.ndarray:
    values = unpack_fp4(raw) if dtype == "I8" else widen(dtype, raw)
    rows, columns = values.shape
    spread = np.repeat(scale, 32, axis=1)[:, :columns]
    if dtype == "F8_E4M3" and not name.endswith("engram.embed.weight"):
        spread = np.repeat(spread, 32, axis=0)[:rows]  # linears: tiles of 32 x 32
    return values * spread


def dequantize(tensors: Tensors) -> dict[str, np.ndarray]:
    """Released-name tensors -> name -> array, scales multiplied in and their names gone.

    Every result is float32 and exact. An optional leading `model.` of the names is removed.
    """
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    weights = {}
    for name, (dtype, raw) in tensors.items():
        scale_name = name.removesuffix(".weight") + ".scale"
        if name.endswith(".scale"):
            continue
        if scale_name in tensors:
            weights[name] = _dequantize(name, dtype, raw, widen(*tensors[scale_name]))
        else:
            weights[name] = widen(dtype, raw).astype(np.float32)
    return weights


def read_values(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a data file (inputs, goldens), widened to float32 or its integer type."""
    return {name: widen(*tensor) for name, tensor in read_tensors(path).items()}


def read_folder(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and dequantized weights of a model folder with one `model.safetensors`."""
    config = json.loads((folder / "config.json").read_text())
    return config, dequantize(read_tensors(folder / "model.safetensors"))
