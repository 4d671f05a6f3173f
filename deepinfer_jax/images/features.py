"""What the tower and the aligner made of one picture."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np


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
