"""How values of JAX's dtypes are kept in torch.

torch knows most of them. Unsigned integers of 16, 32 and 64 bits it can only store: they are kept
as the signed integer of the same width with the same bits. Addition, products, shifts to the left
and bitwise operations are then right as they are; whatever asks for the value itself (comparisons,
quotients, conversions) is told by `order` and `wide` what the bits mean.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_bridge.dlpack import import_torch

torch = import_torch()

_KEPT = {
    "bool": torch.bool, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32,
    "int64": torch.int64, "uint8": torch.uint8, "uint16": torch.int16, "uint32": torch.int32,
    "uint64": torch.int64, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float32": torch.float32, "float64": torch.float64, "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2, "float8_e8m0fnu": torch.float8_e8m0fnu,
}  # fmt: skip
_OF_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HIDDEN = ("uint16", "uint32", "uint64")


class DtypeError(TypeError):
    """A dtype that the executor has no torch dtype for."""


def kept(dtype: Any) -> Any:
    """The torch dtype that a JAX dtype is kept in; DtypeError where there is none."""
    found = _KEPT.get(jnp.dtype(dtype).name)
    if found is None:
        raise DtypeError(
            f"dtype must be one of {', '.join(_KEPT)} for the executor, got {jnp.dtype(dtype)}: "
            "carry it as packed uint8"
        )
    return found


def hidden(dtype: Any) -> bool:
    """Whether values of an (unsigned) dtype are kept as signed ones."""
    return jnp.dtype(dtype).name in _HIDDEN


def is_float(dtype: Any) -> bool:
    """Whether a JAX dtype is one of floating point, the small ones included."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_bool(dtype: Any) -> bool:
    """Whether a JAX dtype is that of truth values."""
    return jnp.dtype(dtype).kind == "b"


def lowest_bit_pattern(dtype: Any) -> int:
    """Of a hidden dtype: what, added, makes the signed order that of the unsigned values."""
    return -(1 << (jnp.dtype(dtype).itemsize * 8 - 1))


def smallest(dtype: Any) -> Any:
    """The least value of a dtype, as a number."""
    if is_bool(dtype):
        return False
    if is_float(dtype):
        return -np.inf
    return jnp.iinfo(dtype).min


def largest(dtype: Any) -> Any:
    """The largest value of a dtype, as a number."""
    if is_bool(dtype):
        return True
    if is_float(dtype):
        return np.inf
    return jnp.iinfo(dtype).max


def scalar(value: Any, dtype: Any, device: Any) -> Any:
    """One value of a JAX dtype as a tensor without dimensions."""
    return to_torch(np.asarray(value).astype(jnp.dtype(dtype)), device)


def to_torch(array: Any, device: Any) -> Any:
    """A tensor of its own on `device` with the values of an array of JAX or NumPy."""
    host = np.array(jax.device_get(array), order="C")  # a copy: nobody else may write into it
    dtype = kept(host.dtype)
    if host.dtype != bool:
        bits = f"uint{8 * host.dtype.itemsize}" if host.dtype.itemsize == 1 else (
            f"int{8 * host.dtype.itemsize}"
        )  # fmt: skip
        host = host.view(np.dtype(bits))
    made = torch.from_numpy(host)
    return (made if made.dtype == dtype else made.view(dtype)).to(device)


def to_numpy(tensor: Any, dtype: Any) -> np.ndarray:
    """The values of a tensor that keeps a JAX dtype, on the host: a copy, since the tensor may be
    overwritten once it is donated.
    """
    host = tensor.detach().cpu().contiguous()
    host = host.clone() if host.data_ptr() == tensor.data_ptr() else host
    if host.dtype == torch.bool:
        return host.numpy()
    return host.view(_OF_BITS[host.element_size()]).numpy().view(jnp.dtype(dtype))
