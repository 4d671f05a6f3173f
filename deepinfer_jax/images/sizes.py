"""The size that an image is brought to before it is cut into patches (docs/images.md 4)."""

from __future__ import annotations

import math

from deepinfer_jax.config import VisionConfig
from deepinfer_jax.images.spans import span_length


def resized(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """(width, height) in pixels, multiples of `patch_size`, for an image of `width` x `height`.

    A small image is enlarged to about `min_pixels`, one that would take more than
    `max_image_tokens` places is shrunk until it does not; both keep its proportions up to a patch.
    All arithmetic is that of the released rule, in its order, in Python's integers and floats, so
    that no size differs in its last pixel.
    """
    patch = vision.patch_size
    wide, high = float(width), float(height)
    if vision.max_wh_ratio is not None and wide > high * vision.max_wh_ratio:
        wide = high * vision.max_wh_ratio
    if wide * high < vision.min_pixels:
        factor = (vision.min_pixels / (wide * high)) ** 0.5
        wide, high = float(int(wide * factor)), float(int(high * factor))
    best = math.ceil(wide / patch) * patch, math.ceil(high / patch) * patch
    rows, columns = (-(-side // (patch * vision.downsample_ratio)) for side in reversed(best))
    if span_length(rows, columns) > vision.max_image_tokens:
        return _shrunk(wide, high, vision)
    return best


def _shrunk(wide: float, high: float, vision: VisionConfig) -> tuple[int, int]:
    """The largest size of these proportions whose span has at most `max_image_tokens` places.

    rows * (columns + 1) + 2 = most is solved for real numbers of cells, which are rounded down. An
    image that is too narrow for one cell gets a single column, or a single row, of all the cells
    that there may be.
    """
    most, patch = vision.max_image_tokens, vision.patch_size
    cell = patch * vision.downsample_ratio
    ratio = high / wide
    columns = math.sqrt((most - 2) / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return cell, (most - 2) // 2 * cell
    if rows < 1:
        return (most - 3) * cell, cell
    factor = min(math.floor(columns) * cell / wide, math.floor(rows) * cell / high)
    # One patch at least, where a cell is no more than that.
    return (
        max(1, math.floor(wide * factor / patch)) * patch,
        max(1, math.floor(high * factor / patch)) * patch,
    )
