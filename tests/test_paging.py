"""Pages of global KV and snapshots of the rest: where a sequence's past lies changes no bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import cache as caches
from deepinfer_jax import params, snapshots, steps, tables
from deepinfer_jax.cache import Paging
from deepinfer_jax.engine.programs import make_rows
from deepinfer_jax.numerics import Numerics
from tests.small import CONFIG

CFG = dataclasses.replace(
    CONFIG, vision=None, image_token_id=None, engram_num_embeddings=(120, 120)
)
NUMERICS = Numerics.native()
SLOTS, CAPACITY, CALL = 2, 36, 10  # rows of a call
PAGING = Paging(tokens=4, count=23)
PAGES = CAPACITY // PAGING.tokens


@functools.cache
def model():
    weights = params.init(jax.random.key(3), CFG)
    return weights, tables.make_tables(CFG, np.arange(131, dtype=np.int32) % 83, 40)


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"))
def _extend(weights, table, rows, cache, cfg, numerics):
    hidden, cache = steps.extend(weights, table, rows, cache, cfg, numerics)
    return hidden.output, cache


def fed(cache, every):
    """Outputs of rows (token, slot, position), fed CALL at a time, and the cache after them."""
    found = []
    for start in range(0, len(every), CALL):
        part = every[start : start + CALL]
        rows = make_rows(part, CALL)
        out, cache = _extend(*model(), rows, cache, CFG, NUMERICS)
        found.append(np.asarray(out, np.float32)[: len(part)])
    return np.concatenate(found), cache


def rows_of(lengths, cut):
    """Rows of SLOTS sequences, `cut` tokens of each before the others have their turn."""
    tokens = np.random.default_rng(1).integers(3, 128, (SLOTS, CAPACITY))
    order = []
    for start in range(0, max(lengths), cut):
        for slot, length in enumerate(lengths):
            for position in range(start, min(start + cut, length)):
                order.append((int(tokens[slot, position]), slot, position))
    return order


def spoiled(paging=None):
    """A cache whose pages hold large numbers, as used ones would."""
    cache = caches.init_cache(CFG, NUMERICS, SLOTS, CAPACITY, paging=paging)
    spoil = functools.partial(jax.tree.map, lambda x: jnp.full_like(x, 0x77))
    return dataclasses.replace(cache, kv=spoil(cache.kv), keys=spoil(cache.keys))


@pytest.mark.slow
@pytest.mark.exhaustive
@given(
    order=st.permutations(range(PAGING.count)),
    lengths=st.tuples(*[st.integers(9, CAPACITY)] * SLOTS),
    cut=st.integers(3, 9),
)
@settings(max_examples=12)
def test_where_pages_lie_changes_nothing(order, lengths, cut):
    every = rows_of(lengths, cut)
    own = np.arange(SLOTS * PAGES, dtype=np.int32).reshape(SLOTS, PAGES)
    want, _ = fed(dataclasses.replace(spoiled(PAGING), pages=jnp.asarray(own)), every)
    table = np.full((SLOTS, PAGES), -1, np.int32)
    given_out = iter(order)
    for slot, length in enumerate(lengths):
        for number in range(-(-length // PAGING.tokens)):
            table[slot, number] = next(given_out)
    cache = dataclasses.replace(spoiled(PAGING), pages=jnp.asarray(table))
    got, after = fed(cache, every)
    np.testing.assert_array_equal(got, want)
    unused = sorted(set(range(PAGING.count)) - set(table.ravel().tolist()))
    for pool in (*after.kv, *after.keys):
        assert (np.asarray(pool)[:, unused] == 0x77).all()


@pytest.mark.exhaustive
def test_pages_have_the_bits_of_one_page_for_each_slot():
    every = rows_of((CAPACITY, 23), 7)
    want, _ = fed(spoiled(), every)
    own = np.arange(SLOTS * PAGES, dtype=np.int32).reshape(SLOTS, PAGES)
    got, _ = fed(dataclasses.replace(spoiled(PAGING), pages=jnp.asarray(own)), every)
    np.testing.assert_array_equal(got, want)


@pytest.mark.exhaustive  # the default run has warm starts in tests/engine/test_engine.py
@given(boundary=st.integers(1, 5), length=st.integers(22, CAPACITY), cut=st.integers(3, 9))
@settings(max_examples=8)
def test_a_warm_start_has_the_bits_of_a_cold_one(boundary, length, cut):
    """Slot 1 takes over what slot 0 had after whole pages, and shares them."""
    start = boundary * PAGING.tokens
    tokens = [row[0] for row in rows_of((length, 0), CAPACITY)]
    own = np.arange(PAGES, dtype=np.int32)
    table = np.stack([own, np.where(own < boundary, own, own + PAGES)])
    cache = dataclasses.replace(spoiled(PAGING), pages=jnp.asarray(table))
    head = [(token, 0, place) for place, token in enumerate(tokens[:start])]
    rest = [(token, 0, start + place) for place, token in enumerate(tokens[start:])]
    _, cache = fed(cache, head)
    kept = snapshots.init_snapshots(cache, 3)
    kept = snapshots.take(kept, cache, jnp.array([0, 0]), jnp.array([2, 3]))  # 3: dropped
    want, cache = fed(cache, rest)
    cache = snapshots.restore(cache, kept, jnp.array([2, 0]), jnp.array([1, SLOTS]))
    later = [(token, 1, place) for token, _, place in rest]
    got, cache = fed(cache, later[:cut])
    more, _ = fed(cache, later[cut:])
    np.testing.assert_array_equal(np.concatenate([got, more]), want)


@pytest.mark.parametrize(
    ("paging", "message"),
    [
        (Paging(3, 5), r"paging\.tokens must be a multiple of 2"),
        (Paging(0, 5), r"paging\.tokens must be at least 1, got 0"),
        (Paging(4, 0), r"paging\.count must be at least 1, got 0"),
    ],
)
def test_pages_that_cannot_be(paging, message):
    with pytest.raises(ValueError, match=message):
        caches.cache_shapes(CFG, NUMERICS, 2, 8, paging=paging)


def test_a_cache_of_pages_is_as_large_as_its_pages():
    cache = caches.cache_shapes(CFG, NUMERICS, 2, 30, paging=Paging(4, 7))
    assert cache.pages.shape == (2, 8)
    assert [pool.shape[1:3] for pool in cache.kv] == [(7, 2), (7, 4)]


def test_snapshots_need_room():
    cache = caches.init_cache(CFG, NUMERICS, 2, 8)
    with pytest.raises(ValueError, match="count of snapshots must be at least 1"):
        snapshots.init_snapshots(cache, 0)
