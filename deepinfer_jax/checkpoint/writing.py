"""Parameters to the released safetensors layout: shards, index, configuration."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax import params as parameters
from deepinfer_jax import safetensors
from deepinfer_jax.checkpoint.shards import INDEX, SINGLE, some
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Params
from deepinfer_jax.safetensors import Tensor

_METADATA = {"format": "pt"}  # what PyTorch loaders look for


def save_params(
    params: Params, cfg: ModelConfig, folder: str | Path, max_shard_bytes: int = 5 << 30
) -> None:
    """Write a checkpoint in the released layout with its `config.json`; it reads back bit for bit.

    A block without its Engram, the Engram of a layer, and a draft block each stay in one file, so
    the experts of a layer never straddle two. Files are filled in the order of the release; a unit
    larger than the limit has a file of its own. A single file needs no index. One tensor at a time
    is held in memory, and the folder receives the files only when all are written.

    Args:
      params: the tree of `params.abstract(cfg)`, of JAX or NumPy arrays; rows that pad an Engram
        table are left out.
      cfg: its configuration.
      folder: made if absent; must not hold a checkpoint yet.
      max_shard_bytes: bytes of tensors per file to stay below.

    Raises:
      FileExistsError: the folder holds a checkpoint, or the `config.json` of another model.
      ValueError: the tree does not fit `cfg` (differences by path), or other processes hold a part.
    """
    folder = Path(folder)
    _require_fit(params, cfg)
    require_free(folder, cfg)
    sources = {
        name: (leaf, index, Tensor(spec.storage, spec.tensor_shape))
        for leaf, spec in zip(jax.tree.leaves(params), parameters.specs(cfg), strict=True)
        for index, name in spec.tensors()
    }
    tensors = {name: tensor for name, (_, _, tensor) in sources.items()}
    files = _split(tensors, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as scratch:
        for file, names in files.items():
            safetensors.write(
                Path(scratch, file),
                {name: tensors[name] for name in names},
                lambda name: _tensor(*sources[name][:2])[: tensors[name].shape[0]],
                _METADATA,
            )
        _finish(Path(scratch), folder, cfg, tensors, files)


def _require_fit(params: Params, cfg: ModelConfig) -> None:
    different = parameters.differences(params, cfg, padded=True)
    if different:
        raise ValueError(f"params do not fit the configuration: {some(different, '; ')}")
    for path, leaf in parameters.by_path(params).items():
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"{path} is partly held by other processes: use save_orbax")


def require_free(folder: Path, cfg: ModelConfig) -> None:
    """FileExistsError where the folder holds a checkpoint, or the config of another model."""
    found = sorted(path.name for path in folder.glob("model*.safetensors*"))
    if found:
        raise FileExistsError(f"{folder} already holds {some(found)}: choose an empty folder")
    if (folder / "config.json").exists() and ModelConfig.from_json(folder) != cfg:
        raise FileExistsError(f"{folder}/config.json is another model's: choose an empty folder")


def _unit(name: str) -> tuple[int, int]:
    """What a tensor stays together with, as a sort key: the order of the released shards."""
    match = re.match(r"(layers|mtp)\.(\d+)\.(engram\.)?", name)
    if match:
        group = 5 if match[3] else (2 if match[1] == "layers" else 4)
        return group, int(match[2])
    if re.match(r"vision\.|aligner\.|image_", name):
        return 0, 0
    return (1, 0) if name.startswith("embed.") else (3, 0)


def _split(tensors: Mapping[str, Tensor], limit: int) -> dict[str, list[str]]:
    """File name -> tensor names: units in order, a new file where the next would pass the limit."""
    units: dict[tuple[int, int], list[str]] = {}
    for name in tensors:
        units.setdefault(_unit(name), []).append(name)
    groups: list[list[str]] = []
    used = 0
    for _, names in sorted(units.items()):
        size = sum(tensors[name].nbytes for name in names)
        if not groups or used + size > limit:
            groups.append([])
            used = 0
        groups[-1] += names
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _tensor(leaf: Any, index: tuple[int, ...]) -> np.ndarray:
    """One tensor of a stacked leaf on the host, put together from the devices that hold it."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf[index])
    whole: np.ndarray | None = None
    for shard in leaf.addressable_shards:
        ranges = [s.indices(n)[:2] for s, n in zip(shard.index, leaf.shape, strict=True)]
        lead, inner = ranges[: len(index)], ranges[len(index) :]
        if not all(start <= i < stop for i, (start, stop) in zip(index, lead, strict=True)):
            continue
        local = tuple(i - start for i, (start, _) in zip(index, lead, strict=True))
        on_cpu = shard.device.platform == "cpu"  # a view there; elsewhere only the tensor travels
        part = np.asarray(shard.data)[local] if on_cpu else np.asarray(shard.data[local])
        if part.shape == leaf.shape[len(index) :]:
            return part
        whole = np.empty(leaf.shape[len(index) :], leaf.dtype) if whole is None else whole
        whole[tuple(slice(*r) for r in inner)] = part
    if whole is None:
        raise ValueError(f"no device holds tensor {index} of an array {leaf.shape}")
    return whole


def _finish(
    scratch: Path,
    folder: Path,
    cfg: ModelConfig,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, list[str]],
) -> None:
    """Put the files into place, the index last: a folder with an index is complete."""
    if not (folder / "config.json").exists():
        (scratch / "config.json").write_text(_json(cfg.to_dict()), encoding="utf-8")
    for path in sorted(scratch.iterdir()):
        path.replace(folder / path.name)
    if len(files) == 1:
        return
    placed = {name: file for file, names in files.items() for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (scratch / INDEX).write_text(_json(index), encoding="utf-8")
    (scratch / INDEX).replace(folder / INDEX)


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
