"""Pictures through the tower and the aligner, in batches of a few sizes (docs/model.md 12)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.images.features import Features
from deepinfer_jax.images.pixels import Picture
from deepinfer_jax.images.spans import span_length
from deepinfer_jax.images.spans_in_prompt import grid_of
from deepinfer_jax.model import vision
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.params import Params
from deepinfer_jax.tables import Rotation

# Places for patches in the programs that there are. A picture takes the first one that holds it,
# which changes no bit. The released sizes begin at 1,521 patches and end at 9,189.
SIZES = (64, 192, 576, 1664, 2304, 3200, 4608, 6400, 9216)
_ROWS = 8192  # patches of one call on a GPU that are enough to keep it busy


def encode_images(
    params: Params, pictures: Sequence[Picture], cfg: ModelConfig, numerics: Numerics,
    batch: int | None = None,
) -> tuple[Features, ...]:  # fmt: skip
    """The features of pictures, in their order; equal pictures are encoded once.

    A picture's bits are a function of the picture, the model and `numerics`: neither of the others
    in the call nor of `batch`. A program is compiled for every size class that occurs and every
    number of pictures in a call of it, which is a power of two up to `batch`.

    Args:
      params: of a model with a vision tower; only `params["vision"]` is read.
      pictures: of the model's patch size, within `max_image_tokens`.
      cfg: the model's.
      numerics: what fixes the bits; `features` are compared by it when they are loaded.
      batch: most pictures in one call; default about 8,192 patches on a GPU and 1
        otherwise, since a CPU gains nothing by more.

    Raises:
      ValueError: no tower, a picture of another patch size or too large, a batch below 1.
    """
    tower = tower_of(params, cfg)
    assert cfg.vision is not None
    if batch is not None and batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    groups: dict[int, dict[str, Picture]] = {}
    for number, picture in enumerate(pictures):
        try:
            size = check_picture(picture, cfg.vision)
        except ValueError as error:
            raise ValueError(f"picture {number}: {error}") from None
        groups.setdefault(size, {})[picture.key] = picture
    calls = []
    for size, group in sorted(groups.items()):
        for part in _parts(list(group.values()), batch or _usual_batch(size, numerics)):
            made = encode(tower, pack(part, size, cfg.vision), cfg.vision, numerics)
            calls.append((part, made))  # computed while the next one is packed
    done = {p.key: f for part, made in calls for p, f in _unpack(part, made, cfg.vision)}
    return tuple(done[picture.key] for picture in pictures)


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"))
def encode(
    tower: Params, patches: vision.Patches, cfg: VisionConfig, numerics: Numerics
) -> jax.Array:
    """Image rows [B, C, D] of one call; those behind a picture's last cell are arbitrary."""
    hidden = vision.tower(tower, patches, cfg, numerics)
    return vision.align(tower, hidden, patches.cells, numerics)


def tower_of(params: Params, cfg: ModelConfig) -> Params:
    """`params["vision"]`.

    Raises ValueError where the model has none.
    """
    if cfg.vision is None or "vision" not in params:
        raise ValueError(
            "this model has no vision tower: load a checkpoint with a vision_config and its "
            "tensors, or leave images out"
        )
    return params["vision"]


def check_picture(picture: Picture, cfg: VisionConfig) -> int:
    """The size class of a picture.

    Raises ValueError for one that no tower of these sizes reads.
    """
    if picture.patch_size != cfg.patch_size:
        raise ValueError(
            f"the picture has patches of {picture.patch_size} pixels a side, this model takes "
            f"{cfg.patch_size}; make it with this model's `cfg.vision`"
        )
    rows = span_length(*grid_of(picture, cfg))
    if rows > cfg.max_image_tokens:
        raise ValueError(
            f"a picture of {picture.height} x {picture.width} patches would take {rows} tokens, "
            f"the model allows {cfg.max_image_tokens} (max_image_tokens); make it with "
            "picture_from_array, which resizes"
        )
    return size_class(picture.height, picture.width, cfg.downsample_ratio)


def size_class(height: int, width: int, ratio: int) -> int:
    """The one of `SIZES` for a picture of `height` x `width` patches.

    Raises ValueError for a picture beyond the largest.
    """
    patches, cells = height * width, -(-height // ratio) * -(-width // ratio)
    for size in SIZES:
        if patches <= size and cells <= cell_room(size, ratio):
            return size
    raise ValueError(
        f"a picture of {height} x {width} patches is larger than the largest size, {SIZES[-1]} "
        "patches; make it with picture_from_array, which keeps to the model's limit"
    )


def cell_room(size: int, ratio: int) -> int:
    """Cells in a program of `size` places: half as many again as of squares of whole cells.

    Long narrow pictures have more, and take a larger size.
    """
    return 3 * size // (2 * ratio**2)


def pack(pictures: Sequence[Picture], size: int, cfg: VisionConfig) -> vision.Patches:
    """Pictures of at most `size` patches side by side, on the host."""
    ratio = cfg.downsample_ratio
    angles = [vision.grid_angles(p.height, p.width, cfg) for p in pictures]
    cells = [vision.grid_cells(p.height, p.width, ratio) for p in pictures]
    pixels = [p.patches.reshape(len(p.patches), -1).astype(ml_dtypes.bfloat16) for p in pictures]
    counts: Any = np.array([len(p.patches) for p in pictures], np.int32)
    return vision.Patches(
        pixels=_side_by_side(pixels, size),
        counts=counts,
        angle=Rotation(
            _side_by_side([a.cos for a in angles], size),
            _side_by_side([a.sin for a in angles], size),
        ),
        cells=_side_by_side(cells, cell_room(size, ratio), -1),
    )


def _side_by_side(arrays: Sequence[Any], size: int, fill: int = 0) -> Any:
    """[B, size, ..] of B arrays with at most `size` rows, filled up behind the last one."""
    made = np.full((len(arrays), size, *arrays[0].shape[1:]), fill, arrays[0].dtype)
    for place, array in zip(made, arrays, strict=True):
        place[: len(array)] = array
    return made


def _unpack(
    part: Sequence[Picture], made: jax.Array, cfg: VisionConfig
) -> Iterator[tuple[Picture, Features]]:
    for picture, rows in zip(part, np.asarray(made), strict=True):
        height, width = grid_of(picture, cfg)
        yield picture, Features(rows[: height * width].copy(), height, width, picture.key)


def _parts(pictures: list[Picture], most: int) -> Iterator[list[Picture]]:
    """Runs of a power of two, the largest first, so that there are few programs and no gaps."""
    while pictures:
        count = 1 << (min(len(pictures), most).bit_length() - 1)
        yield pictures[:count]
        pictures = pictures[count:]


def _usual_batch(size: int, numerics: Numerics) -> int:
    return max(1, _ROWS // size) if numerics.uses_pallas else 1
