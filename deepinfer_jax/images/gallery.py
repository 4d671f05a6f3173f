"""What stands in the rows of images: pictures encoded once, and kept while they may come again."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.images import encoding, spans
from deepinfer_jax.images.features import Features, check_fits
from deepinfer_jax.images.pixels import Picture
from deepinfer_jax.images.spans_in_prompt import grid_of
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.params import Params

KEPT_BYTES = 1 << 28  # 25 of the largest images of the released model


def _call(program: Callable[..., Any], *args: Any) -> Any:
    return program(*args)


class Gallery:
    """Embeddings of the spans of images, in the memory of the host.

    They are a function of the image and the model, so what is kept decides the time alone. Of a
    picture that is shown again, here or in another prompt, the tower is not asked again while its
    embeddings are among those used last, `kept_bytes` of them. Features are used as they come, and
    are not kept.
    """

    def __init__(
        self, params: Params, cfg: ModelConfig, numerics: Numerics, *,
        kept_bytes: int = KEPT_BYTES, ask: Callable[..., Any] = _call,
        read: Callable[[Any], Any] = jax.device_get,
    ) -> None:  # fmt: skip
        """`ask`, `read`: how a program is called, and how its results are read."""
        self._params, self._cfg, self._numerics = params, cfg, numerics
        self._ask, self._read, self._most = ask, read, kept_bytes
        self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()

    def embeddings(self, image: Picture | Features) -> np.ndarray:
        """[length, D] of the image's span, read-only.

        Raises ValueError where the model cannot show it, FloatingPointError where a value is not
        finite, and what the device raises where it fails at it.
        """
        if isinstance(image, Features):
            check_fits(image, self._cfg, self._numerics)
            return self._span(image)
        found = self._kept.get(image.key)
        if found is None:
            found = self._kept[image.key] = self._span(self._encoded(image))
            while len(self._kept) > 1 and sum(e.nbytes for e in self._kept.values()) > self._most:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(image.key)
        return found

    @functools.cached_property
    def _delimiters(self) -> dict[str, np.ndarray]:
        tower = encoding.tower_of(self._params, self._cfg)
        names = [f"image_{name}" for name in ("start", "newline", "end")]
        return {name: np.asarray(jax.device_get(tower[name])) for name in names}

    def _encoded(self, picture: Picture) -> Features:
        """By a program for this picture alone: there is one for each class of sizes."""
        program, args = encoding_call(picture, self._params, self._cfg, self._numerics)
        rows = np.asarray(self._read(self._ask(program, *args)))[0]
        assert self._cfg.vision is not None, "the model has a tower"
        height, width = grid_of(picture, self._cfg.vision)
        return Features(rows[: height * width], height, width, picture.key)

    def _span(self, features: Features) -> np.ndarray:
        if not isinstance(features.rows, np.ndarray):
            rows = np.asarray(jax.device_get(features.rows))
            features = Features(rows, features.height, features.width, features.key)
        if not np.isfinite(features.rows).all():
            raise FloatingPointError(
                f"the features of an image of {features.height} x {features.width} cells are not "
                "all finite; are the tower's weights or the features damaged?"
            )
        made = np.asarray(spans.span_embeddings(self._delimiters, features))
        made.flags.writeable = False
        return made


def encoding_call(
    picture: Picture, params: Params, cfg: ModelConfig, numerics: Numerics
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The program that encodes `picture` by itself, and what it is given."""
    tower = encoding.tower_of(params, cfg)
    assert cfg.vision is not None, "the model has a tower"
    size = encoding.size_class(picture.height, picture.width, cfg.vision.downsample_ratio)
    packed = encoding.pack([picture], size, cfg.vision)
    return encoding.encode, (tower, packed, cfg.vision, numerics)
