"""From the released layout to Orbax and back, with what stands beside the weights."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from deepinfer_jax import axes
from deepinfer_jax import params as parameters
from deepinfer_jax.axes import EXPERT, Rules
from deepinfer_jax.checkpoint import orbax, reading, shards, writing
from deepinfer_jax.config import ModelConfig

_SPLIT = (parameters.TABLE_ROWS, "expert", "vocab")
Kind = Literal["orbax", "released"]


def kind_of(folder: Path) -> Kind:
    """Which of the two a folder holds; FileNotFoundError where it is neither, ValueError: both."""
    released = any((folder / name).is_file() for name in (shards.SINGLE, shards.INDEX))
    saved = (folder / orbax.ITEM).is_dir()
    if released and saved:
        raise ValueError(f"{folder} holds a released checkpoint and Orbax's: move one of them away")
    if not released and not saved:
        raise FileNotFoundError(
            f"no checkpoint in {folder}: give a folder with {shards.SINGLE}, with {shards.INDEX}, "
            f"or with {orbax.ITEM}/ as save_orbax writes it"
        )
    return "released" if released else "orbax"


def convert(
    source: str | Path, folder: str | Path, onto: tuple[Mesh, Rules] | None = None,
    max_shard_bytes: int = 5 << 30,
) -> Kind:  # fmt: skip
    """Write the checkpoint of `source` in the other layout; returns which that is.

    Every bit stays. Files beside the weights (tokenizer, Engram token map, temperatures) are
    copied. With several processes all call it, and each holds and writes the part of its devices;
    only Orbax can be written by several.

    Args:
      source: a folder in the released layout, or as `save_orbax` writes it.
      folder: made if absent; must not hold a checkpoint yet.
      onto: mesh and rules that lay the weights out on their way; default: the default device.
      max_shard_bytes: as in `save_params`, for the released layout.

    Raises as the functions that read and write, before anything is written.
    """
    source, folder = Path(source), Path(folder)
    found = kind_of(source)
    cfg = ModelConfig.from_json(source)
    tree, how = parameters.abstract(cfg), None
    if onto is not None:
        tree, how = axes.padded(tree, *onto), axes.shardings(tree, *onto)
    if found == "released":
        orbax.require_free(folder)
        made: Kind = "orbax"
        orbax.save_orbax(reading.load_params(source, cfg, how, tree=tree), cfg, folder)
    else:
        if jax.process_count() > 1:
            raise ValueError(
                f"the released layout is written by one process, got {jax.process_count()}: "
                f"convert {source} in one"
            )
        writing.require_free(folder, cfg)
        made = "released"
        whole = orbax.restore_orbax(source, cfg, how, tree=tree)
        writing.save_params(whole, cfg, folder, max_shard_bytes)
    if jax.process_index() == 0:
        _copy_rest(source, folder)
    return made


def over_all(cfg: ModelConfig) -> tuple[Mesh, Rules]:
    """All devices of all processes, for weights that only pass through, and rules that split over
    them tables, experts and vocabulary, as far as their numbers allow.
    """
    mesh = axes.make_mesh({EXPERT: jax.device_count()})
    rules = Rules(padded=_SPLIT[:1])
    for name in _SPLIT:
        more = dataclasses.replace(rules, table=(*rules.table, (name, EXPERT)))
        try:
            axes.shardings(parameters.abstract(cfg), mesh, more)
        except ValueError:
            continue
        rules = more
    return mesh, rules


def _copy_rest(source: Path, folder: Path) -> None:
    """What is no weight and is not there yet."""
    for path in sorted(source.iterdir()):
        weights = path.name.startswith("model") and ".safetensors" in path.name
        if path.is_file() and not weights and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
