"""Save and restore the parameter tree with Orbax: sharded, by every process its own part.

The released layout is for exchange; this one is for training state and for models that no single
process holds. Needs the extra `orbax`, which is imported on first use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax import params as parameters
from deepinfer_jax.checkpoint.reading import shardings_of
from deepinfer_jax.checkpoint.shards import some
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Params

ITEM = "params"
_SHARED_SLICE = 16 << 20


def save_orbax(params: Params, cfg: ModelConfig, folder: str | Path) -> None:
    """Write `folder/params` (Orbax) and `folder/config.json`; every process must call it.

    Raises:
      ImportError: the extra `orbax` is not installed.
      FileExistsError: the folder already holds parameters.
      ValueError: the tree does not fit `cfg`, but for Engram tables that are padded; lists the
        differences by path.
    """
    orbax = _orbax()
    folder = Path(folder).absolute()
    different = parameters.differences(params, cfg, padded=True)
    if different:
        raise ValueError(f"params do not fit the configuration: {some(different, '; ')}")
    require_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Orbax refuses arrays without elements (a model without compressors has some).
    leaves = {p: jnp.asarray(v) for p, v in parameters.by_path(params).items() if v.size}
    with _checkpointer(orbax) as checkpointer:
        checkpointer.save(folder / ITEM, orbax.args.PyTreeSave(leaves))
    if jax.process_index() == 0:
        text = json.dumps(cfg.to_dict(), indent=1, ensure_ascii=False)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def require_free(folder: Path) -> None:
    """FileExistsError where something was saved there, ImportError where Orbax is missing."""
    _orbax()
    if (folder / ITEM).exists():
        raise FileExistsError(f"{folder} already holds {ITEM}: choose an empty folder")


def restore_orbax(
    folder: str | Path, cfg: ModelConfig | None = None, sharding: Any = None, *,
    tree: Params | None = None,
) -> Params:  # fmt: skip
    """Read what `save_orbax` wrote, on any mesh.

    Args:
      folder: the folder given to `save_orbax`.
      cfg: the model; default is the folder's `config.json`.
      sharding: as in `load_params`; it need not be the one that the parameters were saved with.
      tree: the `Spec`s to make of them, whose Engram tables may be padded (`axes.padded`), however
        long the saved ones are; default `params.abstract(cfg)`.

    Raises:
      ImportError: the extra `orbax` is not installed.
      FileNotFoundError: nothing was saved there.
      ValueError: what was saved does not fit `cfg`; lists the differences by path.
    """
    orbax = _orbax()
    folder = Path(folder).absolute()
    if not (folder / ITEM).is_dir():
        raise FileNotFoundError(f"no {ITEM} in {folder}: give a folder written by save_orbax")
    cfg = ModelConfig.from_json(folder) if cfg is None else cfg
    tree = parameters.abstract(cfg) if tree is None else tree
    specs, structure = jax.tree.flatten(tree)
    default = jnp.zeros(()).sharding
    wanted = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=layout or default)
        for (path, spec), layout in zip(
            parameters.by_path(tree).items(), shardings_of(specs, structure, sharding), strict=True
        )
    }
    present = {path: leaf for path, leaf in wanted.items() if leaf.size}
    with _checkpointer(orbax) as checkpointer:
        saved = checkpointer.metadata(folder / ITEM).item_metadata.tree
        known = parameters.by_path(parameters.abstract(cfg))
        known = {path: spec for path, spec in known.items() if path in present}
        different = parameters.leaf_differences(saved, parameters.lengthened(known, saved))
        if different:
            raise ValueError(f"{folder} does not fit the configuration: {some(different, '; ')}")
        how = orbax.checkpoint_utils.construct_restore_args(present, strict=False)  # padding
        restored = checkpointer.restore(
            folder / ITEM, orbax.args.PyTreeRestore(present, restore_args=how)
        )
    leaves = [
        restored[path] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype)
        for path, leaf in wanted.items()
    ]
    return jax.tree.unflatten(structure, leaves)


def _checkpointer(orbax: Any) -> Any:
    """Replicas share the writing of large arrays only: each shape shared costs a compilation."""
    handlers = orbax.type_handlers
    arrays = handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_SHARED_SLICE)
    registry = handlers.create_type_handler_registry((jax.Array, arrays))
    return orbax.Checkpointer(orbax.PyTreeCheckpointHandler(type_handler_registry=registry))


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "saving with Orbax needs the extra 'orbax': pip install 'deepinfer-jax[orbax]'"
        ) from error
    return orbax.checkpoint
