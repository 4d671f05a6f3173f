"""Released safetensors shards to parameters, streaming.

The files are walked in order; each tensor is copied from the map into its place in the stacked
leaf: on CPU into memory that the array then owns, on accelerators piece by piece into the device's
buffer. At no time does the host hold more than the result and a few pieces. Quantized storage stays
as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from deepinfer_jax import params as parameters
from deepinfer_jax.checkpoint import shards
from deepinfer_jax.checkpoint.mapped import Mapped
from deepinfer_jax.checkpoint.shards import Stored
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Params, Spec

_PIECE = 64 << 20  # bytes copied before their pages are dropped
_ALIGN = 64  # XLA adopts host memory at this alignment instead of copying it
PINNED = "pinned_host"
Ranges = tuple[tuple[int, int], ...]
Engram = Literal["device", "pinned", "mapped"]


@dataclasses.dataclass(frozen=True)
class _Region:
    """The part of leaf number `leaf` that `devices` hold (None: the default one, uncommitted).

    kind: which of their memories it goes to; None: the one that arrays usually are in.
    """

    leaf: int
    ranges: Ranges
    devices: tuple[Any, ...]
    kind: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges)


def load_params(
    folder: str | Path, cfg: ModelConfig | None = None, sharding: Any = None, *,
    tree: Params | None = None, engram: Engram = "device",
) -> Params:  # fmt: skip
    """Read a checkpoint in the released layout.

    Args:
      folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards. Names may
        carry the prefix `model.`; a plain float tensor may be stored narrower than declared.
      cfg: the model; default is the folder's `config.json`.
      sharding: None (the default device), one `Sharding`, a function from `Spec` to `Sharding`, or
        a tree of them as `axes.shardings` gives. A process reads only what its devices hold.
      tree: what to make of the tensors, a tree of `Spec` with the paths of `params.abstract(cfg)`:
        leaves may be longer (the rest is zeros) and take tensors in another order or twice.
      engram: where the Engram tables go (docs/checkpoints.md 4): "device", "pinned" (memory of the
        host that the devices reach), "mapped" (they stay in the files: `Mapped` leaves).

    Returns:
      The tree of `params.abstract(cfg)` with arrays of the declared dtypes.

    Raises:
      FileNotFoundError: no checkpoint, or a shard of the index is absent.
      ValueError: a shard is damaged, the index contradicts it, the tensors are not those of `cfg`
        (one message lists missing, extra and wrong ones), a sharding does not divide a leaf, or the
        devices have no pinned memory.
    """
    folder = Path(folder)
    cfg = ModelConfig.from_json(folder) if cfg is None else cfg
    specs, structure = jax.tree.flatten(parameters.abstract(cfg) if tree is None else tree)
    placed = shardings_of(specs, structure, sharding)
    stored = shards.open_folder(folder)
    shards.check(folder, parameters.specs(cfg), stored)
    tables = [is_table(spec) for spec in specs]
    if engram == "pinned":
        placed = [_pinned(how) if table else how for how, table in zip(placed, tables, strict=True)]
    left = [table and engram == "mapped" for table in tables]
    regions = [[] if left[i] else _regions(i, spec, placed[i]) for i, spec in enumerate(specs)]
    buffers = _fill(specs, regions, stored)
    leaves = []
    for i, spec in enumerate(specs):
        parts = [array for region in regions[i] for array in _arrays(region, buffers.pop(region))]
        how = placed[i]
        if left[i]:
            leaves.append(_view(spec, stored))
        else:
            leaves.append(parts[0] if how is None else _joined(spec, how, parts))
    return jax.tree.unflatten(structure, leaves)


# -- Engram tables ---------------------------------------------------------------------------------


def is_table(spec: Spec) -> bool:
    """Whether it is codes or scales of an Engram table, of which a row is read at a time."""
    return spec.axes[0] == parameters.TABLE_ROWS


def _pinned(how: Sharding | None) -> Sharding:
    """The same layout in memory of the host; ValueError where the backend has none to pin."""
    default = SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
    how = default if how is None else how
    for device in how.device_set:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if PINNED not in kinds:
            raise ValueError(
                f'engram="pinned" needs devices with memory {PINNED!r}, those of '
                f'{device.platform!r} have {kinds}: use "mapped" or "device"'
            )
    return how.with_memory_kind(PINNED)


def _view(spec: Spec, stored: Mapping[str, Stored]) -> Mapped:
    ((_, name),) = spec.tensors()
    source = stored[name]
    return Mapped(_as_declared(source.shard.view(source.name), spec.dtype), name)


# -- which part goes where -------------------------------------------------------------------------


def shardings_of(specs: list[Spec], structure: Any, sharding: Any) -> list[Sharding | None]:
    """One sharding per leaf, from any of the forms that `load_params` takes."""
    if sharding is None or isinstance(sharding, Sharding):
        return [sharding for _ in specs]
    if callable(sharding):
        placed: list[Any] = [sharding(spec) for spec in specs]
        return placed
    leaves, given = jax.tree.flatten(sharding)
    if given != structure:
        raise ValueError(
            "sharding must be None, a Sharding, a function of a Spec, or a tree like "
            "axes.shardings(params.abstract(cfg), mesh, rules) of the same config; got a tree "
            f"{given}"
        )
    return leaves


def _regions(leaf: int, spec: Spec, sharding: Sharding | None) -> list[_Region]:
    if sharding is None:
        return [_Region(leaf, tuple((0, n) for n in spec.shape), (None,))]
    try:
        where = sharding.addressable_devices_indices_map(spec.shape)
    except ValueError as error:
        raise ValueError(
            f"{spec.template}: {sharding} does not fit {spec.shape}: {error}"
        ) from None
    holders: dict[Ranges, list[Any]] = {}
    for device, index in where.items():
        slices = index or (slice(None),) * len(spec.shape)
        ranges = tuple(s.indices(n)[:2] for s, n in zip(slices, spec.shape, strict=True))
        holders.setdefault(ranges, []).append(device)
    kind = None if sharding.memory_kind == "device" else sharding.memory_kind
    return [_Region(leaf, ranges, tuple(devices), kind) for ranges, devices in holders.items()]


def _joined(spec: Spec, sharding: Sharding, parts: list[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, parts, dtype=spec.dtype)


# -- copying ---------------------------------------------------------------------------------------


def _fill(
    specs: list[Spec], regions: list[list[_Region]], stored: Mapping[str, Stored]
) -> dict[_Region, Any]:
    """The buffer of every region, filled in the order of the files."""
    default = next(iter(jnp.zeros(()).devices())).platform
    writers, buffers = {}, {}
    for region in (r for own in regions for r in own):
        on_cpu = all((d.platform if d else default) == "cpu" for d in region.devices)
        make, writers[region] = _HOST if on_cpu or region.kind == PINNED else _DEVICE
        buffers[region] = make(region, specs[region.leaf].dtype)
        if isinstance(buffers[region], np.ndarray) and _padded(specs[region.leaf], stored):
            buffers[region].fill(0)
    sources = [
        (stored[name], leaf, index)
        for leaf, spec in enumerate(specs)
        for index, name in spec.tensors()
    ]
    sources.sort(key=lambda source: (source[0].shard.path.name, source[0].tensor.start))
    for source, leaf, index in sources:
        for region in regions[leaf]:
            for start, piece in _pieces(source, index, region.ranges):
                values = _as_declared(piece, specs[leaf].dtype)
                buffers[region] = writers[region](buffers[region], start, values)
    return buffers


def _padded(spec: Spec, stored: Mapping[str, Stored]) -> bool:
    """Whether the leaf has entries beyond those of its tensors."""
    names = [name for _, name in spec.tensors()]
    whole = math.prod(spec.shape[: len(spec.stack)])
    return len(names) < whole or any(stored[n].tensor.shape != spec.tensor_shape for n in names[:1])


def _pieces(
    source: Stored, index: tuple[int, ...], ranges: Ranges
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """(place in the region, values) of a tensor's part in a region; values have leading axes of 1.

    The pages of a piece leave this process's memory when the next piece is asked for.
    """
    lead, inner = ranges[: len(index)], ranges[len(index) :]
    if not all(start <= i < stop for i, (start, stop) in zip(index, lead, strict=True)):
        return
    tensor, view = source.tensor, source.shard.view(source.name)
    (first, last), columns = inner[0], tuple(slice(*r) for r in inner[1:])
    last = min(last, tensor.shape[0])  # what is beyond is padding
    row = tensor.nbytes // max(1, tensor.shape[0])
    step = max(1, _PIECE // max(1, row))
    place = tuple(i - start for i, (start, _) in zip(index, lead, strict=True))
    for begin in range(first, last, step):
        end = min(begin + step, last)
        piece = view[(slice(begin, end), *columns)]
        yield (*place, begin - first, *(0 for _ in columns)), piece[(None,) * len(index)]
        source.shard.release(tensor.start + begin * row, tensor.start + end * row)


def _as_declared(piece: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Codes as bytes; floats in the declared dtype, which only ever widens them."""
    return piece.view(dtype) if dtype == np.uint8 else piece.astype(dtype, copy=False)


