"""The released configuration, for tests of plans."""

from __future__ import annotations

import functools

from deepinfer_jax import resources
from deepinfer_jax.config import ModelConfig


@functools.cache
def config() -> ModelConfig:
    return ModelConfig.from_json(resources.config_file("deepseek-v4.1-flash"))
