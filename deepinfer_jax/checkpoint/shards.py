"""What tensors a checkpoint folder holds, in which file, and whether they are those of a config."""

from __future__ import annotations

import dataclasses
import hashlib
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from deepinfer_jax import safetensors, strict_json
from deepinfer_jax.params import Spec
from deepinfer_jax.safetensors import Shard, Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PREFIX = "model."
_LISTED = 10
_WHOLE, _PIECE = 1 << 22, 256  # bytes of a shard that its digest reads all of; of a tensor else
# A plain float tensor may be stored narrower than declared: these widen without rounding.
_WIDENS = {"F32": ("BF16", "F16", "F8_E4M3", "F8_E5M2"), "BF16": ("F8_E4M3", "F8_E5M2")}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint: which shard, under which name there."""

    shard: Shard
    name: str

    @property
    def tensor(self) -> Tensor:
        """Its shape, storage and place in the shard."""
        return self.shard.tensors[self.name]


def some(items: list[str], separator: str = ", ") -> str:
    """The first ten of a list for an error message, and how many more there are."""
    rest = f"{separator}and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return separator.join(items[:_LISTED]) + rest


def open_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by its name without the optional prefix `model.`.

    Raises:
      FileNotFoundError: neither a single file nor an index, or a shard of the index is absent.
      ValueError: a shard is damaged, or index and shards place a tensor differently.
    """
    placed = _weight_map(folder)
    files = [SINGLE] if placed is None else sorted(set(placed.values()))
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder} lacks shard(s) {some(absent)} of {INDEX}")
    stored: dict[str, Stored] = {}
    problems = []
    for file in files:
        shard = safetensors.open_shard(folder / file)
        for name in shard.tensors:
            plain = name.removeprefix(_PREFIX)
            if placed is not None and placed.pop(name, None) != file:
                problems.append(f"{file} holds {name}, which the index does not place there")
            if plain in stored:
                problems.append(f"{name} of {file} is also in {stored[plain].shard.path.name}")
            stored[plain] = Stored(shard, name)
    problems += [f"{file} lacks {name}" for name, file in (placed or {}).items()]
    if problems:
        raise ValueError(f"shards and index of {folder} disagree: {some(problems, '; ')}")
    return stored


def digest(folder: Path) -> str:
    """Sixteen hex digits that name the weights of a released checkpoint, without reading all of it.

    Of its config, and of every shard the size, the header and what `_sampled` takes: whoever trains
    or quantizes a tensor again changes its middle too. Raises as `open_folder` does.
    """
    found = hashlib.sha256((folder / "config.json").read_bytes())
    opened = {stored.shard.path.name: stored.shard for stored in open_folder(folder).values()}
    for name, shard in sorted(opened.items()):
        found.update(f"{name} {len(shard.data)} ".encode())
        for start, stop in _sampled(shard):
            found.update(shard.data[start:stop])
    return found.hexdigest()[:16]


def _sampled(shard: Shard) -> list[tuple[int, int]]:
    """Byte ranges of a shard that stand for it: all of a small one; of a large one the header and
    the middle of every tensor.
    """
    size = len(shard.data)
    if size <= _WHOLE:
        return [(0, size)]
    places = sorted((each.start, each.stop) for each in shard.tensors.values())
    return [(0, places[0][0])] + [
        (max(start, (start + stop - _PIECE) // 2), min(stop, (start + stop + _PIECE) // 2))
        for start, stop in places
    ]


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file of the index, or None for a single-file checkpoint."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if single.is_file():
            return None
        raise FileNotFoundError(f"no {SINGLE} and no {INDEX} in {folder}: give a checkpoint folder")
    if single.is_file():
        raise ValueError(f"{folder} has both {SINGLE} and {INDEX}: remove the stale one")
    placed = strict_json.read_object(index).get("weight_map")
    if not isinstance(placed, dict):
        raise ValueError(
            f"{index} is no index with an object 'weight_map', got {reprlib.repr(placed)}"
        )
    wrong = [f"{k!r}: {v!r}" for k, v in placed.items() if not _is_file_name(v)]
    if wrong:
        raise ValueError(f"{index} must map tensor names to file names, got {some(wrong)}")
    return placed


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value == Path(value).name and value not in ("", "..")


def check(folder: Path, specs: Iterable[Spec], stored: Mapping[str, Stored]) -> None:
    """Raise one ValueError that names the missing, extra and wrongly shaped or typed tensors."""
    extra = set(stored)
    missing, wrong = [], []
    for spec in specs:
        storages = (spec.storage, *_WIDENS.get(spec.storage, ()))
        for _, name in spec.tensors():
            if name not in stored:
                missing.append(name)
                continue
            extra.discard(name)
            tensor = stored[name].tensor
            if tensor.shape != spec.tensor_shape or tensor.storage not in storages:
                wrong.append(
                    f"{name} is {tensor.storage} {tensor.shape}, "
                    f"expected {spec.storage} {spec.tensor_shape}"
                )
    found = {"missing": missing, "not in the configuration": sorted(extra), "wrong": wrong}
    lines = [f"\n  {len(v)} {k}: {some(v, '; ')}" for k, v in found.items() if v]
    if lines:
        raise ValueError(
            f"checkpoint {folder} does not hold the tensors of its configuration:{''.join(lines)}"
        )
