"""Where images stand in the tokens of a prompt (docs/images.md 3)."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.config import VisionConfig
from deepinfer_jax.images.features import Features
from deepinfer_jax.images.pixels import Picture


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image inside a prompt.

    `start` is the place of its first token, the start mark; from there on
    `spans.span_length(*grid_of(picture, vision))` places carry `cfg.image_token_id`. `picture` is
    the image, or what the encoder made of it.
    """

    start: int
    picture: Picture | Features


def grid_of(image: Picture | Features, vision: VisionConfig) -> tuple[int, int]:
    """(rows, columns) of the cells that an image has in a prompt.

    A cell is a square of `downsample_ratio` patches a side; the last ones may be partly empty.
    """
    if isinstance(image, Features):
        return image.height, image.width
    ratio = vision.downsample_ratio
    return -(-image.height // ratio), -(-image.width // ratio)
