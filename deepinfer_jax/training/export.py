"""Masters to a model folder in the released storage formats."""

from __future__ import annotations

import functools
import pathlib
import shutil

import jax

from deepinfer_jax import checkpoint, resources
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Params
from deepinfer_jax.training import masters

TEXT_FILES = ("tokenizer.json", "engram_token_map.bin", "engram_token_map.json")
SHARD_BYTES = 6_000_000  # small, so that everybody runs the sharded path


def write(values: Params, cfg: ModelConfig, folder: pathlib.Path) -> None:
    """Write shards, index and config.json; exactly the weights that the last steps computed with.

    Raises FileExistsError where `folder` holds a checkpoint.
    """
    stored = jax.jit(functools.partial(masters.stored, cfg=cfg))(values)
    checkpoint.save_params(jax.device_get(stored), cfg, folder, max_shard_bytes=SHARD_BYTES)


def write_drafter(
    model: pathlib.Path, drafter: Params, cfg: ModelConfig, folder: pathlib.Path,
    shard_bytes: int = 5 << 30,
) -> None:  # fmt: skip
    """Write the checkpoint of the folder `model` with the drafter of the masters `drafter`.

    All other tensors are those of `model` in every bit. Raises FileExistsError as `write` does.
    """
    stored = jax.jit(functools.partial(masters.stored, cfg=cfg, part="draft"))(drafter)
    kept = checkpoint.load_params(model, cfg)
    checkpoint.save_params({**kept, "draft": stored}, cfg, folder, max_shard_bytes=shard_bytes)


def copy_text(folder: pathlib.Path) -> None:
    """Put the shipped tokenizer and its token map beside the weights: a folder that loads."""
    for name in TEXT_FILES:
        shutil.copyfile(resources.model_folder("spark-tiny") / name, folder / name)
