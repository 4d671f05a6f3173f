"""A small tower with random weights, and random pictures for it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np

from deepinfer_jax import params
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.images import Picture
from tests import small

VISION = dataclasses.replace(small.VISION, max_image_tokens=200)
CFG = dataclasses.replace(small.PLAIN, vision=VISION, image_token_id=129)


@functools.cache
def weights(seed: int = 0, cfg: ModelConfig = CFG) -> dict[str, Any]:
    """{"vision": ..} as of a checkpoint: bfloat16, nothing zero or one."""
    rng = np.random.default_rng(seed)

    def draw(spec: params.Spec) -> jax.Array:
        fan_in = spec.tensor_shape[-1] if len(spec.tensor_shape) > 1 else 1
        value = rng.normal(size=spec.shape) * (fan_in**-0.5 if fan_in > 1 else 0.5)
        value = value + (1 if "norm" in spec.template else 0)
        return jax.numpy.asarray(value.astype(np.float32)).astype(spec.dtype)

    return {"vision": jax.tree.map(draw, params.abstract(cfg)["vision"])}


def released(tree: dict[str, Any], cfg: ModelConfig = CFG) -> dict[str, np.ndarray]:
    """The tensors of `weights` under their released names, in float64."""
    specs = jax.tree.leaves(params.abstract(cfg)["vision"])
    return {
        name: np.asarray(leaf, np.float64)[index]
        for spec, leaf in zip(specs, jax.tree.leaves(tree["vision"]), strict=True)
        for index, name in spec.tensors()
    }


def picture(height: int, width: int, seed: int = 0, side: int = VISION.patch_size) -> Picture:
    """Random pixels, in patches of `side` pixels a side."""
    shape = (height * width, 3, side, side)
    rng = np.random.default_rng((seed, height, width))
    values = rng.uniform(-1, 1, shape).astype(ml_dtypes.bfloat16)
    return Picture(values.astype(np.float32), height, width)
