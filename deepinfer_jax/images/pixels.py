"""A picture as the tower takes it: patches of normalised pixels (docs/model.md 12)."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Picture:
    """One image, resized and cut into patches.

    Two pictures are equal when their `key` is.

    Attributes:
      patches: [height * width, 3, p, p] float32 with values that bfloat16 holds, read-only; patches
        in row-major order, each (channel, y, x).
      height, width: the image's size in patches.
      key: SHA-256 over the sizes and the patches' bytes, in hexadecimal: the name of its contents.

    Raises ValueError where the patches are not of this form.
    """

    patches: np.ndarray = dataclasses.field(repr=False, compare=False)
    height: int = dataclasses.field(compare=False)
    width: int = dataclasses.field(compare=False)
    key: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        patches = np.ascontiguousarray(self.patches)
        wanted = (self.height * self.width, 3, patches.shape[-1], patches.shape[-1])
        if patches.shape != wanted or patches.dtype != np.float32 or min(wanted) < 1:
            raise ValueError(
                f"patches must be float32 [height * width, 3, p, p] of a picture of {self.height} "
                f"x {self.width} patches, got {patches.dtype} {list(patches.shape)}; make them "
                "with picture_from_array"
            )
        if (patches.view(np.uint32) & 0xFFFF).any():
            raise ValueError(
                "patches must hold bfloat16 values, got float32 values between them; make them "
                "with picture_from_array"
            )
        patches = patches.view()
        patches.flags.writeable = False
        sizes = f"{self.height} {self.width} {patches.shape[-1]}\n".encode()
        digest = hashlib.sha256(sizes)
        digest.update(patches.astype("<f4", copy=False).data)
        object.__setattr__(self, "patches", patches)
        object.__setattr__(self, "key", digest.hexdigest())

    @property
    def patch_size(self) -> int:
        """Pixels along one side of a patch."""
        return self.patches.shape[-1]
