"""Index scores in blocks: those of one block, whatever the capacity, and their gradient."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.cache import Codec
from deepinfer_jax.model import index
from deepinfer_jax.model.attention import Entries
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import spans_of, text_rows

HEADS, WIDTH, PAGE, PAGES = 3, 8, 4, 5
FIELD = index.Field(1, Codec.plain(WIDTH))
IDS = np.arange(17, dtype=np.int32)  # more than any row sees


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rows_of(positions):
    count = len(positions)
    return text_rows(np.zeros(count, np.int32), np.zeros(count, np.int32), np.array(positions))


@functools.partial(jax.jit, static_argnames="block")
def scored(data, pages, rows, block):
    query = index.IndexQuery(jnp.asarray(normal(1, 6, HEADS, WIDTH)), jnp.asarray(normal(2, 6, 3)))
    source = None if pages is None else jnp.int32(0)
    entries, numerics = Entries(data, source, pages), Numerics.fp32()
    numerics = dataclasses.replace(numerics, index_block=block)
    return index.scores(query, entries, IDS, rows, spans_of(rows, 1), FIELD, numerics)


def test_blocks_behind_the_last_visible_entry_are_not_scored_and_not_seen():
    """Rows at positions 4 to 9 see three blocks of four entries; the fourth and fifth are NaN."""
    data = normal(3, 1, PAGES, PAGE, WIDTH)
    data[:, 3:] = np.nan
    pages, rows = np.arange(PAGES, dtype=np.int32)[None], rows_of(range(4, 10))
    whole, parts = (np.asarray(scored(data, pages, rows, block)) for block in (512, PAGE))
    seen = IDS[None] < np.arange(5, 11)[:, None]
    assert np.isfinite(whole[seen]).all()
    np.testing.assert_array_equal(whole == -np.inf, ~seen)
    np.testing.assert_array_equal(parts == -np.inf, ~seen)
    np.testing.assert_allclose(parts[seen], whole[seen], atol=1e-5)


def test_without_a_cache_blocks_are_differentiable():
    data, rows = normal(4, 6, WIDTH), rows_of(range(6))

    def total(data, block):
        score = scored(data, None, rows, block)
        return jnp.sum(jnp.where(score > -jnp.inf, score, 0))

    whole, parts = (jax.grad(total)(data, block) for block in (512, PAGE))
    assert np.abs(whole).max() > 0.1
    np.testing.assert_allclose(parts, whole, atol=1e-5)
