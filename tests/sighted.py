"""A configuration that reads images, over the shipped tokenizer; there are no weights for it."""

import dataclasses
import functools
import json
import shutil

from deepinfer_jax import resources
from deepinfer_jax.config import ModelConfig
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
