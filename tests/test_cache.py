"""The cache: sizes, codecs, and rings that forget nothing which may still be read."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import cache as caches
from deepinfer_jax import quant, resources
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.model import attention, compress
from deepinfer_jax.model.attention import Ring
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import spans_of, text_rows
from tests.small import PLAIN, WINDOW_ONLY

FP32, NATIVE = Numerics.fp32(), Numerics.native()

# -- shapes ----------------------------------------------------------------------------------------


def test_released_sizes():
    """The sizes of docs/model.md 10."""
    cfg = ModelConfig.from_json(resources.config_file("deepseek-v4.1-flash"))
    cache = caches.cache_shapes(cfg, Numerics.native(rows="pallas"), 3, 1 << 20)
    assert cache.window.shape == (40, 3, 134, 528)
    assert cache.draft.shape == (3, 3, 134, 528)
    assert [a.shape for a in cache.kv] == [(3, 3, 1 << 19, 288), (1, 3, 1 << 20, 288)]
    assert [a.shape for a in cache.keys] == [(3, 3, 1 << 19, 17), (1, 3, 1 << 20, 17)]
    assert cache.pending.shape == (3, 3, 7, 2, 512)
    assert cache.history.shape == (3, 9)
    entries = sum(a.size * a.dtype.itemsize for a in (*cache.kv, *cache.keys))
    assert entries == 3 * 933_232_640


def test_capacity_is_rounded_up_to_whole_groups():
    cache = caches.cache_shapes(PLAIN, FP32, 2, 7)
    assert [a.shape[2] for a in cache.kv] == [4, 7]
    assert cache.kv[0].dtype == jnp.float32
    assert cache.kv[0].shape[-1] == PLAIN.head_dim


def test_the_axis_of_slots_is_the_one_that_grows_with_them():
    """Of pages, which are the slots' too, as many as there are slots."""
    few, many = (caches.cache_shapes(PLAIN, FP32, slots, 7) for slots in (3, 8))
    names = [field.name for field in dataclasses.fields(few) if field.name != "ranks"]
    for name in names:
        for a, b in zip(*(jax.tree.leaves(getattr(c, name)) for c in (few, many)), strict=True):
            grown = [
                place for place, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y
            ]
            assert grown == [caches.slot_axis(name)], name


def test_a_model_without_global_kv_has_rings_only():
    cache = caches.init_cache(WINDOW_ONLY, NATIVE, 2, 9)
    assert cache.kv == cache.keys == ()
    assert cache.pending.shape[0] == cache.draft.shape[0] == 0
    assert cache.slots == 2
    assert not np.asarray(cache.window).any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"slack": 0}, "slack must be at least 1, got 0"),
        ({"capacity": 201}, "capacity 201 exceeds max_position_embeddings=200"),
    ],
)
def test_wrong_sizes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        caches.cache_shapes(PLAIN, FP32, **{"slots": 2, "capacity": 8, **wrong})


# -- codecs ----------------------------------------------------------------------------------------

CODECS = {
    "window": (caches.window_codec, quant.qdq_fp8),
    "main": (caches.main_codec, quant.qdq_main),
    "index": (caches.index_codec, quant.qdq_index),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "stored_as"), [("tiled", jnp.uint16), ("pallas", jnp.uint8)])
def test_stored_vectors_come_back_as_their_round_trip(name, dtype, rows, stored_as):
    """Groups of every magnitude, those included where the FP4 quantizer is not idempotent."""
    make, round_trip = CODECS[name]
    codec = make(PLAIN, dataclasses.replace(NATIVE, rows=rows))
    rng = np.random.default_rng(3)
    x = rng.normal(size=(400, codec.width)) * np.exp2(rng.uniform(-12, 6, (400, 1)))
    x = jnp.asarray(x.astype(np.float32)).astype(dtype)
    stored = jax.jit(codec.store)(x)
    shaped = codec.shaped(*stored.shape[:-1])
    assert (stored.shape, stored.dtype) == (shaped.shape, shaped.dtype)
    assert shaped.dtype == stored_as
    back = jax.jit(functools.partial(codec.load, dtype=dtype))(stored)
    np.testing.assert_array_equal(bits(back), bits(jax.jit(round_trip)(x)))


@pytest.mark.parametrize("name", CODECS)
def test_vectors_are_kept_whole_without_quantizers(name):
    codec = CODECS[name][0](PLAIN, FP32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, codec.width)).astype(np.float32))
    shaped = codec.shaped(3)
    assert (shaped.shape, shaped.dtype) == ((3, codec.width), jnp.float32)
    np.testing.assert_array_equal(codec.load(codec.store(x), jnp.float32), x)


