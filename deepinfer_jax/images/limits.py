"""What an image file may ask for (docs/images.md 5)."""

from __future__ import annotations

import dataclasses

_PILLOW_PIXELS = 89_478_485  # beyond it Pillow warns of a decompression bomb by itself


@dataclasses.dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds of a file, checked before anything of it is decoded. They change no picture.

    Attributes:
      max_bytes: of the file.
      max_pixels: width times height, at most 89478485. Decoding takes up to 16 bytes for each.
      max_scans: passes of a progressive JPEG over the whole image; ordinary files have about ten.
      max_parts: segments or chunks that the file consists of.
    """

    max_bytes: int = 2**26
    max_pixels: int = 2**26
    max_scans: int = 64
    max_parts: int = 2**16

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            end = _PILLOW_PIXELS + 1 if name == "max_pixels" else 2**31
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < end:
                raise ValueError(f"{name} must be an integer in [1, {end}), got {value!r}")


DEFAULT = ImageLimits()
