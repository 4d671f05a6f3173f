"""A picture as the tower takes it: patches of normalised pixels (docs/images.md 4)."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from deepinfer_jax.config import VisionConfig
from deepinfer_jax.images import decoding, sizes
from deepinfer_jax.images.limits import DEFAULT, ImageLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_GROUND = 127  # level of the bars beside an image whose proportions are not those of its patches


def _levels() -> np.ndarray:
    """float32 [256]: the normalised value of every level, rounded to bfloat16."""
    unit = np.arange(256, dtype=np.float32) / np.float32(255)
    value = (unit - np.float32(0.5)) / np.float32(0.5)
    return value.astype(ml_dtypes.bfloat16).astype(np.float32)


_LEVELS = _levels()
_LEVEL_OF = np.zeros(2**16, np.uint8)  # by the upper 16 bits of its value
_LEVEL_OF[_LEVELS.view(np.uint32) >> 16] = np.arange(256)


@dataclasses.dataclass(frozen=True, init=False)
class Picture:
    """One image, resized and cut into patches.

    Two pictures are equal when their `key` is. Patches that came from pixels are kept as levels, a
    quarter of the size: a run may have thousands of pictures.

    Attributes:
      height, width: the image's size in patches.
      patch_size: pixels along one side of a patch.
      key: SHA-256 over the sizes and the patches' bytes, in hexadecimal: the name of its contents.
      kept: the patches as values, or as levels (uint8); `patches` has the values.
    """

    height: int = dataclasses.field(compare=False)
    width: int = dataclasses.field(compare=False)
    patch_size: int = dataclasses.field(compare=False)
    key: str
    kept: np.ndarray = dataclasses.field(repr=False, compare=False)

    def __init__(self, patches: np.ndarray, height: int, width: int) -> None:
        """Of `patches` [height * width, 3, p, p] float32 with values that bfloat16 holds.

        Raises ValueError where they are not of this form.
        """
        patches = np.ascontiguousarray(patches)
        size = patches.shape[-1]
        wanted = (height * width, 3, size, size)
        if patches.shape != wanted or patches.dtype != np.float32 or min(wanted) < 1:
            raise ValueError(
                f"patches must be float32 [height * width, 3, p, p] of a picture of {height} x "
                f"{width} patches, got {patches.dtype} {list(patches.shape)}; make them with "
                "picture_from_array"
            )
        bits = patches.view(np.uint32)
        if (bits & 0xFFFF).any():
            raise ValueError(
                "patches must hold bfloat16 values, got float32 values between them; make them "
                "with picture_from_array"
            )
        digest = hashlib.sha256(f"{height} {width} {size}\n".encode())
        digest.update(patches.astype("<f4", copy=False).data)
        levels = _LEVEL_OF[bits >> 16]
        exact = np.array_equal(_LEVELS[levels].view(np.uint32), bits)
        values = (height, width, size, digest.hexdigest(), levels if exact else patches.copy())
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def patches(self) -> np.ndarray:
        """[height * width, 3, p, p] float32; patches in row-major order, each (channel, y, x)."""
        return _LEVELS[self.kept] if self.kept.dtype == np.uint8 else self.kept.copy()


def picture_from_file(
    path: str | os.PathLike[str], vision: VisionConfig, limits: ImageLimits = DEFAULT
) -> Picture:
    """The picture in a PNG, JPEG or WebP file.

    Raises OSError for a file that cannot be read, and as `picture_from_bytes`, with the path.
    """
    path = Path(path)
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give that of an image")
    try:
        if size > limits.max_bytes:  # before it is read
            raise ValueError(
                f"the file has {size} bytes, at most {limits.max_bytes} are read: save it smaller "
                "or raise ImageLimits.max_bytes"
            )
        # No more than it says: files of the system say 0 and may have no end.
        with open(path, "rb") as file:
            data = file.read(size)
        return picture_from_bytes(data, vision, limits)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def picture_from_bytes(data: bytes, vision: VisionConfig, limits: ImageLimits = DEFAULT) -> Picture:
    """The picture in the bytes of a PNG, JPEG or WebP file.

    Raises ValueError for bytes that are not one whole picture within `limits`, or one too narrow
    for the model; ImportError without Pillow, the extra `vision`.
    """
    return _picture(decoding.decoded(bytes(data), limits), vision)


def picture_from_image(image: Image, vision: VisionConfig) -> Picture:
    """The picture of an image of Pillow, in any mode (`decoding.rgb`).

    Raises ValueError as `picture_from_array`, and where a file behind it is damaged or closed.
    """
    if 0 in image.size:
        raise ValueError(f"an image has at least one pixel, got {image.size[0]} x {image.size[1]}")
    try:
        pixels = decoding.rgb(image)
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # of the file behind it, as in `decoding.decoded`
        raise ValueError(
            f"the file of the image cannot be decoded: {error}; get it again"
        ) from None
    return _picture(pixels, vision)


def picture_from_array(pixels: np.ndarray, vision: VisionConfig) -> Picture:
    """The picture of an array of pixels, row by row from the upper left.

    pixels: uint8 [H, W] or [H, W, 1] grey, [H, W, 2] grey and opacity, [H, W, 3] RGB, [H, W, 4] RGB
    and opacity. Where it is not opaque, white shows through.

    Raises TypeError or ValueError for another array, ValueError for an image without pixels or one
    too narrow for the model; ImportError without Pillow, where the image has to be resized.
    """
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        kind = pixels.dtype if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise TypeError(
            f"pixels must be a NumPy array of uint8, got {kind}; levels in 0..1 become such by "
            "`(255 * pixels).round().astype(np.uint8)`"
        )
    shape, pixels = pixels.shape, pixels[:, :, None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 2, 3, 4) or 0 in shape:
        raise ValueError(
            f"pixels must be [H, W] or [H, W, 1 to 4] with at least one pixel, got {list(shape)}"
        )
    colour = pixels[:, :, : -1 if pixels.shape[2] in (2, 4) else None]
    if colour.shape[2] == 1:
        colour = np.repeat(colour, 3, axis=2)
    if pixels.shape[2] in (2, 4):
        colour = _over_white(colour, pixels[:, :, -1:])
    return _picture(colour, vision)


def _over_white(colour: np.ndarray, opacity: np.ndarray) -> np.ndarray:
    """uint8 [H, W, 3]: `colour` seen in front of white, rounded to the nearest level."""
    weight = opacity.astype(np.uint16)
    return ((colour * weight + 255 * (255 - weight) + 127) // 255).astype(np.uint8)


def _picture(pixels: np.ndarray, vision: VisionConfig) -> Picture:
    """The picture of RGB pixels [H, W, 3] uint8."""
    height, width, _ = pixels.shape
    size = sizes.resized(width, height, vision)
    if size != (width, height):
        pixels = _fitted(pixels, size, vision)
    patch = vision.patch_size
    rows, columns = size[1] // patch, size[0] // patch
    cut = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return Picture(_LEVELS[cut].reshape(rows * columns, 3, patch, patch), rows, columns)


def _fitted(pixels: np.ndarray, size: tuple[int, int], vision: VisionConfig) -> np.ndarray:
    """`pixels` brought to `size` (width, height), proportions kept between bars of grey.

    Beyond `max_wh_ratio` they are not kept: then the image fills all of it.
    """
    pillow = decoding.require_pillow()
    height, width, _ = pixels.shape
    across, down = size
    if vision.max_wh_ratio is None or width < vision.max_wh_ratio * height:
        if width / height > across / down:
            down = round(height / width * across)
        elif width / height < across / down:
            across = round(width / height * down)
    if across == 0 or down == 0:
        raise ValueError(
            f"the image is too narrow: {width} x {height} pixels leave nothing at the size of "
            f"{size[0]} x {size[1]} that the model reads; crop it"
        )
    image = pillow.fromarray(np.ascontiguousarray(pixels))
    left, top = round((size[0] - across) * 0.5), round((size[1] - down) * 0.5)
    fitted = np.full((size[1], size[0], 3), _GROUND, np.uint8)
    fitted[top : top + down, left : left + across] = image.resize(
        (across, down), pillow.Resampling.BICUBIC
    )
    return fitted
