"""Spans: what stands where, and from which vector."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.images import spans
from deepinfer_jax.images.features import Features

D = 5


def vectors(seed: int = 0) -> dict[str, jax.Array]:
    names = ("image_start", "image_newline", "image_end")
    return {
        name: jax.random.normal(jax.random.key(seed + i), (D,)).astype(jnp.bfloat16)
        for i, name in enumerate(names)
    }


def features(height: int, width: int) -> Features:
    rows = np.arange(height * width * D, dtype=np.float32).reshape(-1, D)
    return Features(rows, height, width, "a")


def test_kinds_of_a_span():
    s, i, n, e = spans.START, spans.IMAGE, spans.NEWLINE, spans.END
    assert spans.span_kinds(2, 3).tolist() == [s, i, i, i, n, i, i, i, n, e]
    assert spans.span_kinds(1, 1).tolist() == [s, i, n, e]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (7, 1), (1, 11)])
def test_every_row_comes_from_its_vector(height, width):
    model, given = vectors(), features(height, width)
    made = spans.span_embeddings(model, given)
    kinds = spans.span_kinds(height, width)
    assert made.shape == (spans.span_length(height, width), D) == (len(kinds), D)
    np.testing.assert_array_equal(made[kinds == spans.IMAGE], given.rows)
    for kind, name in ((spans.START, "start"), (spans.NEWLINE, "newline"), (spans.END, "end")):
        want = np.asarray(model[f"image_{name}"], np.float32)
        assert (made[kinds == kind] == want).all()


def test_rows_on_the_host_and_traced_ones_give_the_same():
    model, given = vectors(), features(2, 3)
    on_device = jax.tree.map(jnp.asarray, given)
    traced = jax.jit(spans.span_embeddings)(model, on_device)
    np.testing.assert_array_equal(traced, spans.span_embeddings(model, given))


def test_what_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0 and 3"):
        spans.span_length(0, 3)
    wrong = Features(np.zeros((6, D), np.float32), 2, 2, "a")
    with pytest.raises(ValueError, match=r"must be \(4, 5\).*got \(6, 5\); encode"):
        spans.span_embeddings(vectors(), wrong)
