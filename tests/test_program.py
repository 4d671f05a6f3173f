"""The decode step of the released configuration, lowered and compiled without weights.

Program size follows the number of layer roles, not of layers; nothing the size of a layer's experts
or of a cache is copied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax import cache as caches
from deepinfer_jax import params as parameters
from deepinfer_jax import resources, rounds, tables
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.program import program
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.sampling import Sampling

BATCH = 8
TEMPORARY = 4e9  # bytes
LONG = 1 << 20  # tokens of a slot
SECONDS = 45  # to lower and compile on two idle cores


@functools.cache
def released() -> ModelConfig:
    return ModelConfig.from_json(resources.config_file("deepseek-v4.1-flash"))


def half() -> ModelConfig:
    """Twenty blocks of the same roles: shorter runs of reuse layers, one reindex unit fewer."""
    return dataclasses.replace(
        released(),
        num_hidden_layers=20,
        compress_ratios=(0, 0, *[2] * 9, *[1] * 9, 0, 0, 0),
        kv_source_layer_ids=(2, 5, 8, 11),
        index_source_layer_ids=(2, 5, 8, 11, 13, 15, 17),
        candidate_source_layer_id=11,
        engram_layer_ids=(1, 8),
        dspark_target_layer_ids=(18, 19),
    )


@functools.cache
def lowered(cfg: ModelConfig, capacity: int) -> tuple[Any, Cache, float]:
    """`rounds.decode` for abstract arguments, its cache donated; processor seconds it took."""
    start = time.process_time()
    numerics = Numerics.native()
    cache = caches.cache_shapes(cfg, numerics, BATCH, capacity)

    def rows(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((BATCH, *more), dtype)

    real, whole = rows(jnp.float32), rows(jnp.int32)
    sampling = Sampling(real, real, whole, real, rows(jnp.uint32, 2))
    decode = jax.jit(
        rounds.decode, static_argnames=("cfg", "numerics"), donate_argnames="cache"
    )  # fmt: skip
    made = decode.lower(
        parameters.shapes(cfg), tables.table_shapes(cfg, capacity), whole, rows(jnp.bool_), cache,
        sampling, cfg, numerics,
    )  # fmt: skip
    return made, cache, time.process_time() - start


@pytest.mark.exhaustive
def test_program_size_follows_roles():
    cfg = released()
    assert [u.repeat for u in program(cfg)] == [1, 2, 1, 1, 3, 1]
    assert {k.role for k in cfg.kinds()} == {k.role for k in half().kinds()}
    long, short = (len(lowered(c, LONG)[0].as_text()) for c in (cfg, half()))
    assert long <= 1.3 * short


def size_of(tree: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.exhaustive
@pytest.mark.parametrize("capacity", [4096, LONG])
def test_compiles_quickly_into_little_memory(capacity):
    """Processor seconds of both cores, so that a busy machine does not fail the test."""
    made, cache, spent = lowered(released(), capacity)
    start = time.process_time()
    compiled = made.compile()
    spent += time.process_time() - start
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= TEMPORARY
    assert memory.alias_size_in_bytes == size_of(cache)  # written in place
    assert spent <= 2 * SECONDS
    print(f"capacity {capacity}: {spent:.0f} s, {memory.temp_size_in_bytes / 1e9:.2f} GB")
