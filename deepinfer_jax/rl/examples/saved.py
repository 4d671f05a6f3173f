"""Checkpoints of a training run with Orbax: weights and moments by path, one folder a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from deepinfer_jax import params as parameters
from deepinfer_jax.rl.examples.policy import State


def save(folder: Path, step: int, state: State) -> None:
    """Write `folder/step`: the state after `step` updates. What is there already is left alone."""
    target = folder.absolute() / str(step)
    if target.exists():
        return
    with _orbax().StandardCheckpointer() as checkpointer:
        checkpointer.save(target, parameters.by_path(state))


def steps(folder: Path) -> list[int]:
    """How many updates the checkpoints in `folder` are after, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def restore(folder: Path, step: int, like: State) -> State:
    """The state that `save` wrote, with the shapes of `like`."""
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for path, leaf in parameters.by_path(like).items()
    }
    with _orbax().StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(folder.absolute() / str(step), wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [found[path] for path in wanted])


def _orbax() -> Any:
    import orbax.checkpoint

    return orbax.checkpoint
