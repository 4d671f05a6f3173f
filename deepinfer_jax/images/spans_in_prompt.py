"""Where images stand in a prompt: the places of a span, and what it takes (docs/model.md 12)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from deepinfer_jax.config import VisionConfig
from deepinfer_jax.images.pixels import Picture

if TYPE_CHECKING:
    from deepinfer_jax.images.features import Features


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image inside a prompt.

    `start` is the place of its first token, the start mark; from there on `span_length` places
    carry `cfg.image_token_id`. `picture` is the image, or what the encoder made of it.
    """

    start: int
    picture: Picture | Features


def span_length(height: int, width: int, vision: VisionConfig) -> int:
    """Places that an image of `height` x `width` patches takes in a prompt.

    A start mark, for every row of cells its cells and a newline mark, an end mark. A cell is a
    square of `downsample_ratio` patches a side; the last ones may be partly empty.
    """
    rows, columns = (-(-side // vision.downsample_ratio) for side in (height, width))
    return rows * (columns + 1) + 2
