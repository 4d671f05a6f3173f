"""Round float32 tensors into the storage classes of `inventory`, scales beside them."""

import numpy as np

from .quant import E2M1, E4M3, nearest_code, power_of_two_above
from .weights import Tensors


def store(name: str, storage: str, values: np.ndarray) -> Tensors:
    """The raw tensors of one float32 tensor: itself, and `X.scale` for a scaled `X.weight`."""
    values = values.astype(np.float32)
    if storage == "F32":
        return {name: ("F32", values)}
    if storage == "BF":
        return {name: ("BF16", _bf16(values))}
    tile = (32, 32) if storage == "F8" else (1, 32)
    scale = _scales(values, tile, np.float32(6 if storage == "F4" else 448))
    spread = np.repeat(np.repeat(scale, tile[0], axis=0), tile[1], axis=1)
    scaled = values / spread[: values.shape[0], : values.shape[1]]
    exponents = (np.frexp(scale)[1] - 1 + 127).astype(np.uint8)
    raw = ("I8", _fp4(scaled)) if storage == "F4" else ("F8_E4M3", _code(scaled, E4M3, 7))
    return {name: raw, name.removesuffix(".weight") + ".scale": ("F8_E8M0", exponents)}


def _bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _scales(values: np.ndarray, tile: tuple[int, int], largest: np.float32) -> np.ndarray:
    """Smallest power of two per tile that brings every value within `largest`."""
    rows, columns = (-(-size // side) for size, side in zip(values.shape, tile, strict=True))
    padded = np.zeros((rows * tile[0], columns * tile[1]), np.float32)
    padded[: values.shape[0], : values.shape[1]] = np.abs(values)
    peaks = padded.reshape(rows, tile[0], columns, tile[1]).max(axis=(1, 3))
    return power_of_two_above(np.maximum(peaks, np.float32(1e-6)) / largest)


def _code(scaled: np.ndarray, grid: np.ndarray, sign_bit: int) -> np.ndarray:
    sign = np.signbit(scaled).astype(np.uint8) << sign_bit
    return nearest_code(np.abs(scaled), grid).astype(np.uint8) | sign


def _fp4(scaled: np.ndarray) -> np.ndarray:
    code = _code(scaled, E2M1, 3)
    return (code[:, 0::2] | (code[:, 1::2] << 4)).view(np.int8)
