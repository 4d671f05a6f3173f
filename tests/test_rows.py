"""Rows: how they are made, and where a slot's tokens lie in a call."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import rows as row_sets
from deepinfer_jax.rows import FAR, Rows

SIZE, SLOTS = 16, 5


@st.composite
def layouts(draw) -> list[tuple[int, int, int]]:
    """(slot, first position, rows) of some slots in any order; a slot of -1 is padding."""
    order = draw(st.permutations(range(SLOTS)))
    runs = []
    for slot in order[: draw(st.integers(0, SLOTS))]:
        runs.append((-1, 0, draw(st.integers(0, 2))))
        runs.append((slot, draw(st.integers(0, 99)), draw(st.integers(1, 3))))
    return runs


def made(runs: list[tuple[int, int, int]]) -> Rows:
    slots, positions = np.full(SIZE, -1), np.zeros(SIZE, int)
    at = 0
    for slot, start, count in runs:
        count = min(count, SIZE - at)
        slots[at : at + count] = slot
        positions[at : at + count] = start + np.arange(count) if slot >= 0 else 0
        at += count
    return row_sets.text_rows(np.arange(SIZE), slots, positions)


spans_of = jax.jit(row_sets.spans_of, static_argnums=1)


@given(layouts())
@settings(max_examples=60)
def test_spans_find_every_row_and_nothing_else(runs):
    rows = made(runs)
    spans = spans_of(rows, SLOTS)
    assert spans.slots == SLOTS
    slots, positions = np.asarray(rows.slots), np.asarray(rows.positions)
    for number in np.flatnonzero(slots >= 0):
        inside, row = row_sets.row_of(spans, rows.slots[number], rows.positions[number])
        assert bool(inside)
        assert int(row) == number
    for slot in range(SLOTS):
        mine = positions[slots == slot]
        assert int(spans.start[slot]) == (mine.min() if mine.size else FAR)
        before = int(mine.min()) - 1 if mine.size else 1000
        inside, row = row_sets.row_of(spans, jnp.int32(slot), jnp.int32(before))
        assert not bool(inside)
        assert int(row) == 0


def test_a_batch_is_padded_on_the_right():
    tokens = np.array([[4, 5, 6], [7, 8, 9]])
    rows = row_sets.batch_rows(tokens, jnp.array([2, 3]))
    np.testing.assert_array_equal(rows.tokens, tokens.reshape(-1))
    np.testing.assert_array_equal(rows.slots, [0, 0, -1, 1, 1, 1])
    np.testing.assert_array_equal(rows.positions, [0, 1, 0, 0, 1, 2])
    np.testing.assert_array_equal(rows.real, [True, True, False, True, True, True])
    assert not np.asarray(rows.image).any()


@pytest.mark.parametrize("images", [False, True])
def test_taking_rows(images):
    rows = made([(2, 7, 3), (-1, 0, 1), (0, 4, 2)])
    if images:
        marks = jnp.arange(SIZE) == 1
        vectors = jnp.arange(SIZE * 3.0).reshape(SIZE, 3)
        rows = Rows(rows.tokens, rows.slots, rows.positions, marks, vectors)
    taken = row_sets.take_rows(rows, jnp.array([5, -1, 1]))
    np.testing.assert_array_equal(taken.slots, [0, -1, 2])
    np.testing.assert_array_equal(taken.positions, [5, 0, 8])
    np.testing.assert_array_equal(taken.tokens[jnp.array([0, 2])], [5, 1])
    if images:
        assert bool(taken.image[2])
        np.testing.assert_array_equal(taken.embeddings[2], [3, 4, 5])


def test_rows_of_text_beside_rows_with_images():
    marks, vectors = jnp.arange(SIZE) == 1, jnp.ones((SIZE, 3), jnp.bfloat16)
    first, second = made([(2, 7, 3)]), made([(0, 4, 2)])
    joined = row_sets.join_rows(dataclasses.replace(first, image=marks, embeddings=vectors), second)
    assert joined.embeddings is not None
    assert joined.embeddings.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(joined.embeddings, np.float32)[:, 0], [1] * SIZE + [0] * SIZE
    )
    np.testing.assert_array_equal(joined.image, [*marks, *[False] * SIZE])
    assert row_sets.join_rows(first, second).embeddings is None
