"""Recorded images through the package: features, and rows of spans."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.images import (
    Picture,
    encode_images,
    encoding,
    grid_of,
    span_embeddings,
    span_kinds,
)
from deepinfer_jax.model import vision
from deepinfer_jax.numerics import Numerics
from tests.golden.reader import Arrays, Folder


def pictures(folder: Folder) -> list[Picture]:
    """The recorded images, in the order of the prompt."""
    inputs, made = folder.inputs, []
    while f"image.{len(made)}.patches" in inputs:
        name = f"image.{len(made)}"
        _, height, width = (int(n) for n in inputs[f"{name}.start_h_w"])
        made.append(Picture(inputs.wide(f"{name}.patches"), height, width))
    return made


def spans(folder: Folder, params: Any, cfg: ModelConfig, numerics: Numerics) -> np.ndarray:
    """Rows [N, D] of all spans, in the order of the prompt."""
    features = encode_images(params, pictures(folder), cfg, numerics)
    kinds = np.concatenate([span_kinds(f.height, f.width) for f in features])
    types = folder.inputs["token_types"]
    np.testing.assert_array_equal(kinds, types[types >= 0], err_msg="token_types")
    return np.concatenate([np.asarray(span_embeddings(params["vision"], f)) for f in features])


def encoded(folder: Folder, params: Any, cfg: ModelConfig, numerics: Numerics) -> Arrays:
    """`vision.K.vit_out` and `vision.K.aligner_out`, all images in one call of one size."""
    given, sizes = pictures(folder), cfg.vision
    assert sizes is not None
    ratio = sizes.downsample_ratio
    size = max(encoding.size_class(p.height, p.width, ratio) for p in given)
    patches = encoding.pack(given, size, sizes)
    hidden, aligned = _run(params["vision"], patches, sizes, numerics)
    out = Arrays()
    for k, picture in enumerate(given):
        rows, columns = grid_of(picture, sizes)
        out[f"vision.{k}.vit_out"] = np.asarray(hidden[k, : len(picture.patches)])
        out[f"vision.{k}.aligner_out"] = np.asarray(aligned[k, : rows * columns])
    return out


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"))
def _run(
    tower: Any, patches: vision.Patches, cfg: VisionConfig, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    hidden = vision.tower(tower, patches, cfg, numerics)
    return hidden, vision.align(tower, hidden, patches.cells, numerics)
