"""From encoded bytes, or an image of Pillow, to RGB pixels (docs/images.md 4 and 5)."""

from __future__ import annotations

import io
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_jax.images.headers import read_header
from deepinfer_jax.images.limits import ImageLimits

if TYPE_CHECKING:
    from PIL.Image import Image


def require_pillow() -> ModuleType:
    """The module PIL.Image. Raises ImportError that says how to install it."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("images need Pillow: pip install deepinfer-jax[vision]") from None
    return Image


def decoded(data: bytes, limits: ImageLimits) -> np.ndarray:
    """Pixels [height, width, 3] uint8 of a PNG, JPEG or WebP file.

    Raises ValueError for a file that is not one whole picture within `limits` (`read_header`), and
    ImportError without Pillow.
    """
    header = read_header(data, limits)
    pillow = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd but readable parts
            with pillow.open(io.BytesIO(header.data), formats=[header.format.upper()]) as image:
                if image.size != (header.width, header.height):
                    raise ValueError(f"it has {image.size} pixels")
                return rgb(image)
    except MemoryError:
        raise
    # A decoder meets damage in any of its steps, and says so by almost any exception.
    except Exception as error:
        unknown = isinstance(error, pillow.UnidentifiedImageError)
        raise ValueError(
            f"the {header.format} file of {header.width} x {header.height} pixels is damaged or "
            f"cut short: {'its header cannot be read' if unknown else error}; get it again"
        ) from None


def rgb(image: Image) -> np.ndarray:
    """Pixels [height, width, 3] uint8 of an image of Pillow, in any of its modes.

    Transparent places show white. Of 16 bits the upper 8 are taken. Grey, palettes and CMYK become
    RGB as Pillow does it, without colour profiles.
    """
    pillow = require_pillow()
    if image.mode.startswith("I"):
        return _sixteen_bits(image)
    if image.mode == "F":
        raise ValueError("mode 'F' has no range of its own; convert the image to 'L' or 'RGB'")
    if image.has_transparency_data:
        whole = image.convert("RGBA")
        ground = pillow.new("RGB", whole.size, (255, 255, 255))
        ground.paste(whole, mask=whole.getchannel("A"))
        return np.asarray(ground)
    return np.asarray(image.convert("RGB"))


def _sixteen_bits(image: Image) -> np.ndarray:
    """Of one grey channel of 16 bits, where one value may stand for transparent."""
    levels = np.asarray(image)
    if levels.min() < 0 or levels.max() > 0xFFFF:
        raise ValueError(
            f"values of mode {image.mode!r} must lie in 0..65535, got {levels.min()} to "
            f"{levels.max()}; scale them"
        )
    shown = (levels >> 8).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        shown[levels == clear] = 255
    return np.repeat(shown[:, :, None], 3, axis=2)
