"""A configuration that reads images, over the shipped tokenizer, and a small random model of it."""

import dataclasses
import functools
import json
import shutil

import jax
import ml_dtypes
import numpy as np

from deepinfer_jax import params, resources
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.images import Picture
from tests import tiny_model
from tests.images.files import VISION

SPARK = resources.PACKAGE / "assets" / "spark-tiny"
TOKEN = 10  # <｜image｜> of the shipped tokenizer


@functools.cache
def config():
    """The shipped model's with the tower of tests/images/files.py."""
    return seeing(ModelConfig.from_json(SPARK))


def seeing(cfg):
    """`cfg` with that tower."""
    return dataclasses.replace(cfg, vision=VISION, image_token_id=TOKEN)


def save(folder):
    """Write config and tokenizer to `folder`: all that is read before a model is loaded."""
    (folder / "config.json").write_text(json.dumps(config().to_dict()), "utf-8")
    shutil.copy(SPARK / "tokenizer.json", folder)


@functools.cache
def model():
    """A random model of that tower and of the sizes of tests/tiny_model.py, over its tokenizer."""
    return _random(seeing(tiny_model.model().cfg))


@functools.cache
def glance():
    """The same with one layer, a window: what can be compiled in the time of a test."""
    one = dataclasses.replace(
        tiny_model.model().cfg, num_hidden_layers=1, num_nextn_predict_layers=0,
        compress_ratios=(0,), kv_source_layer_ids=(), index_source_layer_ids=(),
        dspark_target_layer_ids=(),
    )  # fmt: skip
    return _random(seeing(one))


def _random(cfg):
    made = params.init(jax.random.key(7), cfg)
    return dataclasses.replace(tiny_model.model(), cfg=cfg, params=made)


def picture(height, width, seed):
    """Random patches."""
    shape = (height * width, 3, VISION.patch_size, VISION.patch_size)
    values = np.random.default_rng(seed).uniform(-1, 1, shape).astype(ml_dtypes.bfloat16)
    return Picture(values.astype(np.float32), height, width)
