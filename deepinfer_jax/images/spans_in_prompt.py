"""Where images stand in the tokens of a prompt (docs/images.md 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deepinfer_jax.config import VisionConfig
from deepinfer_jax.images import spans
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


def places_of(image: ImageSpan, vision: VisionConfig) -> range:
    """The places of its span."""
    return range(image.start, image.start + spans.span_length(*grid_of(image.picture, vision)))


def place_images(
    tokens: Sequence[int], images: Sequence[Picture | Features], token: int, vision: VisionConfig
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """(`tokens` with the span of each image in the place of its one `token`, the spans).

    Raises ValueError where there are more or fewer such tokens than images.
    """
    places = sum(each == token for each in tokens)
    if places != len(images):
        raise ValueError(
            f"the prompt has {places} places of images (token {token}) and {len(images)} images "
            "are given: each image needs one place"
        )
    left = iter(images)
    placed: list[int] = []
    found: list[ImageSpan] = []
    for each in tokens:
        if each != token:
            placed.append(each)
            continue
        image = next(left)
        found.append(ImageSpan(len(placed), image))
        placed += [token] * spans.span_length(*grid_of(image, vision))
    return tuple(placed), tuple(found)


def without_spans(
    tokens: Sequence[int], images: Sequence[ImageSpan], vision: VisionConfig
) -> list[int]:
    """What `place_images` was given: one token for each image, as a prompt is read by people."""
    kept: list[int] = []
    end = 0
    for image in images:
        kept += tokens[end : image.start + 1]
        end = image.start + spans.span_length(*grid_of(image.picture, vision))
    return kept + list(tokens[end:])
