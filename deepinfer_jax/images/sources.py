"""What users hand in for an image, and the picture that it is (docs/images.md 2)."""

from __future__ import annotations

import base64
import binascii
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from deepinfer_jax.config import VisionConfig
from deepinfer_jax.images import encoding, features, pixels
from deepinfer_jax.images.features import Features
from deepinfer_jax.images.limits import DEFAULT, ImageLimits
from deepinfer_jax.images.pixels import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

    Source: TypeAlias = Picture | Features | Image | np.ndarray | bytes | str | os.PathLike[str]

_LONGEST = 1024  # a text that is longer and cannot be opened was not meant as a path
_FORMS = (
    "a path, a data URL, the bytes of a file, a NumPy array, an image of Pillow, a Picture or "
    "Features"
)


def picture_of(
    source: Source,
    vision: VisionConfig,
    folder: str | os.PathLike[str] = ".",
    limits: ImageLimits = DEFAULT,
) -> Picture | Features:
    """The picture of what a user handed in; a `Picture` or `Features` is itself.

    A string is a data URL (`data:image/png;base64,...`) or a path; paths are relative to `folder`.

    Raises TypeError or ValueError for what is none of these, cannot be read, is not one whole
    picture within `limits` or is larger than the model reads, and ImportError without Pillow, the
    extra `vision`.
    """
    if isinstance(source, Features):
        features.check(source)
        return source
    picture = source if isinstance(source, Picture) else _read(source, vision, folder, limits)
    encoding.check_picture(picture, vision)
    return picture


def listed(images: Any) -> Sequence[Any]:
    """Images as a list: of one alone, of none."""
    if images is None:
        return ()
    return list(images) if isinstance(images, list | tuple) else [images]


def _read(
    source: Any, vision: VisionConfig, folder: str | os.PathLike[str], limits: ImageLimits
) -> Picture:
    if isinstance(source, np.ndarray):
        return pixels.picture_from_array(source, vision)
    if isinstance(source, bytes | bytearray | memoryview):
        return pixels.picture_from_bytes(bytes(source), vision, limits)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return pixels.picture_from_bytes(_data(source, limits), vision, limits)
    if isinstance(source, str | os.PathLike):
        return _from_path(source, vision, folder, limits)
    if type(source).__module__.partition(".")[0] == "PIL":
        return pixels.picture_from_image(source, vision)
    raise TypeError(f"an image is {_FORMS}; got {reprlib.repr(source)}")


def _from_path(
    source: str | os.PathLike[str], vision: VisionConfig, folder: str | os.PathLike[str],
    limits: ImageLimits,
) -> Picture:  # fmt: skip
    name = os.fspath(source)
    scheme, colon, _ = str(name).partition("://")
    if colon and scheme.isalnum():
        raise ValueError(
            f"images are not fetched, got the address {reprlib.repr(name)}: load it and give its "
            "path, its bytes or a data URL"
        )
    path = Path(folder, os.fsdecode(name))
    if "\0" in str(path):
        raise ValueError(f"a path has no NUL in it, got {reprlib.repr(str(name))}: correct it")
    try:
        return pixels.picture_from_file(path, vision, limits)
    except OSError as error:
        if len(str(path)) > _LONGEST:
            raise ValueError(
                f"{reprlib.repr(str(name))} is no path; base64 begins with data:image/png;base64,"
            ) from None
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _data(url: str, limits: ImageLimits) -> bytes:
    """The bytes of a data URL."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError(
            f"a data URL of an image begins as data:image/png;base64, got {reprlib.repr(head)}"
        )
    if len(body) // 4 * 3 > limits.max_bytes + 3:
        raise ValueError(
            f"the data URL holds {len(body) // 4 * 3} bytes, at most {limits.max_bytes} are read: "
            "save the image smaller or raise ImageLimits.max_bytes"
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the data URL is not base64: {error}") from None
