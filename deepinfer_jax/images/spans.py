"""Spans: the rows of one image inside a prompt (docs/model.md 12).

A span is START, then for every grid row its image rows and a NEWLINE, then END. All of it stands at
ordinary positions, and all of it has `rows.Rows.image` set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.images.features import Features

START, IMAGE, NEWLINE, END = 0, 1, 2, 3


def span_length(height: int, width: int) -> int:
    """Rows of the span of a grid of `height` rows and `width` columns.

    Raises ValueError for an empty grid.
    """
    if height < 1 or width < 1:
        raise ValueError(
            f"height and width of an image's grid must be at least 1, got {height} and {width}; "
            "a picture has at least one patch"
        )
    return height * (width + 1) + 2


def span_kinds(height: int, width: int) -> np.ndarray:
    """int32 [length]: START, IMAGE, NEWLINE or END for every row of the span."""
    kinds = np.full(span_length(height, width), IMAGE, np.int32)
    kinds[0], kinds[-1] = START, END
    kinds[1:-1].reshape(height, width + 1)[:, -1] = NEWLINE
    return kinds


def span_embeddings(vision: Mapping[str, Any], features: Features) -> np.ndarray | jax.Array:
    """[length, D] for `rows.Rows.embeddings`, of the dtype of the features.

    Image rows stand in their order, the delimiters are vectors of the model. Nothing is computed,
    so rows in the memory of the host stay there, and others may be traced.

    Args:
      vision: `params["vision"]`, for `image_start`, `image_newline` and `image_end`.
      features: of one picture.

    Raises:
      ValueError: rows of another number than the grid's, or of another width than the model's.
    """
    rows, (height, width) = features.rows, (features.height, features.width)
    want = (height * width, vision["image_start"].shape[0])
    if tuple(rows.shape) != want:
        raise ValueError(
            f"rows of features must be {want} for a grid of {height} x {width} and this model, "
            f"got {tuple(rows.shape)}; encode the picture with this model"
        )
    kinds = span_kinds(height, width)
    source = np.select(
        [kinds == IMAGE, kinds == START, kinds == NEWLINE],
        [np.cumsum(kinds == IMAGE, dtype=np.int32) - 1, len(rows), len(rows) + 1],
        len(rows) + 2,
    )
    delimiters = [vision[f"image_{name}"] for name in ("start", "newline", "end")]
    if isinstance(rows, np.ndarray):
        ends = np.stack([np.asarray(each) for each in delimiters])
        return np.concatenate([rows, ends.astype(rows.dtype)])[source]
    return jnp.concatenate([rows, jnp.stack(delimiters).astype(rows.dtype)])[source]
