"""Sizes that requests are given."""

import dataclasses

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given

from deepinfer_jax import cache as caches
from deepinfer_jax import params, steps, tables
from deepinfer_jax.engine import programs, sizes
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.requests import Options, Request
from tests import small

PLAIN = dataclasses.replace(small.PLAIN, engram_num_embeddings=(120, 120))


def request(length, reply):
    return Request(0, "", (0,) * length, 0, Options(max_tokens=reply))


@given(count=st.integers(1, 100), batch_size=st.none() | st.integers(1, 40))
def test_slots_hold_the_requests_or_the_batch(count, batch_size):
    slots = sizes.slots_for(count, batch_size)
    if batch_size is None:
        assert slots == (1 if count == 1 else sizes.DEFAULT_SLOTS)
    else:
        assert slots == batch_size or (count <= slots < 2 * count and slots & (slots - 1) == 0)
        assert slots <= batch_size


@given(asked=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 900)), min_size=1, max_size=4))
def test_every_request_fits_the_capacity(asked):
    requests = [request(*size) for size in asked]
    capacity = sizes.capacity_for(requests, 4096)
    longest = max(map(sum, asked))
    assert longest <= capacity <= max(2 * longest, sizes.SHORTEST_CAPACITY)
    assert sizes.capacity_for(requests, longest) == longest


@given(waiting=st.integers(1, 3000), slots=st.integers(1, 80))
def test_no_other_calls_for_these_prompt_rows_cost_less(waiting, slots):
    room = sizes.Sizes(slots, 512, slots, prefill=sizes.MORE_ROWS)
    beside = sizes.CALL_ROWS + sizes.SLOT_ROWS * slots
    left, spent = waiting, 0
    while left > 0:
        spent += sizes.prefill_rows(left, room) + beside
        left -= sizes.prefill_rows(left, room)
    small, middle, large = room.prefill
    least = min(
        a * large + b * middle + c * small + (a + b + c) * beside
        for a in range(-(-waiting // large) + 1)
        for b in range(-(-waiting // middle) + 1)
        for c in [max(0, -(-(waiting - a * large - b * middle) // small))]
    )
    assert spent == least


@pytest.mark.parametrize(
    ("waiting", "slots", "rows"),
    [(1, 1, 32), (128, 1, 32), (129, 1, 256), (64, 64, 32), (65, 64, 256), (900, 8, 1024)],
)
def test_rows_of_a_prefill_call(waiting, slots, rows):
    room = sizes.Sizes(slots, 512, slots, prefill=sizes.MORE_ROWS)
    assert sizes.prefill_rows(waiting, room) == rows


@pytest.mark.parametrize(
    ("waiting", "slots", "free"), [(0, 64, 0), (3, 64, 3), (99, 64, 8), (99, 8, 1), (5, 1, 1)]
)
def test_a_look_ends_for_those_who_wait(waiting, slots, free):
    assert sizes.enough_free(waiting, slots) == free


def test_larger_calls_where_there_are_many_prompts():
    """For a few it would not pay to compile them."""

    def calls(count):
        requests = [request(1000, 9)] * count
        return sizes.sizes_for(requests, PLAIN, 4096).prefill

    assert calls(32) == sizes.PREFILL_ROWS
    assert calls(33) == sizes.MORE_ROWS


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_of_none_is_refused(batch_size):
    with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {batch_size}"):
        sizes.slots_for(3, batch_size)


@pytest.mark.parametrize("batch_size", [True, 2.0, "4"])
def test_a_batch_size_is_an_integer(batch_size):
    with pytest.raises(TypeError, match="batch_size must be an integer"):
        sizes.slots_for(3, batch_size)


@pytest.mark.parametrize("capacity", [1, 37, 64, 65, 127, 200])
def test_any_capacity_makes_a_cache_that_the_tables_cover(capacity):
    """Pages round a capacity up; positions end with it all the same."""
    made = sizes.make_sizes(2, capacity, PLAIN)
    assert made.page_tokens * made.table >= capacity
    assert made.table == 1 or not any(made.page_tokens % ratio for ratio in PLAIN.ratios)
    numerics = Numerics.fp32()
    cache = caches.cache_shapes(PLAIN, numerics, 2, capacity, paging=made.paging)
    table = tables.make_tables(PLAIN, np.arange(131, dtype=np.int32) % 83, capacity)
    rows = programs.make_rows([], 8)
    given = (params.shapes(PLAIN), table, rows, cache)
    jax.eval_shape(lambda *given: steps.extend(*given, PLAIN, numerics), *given)