# -- rings -----------------------------------------------------------------------------------------

SLOTS, ROWS = 3, 12


@jax.jit
def targets(slots, positions, ring):
    rows = text_rows(jnp.zeros_like(slots), slots, positions)
    return caches.ring_targets(rows, spans_of(rows, SLOTS), ring)


@given(
    runs=st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 40)), min_size=1, max_size=3,
                  unique_by=lambda run: run[0]),
    counts=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    ring=st.integers(1, 7),
)  # fmt: skip
@settings(max_examples=60)
def test_rings_take_the_last_rows_of_a_call(runs, counts, ring):
    """No two rows share a place, padding has none, and the newest of a slot win."""
    slots, positions = np.full(ROWS, -1, np.int32), np.zeros(ROWS, np.int32)
    at = 0
    for (slot, start), count in zip(runs, counts, strict=False):
        count = min(count, ROWS - at)
        slots[at : at + count] = slot
        positions[at : at + count] = start + np.arange(count) if slot >= 0 else 0
        at += count
    slot, place = (np.asarray(a) for a in targets(slots, positions, np.int32(ring)))
    for number in range(ROWS):
        mine = positions[slots == slots[number]]
        kept = slots[number] >= 0 and positions[number] > mine.max() - ring
        assert slot[number] == (slots[number] if kept else SLOTS)
    written = [(s, p) for s, p in zip(slot, place, strict=True) if s < SLOTS]
    assert len(written) == len(set(written))


WINDOW, SLACK = 5, 4
CODEC = caches.window_codec(PLAIN, FP32)


def _write(data, positions, value: float):
    """Store window rows that hold their position, or `value` where that is given."""
    rows = text_rows(np.zeros(len(positions)), np.zeros(len(positions)), positions)
    values = jnp.asarray(positions, jnp.float32) if value < 0 else jnp.full(len(positions), value)
    new = jnp.broadcast_to(values.astype(jnp.float32)[:, None], (len(positions), CODEC.width))
    return attention.store_window(
        Ring(data, 0), new, rows, spans_of(rows, 1), CODEC, Numerics.fp32()
    )


def _read(data, wanted: range):
    """What a later call finds at the positions `wanted`, none of which are its own rows."""
    rows = text_rows(np.zeros(1), np.zeros(1), [wanted.stop])
    new = jnp.full((1, CODEC.width), 99.0)
    where = jnp.asarray(list(wanted), jnp.int32)
    keys = attention.window_keys(
        new, Ring(data, 0), spans_of(rows, 1), jnp.int32(0), where, CODEC
    )  # fmt: skip
    return keys[:, 0].tolist()


@pytest.mark.parametrize(
    ("reader", "least"), [("backbone", WINDOW + SLACK - 2), ("draft", WINDOW + SLACK - 1)]
)
@pytest.mark.parametrize("spare", [0, -1])
def test_window_rings_are_long_enough_and_not_one_longer(reader, least, spare):
    """`SLACK` rows are written of which one counts; then the next row, or a draft, looks back.

    The cache allots `window + slack`: a backbone row needs two places less, a draft one.
    """
    start = 20
    data = jnp.zeros((1, 1, least + spare, CODEC.width), jnp.float32)
    data = _write(data, np.arange(start - WINDOW, start), -1)
    data = _write(data, np.arange(start, start + SLACK), 77.0)
    data = _write(data, np.array([start]), -1)
    first = start + 2 - WINDOW if reader == "backbone" else start + 1 - WINDOW
    wanted = range(first, start + 1)
    assert (_read(data, wanted) == list(wanted)) == (spare == 0)


@pytest.mark.parametrize(("ring", "intact"), [(SLACK, True), (SLACK - 1, False)])
def test_pending_pairs_survive_rejected_rows(ring, intact):
    """Row 20 counts, its group's second token was wrong; it comes again and must find row 20."""
    pending = jnp.zeros((1, ring, 2, 3), jnp.float32)

    def rows_at(positions):
        rows = text_rows(np.zeros(len(positions)), np.zeros(len(positions)), positions)
        return rows, spans_of(rows, 1)

    rows, spans = rows_at(range(20, 20 + SLACK))
    pair = jnp.asarray(np.arange(20, 20 + SLACK, dtype=np.float32)).reshape(-1, 1, 1)
    slot, place = caches.ring_targets(rows, spans, ring)
    pending = pending.at[slot, place].set(jnp.broadcast_to(pair, (SLACK, 2, 3)), mode="drop")
    rows, spans = rows_at([21])
    groups = compress.group_pairs(jnp.full((1, 2, 3), 5.0), pending, rows, spans, 2)
    assert (groups[0, :, 0, 0].tolist() == [20, 5]) == intact