def _host_buffer(region: _Region, dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that `jax.device_put` on a CPU device adopts without a copy."""
    size = math.prod(region.shape) * dtype.itemsize
    raw = np.empty(size + _ALIGN, np.uint8)
    offset = -raw.ctypes.data % _ALIGN
    return raw[offset : offset + size].view(dtype).reshape(region.shape)


def _host_write(buffer: np.ndarray, start: tuple[int, ...], piece: np.ndarray) -> np.ndarray:
    buffer[tuple(slice(s, s + n) for s, n in zip(start, piece.shape, strict=True))] = piece
    return buffer


def _device_buffer(region: _Region, dtype: np.dtype) -> list[jax.Array]:
    return [jnp.zeros(region.shape, dtype, device=device) for device in region.devices]


def _device_write(
    buffers: list[jax.Array], start: tuple[int, ...], piece: np.ndarray
) -> list[jax.Array]:
    """Copy a piece to every holder and wait, so that only one is staged in host memory."""
    place = np.asarray(start, np.int32)
    return jax.block_until_ready([_overwrite(buffer, piece, place) for buffer in buffers])


@functools.partial(jax.jit, donate_argnums=0)
def _overwrite(buffer: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(buffer, piece, tuple(start))


_HOST, _DEVICE = (_host_buffer, _host_write), (_device_buffer, _device_write)


def _arrays(region: _Region, buffer: Any) -> list[jax.Array]:
    """One array per holder; host memory is adopted, so it must not be written any more."""
    if isinstance(buffer, list):
        return buffer
    kind = region.kind
    if kind is None:
        return [jax.device_put(buffer, device, may_alias=True) for device in region.devices]
    wanted = (SingleDeviceSharding(device, memory_kind=kind) for device in region.devices)
    return [jax.device_put(buffer, each, may_alias=True) for each in wanted]
