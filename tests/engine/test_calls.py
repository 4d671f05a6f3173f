"""How prompt rows become calls: no image is split, and sizes are those that were foreseen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.engine import sizes
from deepinfer_jax.engine.calls import Shown, calls
from deepinfer_jax.engine.sizes import Sizes, image_rows
from deepinfer_jax.numerics import Numerics
from tests import small

NATIVE = Numerics.native()
SIZES = Sizes(slots=3, capacity=4096, pages=192)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list, list[Shown]]:
    """Rows of a step, and images among them: of one token, of a whole call, side by side."""
    parts = draw(
        st.lists(st.tuples(st.integers(0, 300), st.sampled_from([0, 0, 1, 5, 32, 33, 256, 700])),
                 max_size=5)
    )  # fmt: skip
    shown, at = [], 0
    for text, image in parts:
        at += text
        if image:
            shown.append(Shown(at, np.full((image, 1), len(shown), np.float32)))
            at += image
    return [(7, 1, position) for position in range(at)], shown


@given(steps())
def test_every_row_runs_once_and_no_image_is_split(step):
    every, shown = step
    made = list(calls(every, shown, SIZES))
    assert [row for call in made for row in call.part] == every
    found, before = [], 0
    for call in made:
        assert 0 < len(call.part) <= call.size
        found += [(before + each.first, int(each.embeddings[0, 0])) for each in call.shown]
        assert all(each.end <= len(call.part) for each in call.shown)
        before += len(call.part)
    assert found == [(each.first, number) for number, each in enumerate(shown)]


@given(steps())
def test_the_sizes_of_calls_follow_from_the_images_alone(step):
    """So that they can be compiled ahead."""
    every, shown = step
    foreseen = {image_rows(len(each.embeddings)) for each in shown}
    for call in calls(every, shown, SIZES):
        assert call.size in (foreseen if call.shown else SIZES.prefill)


@given(st.integers(0, 700))
def test_without_images_calls_are_what_they_were(count):
    every = [(7, 1, position) for position in range(count)]
    left, want = count, []
    while left > 0:
        want.append(sizes.prefill_rows(left, SIZES))
        left -= want[-1]
    assert [call.size for call in calls(every, [], SIZES)] == want


@pytest.mark.parametrize(
    ("length", "rows"), [(4, 32), (32, 32), (33, 256), (256, 256), (257, 1024), (1025, 2048)]
)
def test_rows_for_an_image(length, rows):
    assert image_rows(length) == rows


def test_rows_of_a_call_with_an_image():
    d = small.CONFIG.hidden_size
    values = np.arange(3 * d, dtype=np.float32).reshape(3, d) / 64
    every = [(5, 0, 0), *[(129, 0, place) for place in (1, 2, 3)], (6, 2, 0)]
    (call,) = calls(every, [Shown(1, values)], SIZES)
    rows = call.rows(small.CONFIG, NATIVE)
    assert rows.embeddings is not None
    assert (rows.embeddings.shape, str(rows.embeddings.dtype)) == ((32, d), "bfloat16")
    assert np.flatnonzero(rows.image).tolist() == [1, 2, 3]
    np.testing.assert_array_equal(
        np.asarray(rows.embeddings[1:4], np.float32), values.astype(rows.embeddings.dtype)
    )
    assert not np.asarray(rows.embeddings[4:]).any()
    (text,) = calls(every, [], SIZES)
    assert text.rows(small.CONFIG, NATIVE).embeddings is None
