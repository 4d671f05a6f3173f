"""What the tower and the aligner made of one picture, and files that keep it.

Features may be computed on other machines, stored, and fed to the model later. A file is named
after the contents of the picture and says what made it, so that features of another model, of other
numerics or of a damaged disk are refused instead of changing a reply.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import safetensors, summaries
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.params import Params, by_path


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["height", "width", "key"]
)
@dataclasses.dataclass(frozen=True)
class Features:
    """Image rows of one picture (docs/model.md 12).

    rows    [height * width, D] in row-major order, of the dtype of activations
    height  grid rows behind the aligner: a third of the picture's patch rows, rounded up
    width   grid columns, likewise
    key     of the picture (`Picture.key`): equal pictures have equal keys
    """

    rows: np.ndarray | jax.Array
    height: int
    width: int
    key: str

    __repr__ = summaries.of_fields


def check(features: Features) -> None:
    """Raise TypeError or ValueError for what cannot be features of any model."""
    sides, rows = (features.height, features.width), features.rows
    if any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise TypeError(f"height and width of features must be integers, got {sides!r}")
    if not isinstance(rows, np.ndarray | jax.Array) or not jnp.issubdtype(rows.dtype, jnp.floating):
        kind = getattr(rows, "dtype", type(rows).__name__)
        raise TypeError(f"rows of features must be an array of floating point, got {kind}")
    if min(sides) < 1 or rows.ndim != 2 or len(rows) != sides[0] * sides[1]:
        raise ValueError(
            f"rows of features must be [height * width, D] of a grid of at least one cell, got "
            f"{list(rows.shape)} for {sides[0]} x {sides[1]}; make them with encode_images"
        )


def check_fits(features: Features, cfg: ModelConfig, numerics: Numerics) -> None:
    """Raise ValueError for features of another width than the model's, or of another dtype.

    Rounded to that of the activations they would be those of no model.
    """
    want = (features.height * features.width, cfg.hidden_size)
    if tuple(features.rows.shape) != want:
        raise ValueError(
            f"rows of features must be {want} for a grid of {features.height} x {features.width} "
            f"and this model, got {tuple(features.rows.shape)}; encode the picture with this model"
        )
    if features.rows.dtype != jnp.dtype(numerics.dtype):
        raise ValueError(
            f"rows of features must be {numerics.dtype}, as activations are here, got "
            f"{features.rows.dtype}; encode the picture with these numerics"
        )


@dataclasses.dataclass(frozen=True)
class Origin:
    """What features are a function of, beside the picture, on one kind of device.

    model     sixteen hex digits that name sizes and weights of tower and aligner
    numerics  `Numerics.fingerprint`
    hidden    D, the width of a row
    """

    model: str
    numerics: str
    hidden: int


def origin_of(params: Params, cfg: ModelConfig, numerics: Numerics) -> Origin:
    """The origin of what `encode_images` makes with these arguments.

    Reads every weight of the tower once: keep it for as long as the weights stay.
    """
    digest = hashlib.sha256(repr(cfg.vision).encode())
    for path, leaf in by_path(params.get("vision", {})).items():
        array = np.ascontiguousarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return Origin(digest.hexdigest()[:16], numerics.fingerprint(), cfg.hidden_size)


def feature_path(folder: str | Path, key: str) -> Path:
    """Where the features of the picture `key` lie in a folder.

    Raises ValueError for a key that is none.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", key):
        raise ValueError(
            f"key must be the 64 hexadecimal digits of a picture (`Picture.key`), got {key!r}"
        )
    return Path(folder) / f"{key}.safetensors"


def save_features(folder: str | Path, features: Features, origin: Origin) -> Path:
    """Write features into a folder, which must exist, under the key of their picture.

    A file that is there already is replaced at once: readers see the old one or the new one.

    Raises ValueError where `features` are not of this origin's width, or without a key.
    """
    path = feature_path(folder, features.key)
    rows = np.asarray(features.rows)
    want = (features.height * features.width, origin.hidden)
    if rows.shape != want:
        raise ValueError(f"rows of features must be {want} of this model, got {rows.shape}")
    about = {
        "key": features.key,
        "height": str(features.height),
        "width": str(features.width),
        "model": origin.model,
        "numerics": origin.numerics,
        "rows": _digest(rows),
    }
    safetensors.save(path, {"rows": rows}, about)
    return path


def load_features(folder: str | Path, key: str, origin: Origin) -> Features:
    """Read the features of the picture `key`: the bits that were saved.

    Raises:
      FileNotFoundError: nobody saved them.
      ValueError: a damaged file, or features of another picture, model or numerics.
    """
    path = feature_path(folder, key)
    shard = safetensors.open_shard(path)
    said, mend = shard.metadata, "encode the picture with this model and save it again"
    for name, want in (("key", key), ("model", origin.model), ("numerics", origin.numerics)):
        if said.get(name) != want:
            raise ValueError(
                f"features in {path} are of {name} {said.get(name)!r}, expected {want!r}; {mend}"
            )
    if set(shard.tensors) != {"rows"} or not all(
        re.fullmatch(r"[1-9][0-9]{0,8}", said.get(side, "")) for side in ("height", "width")
    ):
        raise ValueError(f"{path} does not hold the features of one picture; {mend}")
    rows, height, width = np.array(shard.view("rows")), int(said["height"]), int(said["width"])
    if rows.shape != (height * width, origin.hidden) or _digest(rows) != said.get("rows"):
        raise ValueError(
            f"{path} is damaged: rows {rows.shape} for a grid of {height} x {width} and width "
            f"{origin.hidden}, or not the bytes that were saved; {mend}"
        )
    return Features(rows, height, width, key)


def _digest(rows: np.ndarray) -> str:
    data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    return hashlib.sha256(f"{rows.dtype}".encode() + data).hexdigest()
