"""Pictures through the tower: bit for bit alone, together, padded, and under a gradient.

The numbers are those of a slow model here, and recorded ones in tests/golden/test_vision.py.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.images import encode_images, encoding
from deepinfer_jax.model import vision
from deepinfer_jax.numerics import Numerics
from tests.images.towers import CFG, VISION, picture, released, weights
from tests.oracle.basics import Params
from tests.oracle.vision import image_rows

NATIVE, FLOAT32 = Numerics.native(False), Numerics.fp32()
BOTH = [NATIVE, pytest.param(FLOAT32, marks=pytest.mark.exhaustive)]
# A single patch, a row of patches, grids with a rest and without one; the last two are of a size
# class of their own.
SHAPES = ((1, 1), (7, 5), (8, 8), (1, 23), (5, 7), (9, 16), (11, 7))


@functools.cache
def alone(numerics: Numerics) -> dict[tuple[int, int], np.ndarray]:
    made = [encode_images(weights(), [picture(*s)], CFG, numerics)[0] for s in SHAPES]
    return {shape: features.rows for shape, features in zip(SHAPES, made, strict=True)}


def test_features_say_what_they_are_of():
    (made,) = encode_images(weights(), [picture(7, 5)], CFG, NATIVE)
    assert (made.height, made.width, made.key) == (4, 3, picture(7, 5).key)
    assert made.rows.shape == (12, CFG.hidden_size)
    assert made.rows.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [(3, SHAPES[:5]), *(pytest.param(b, SHAPES, marks=pytest.mark.exhaustive) for b in (1, 3, 8))],
    ids=["one size", "two sizes", "two sizes, three at once", "two sizes, all at once"],
)
@pytest.mark.parametrize("numerics", BOTH, ids=["bf16", "f32"])
def test_a_picture_does_not_see_its_neighbours(numerics, batch, shapes):
    """Any number in a call, any order, one of them twice."""
    order = np.random.default_rng(batch).permutation(len(shapes))
    given = [shapes[i] for i in (*order, order[0])]
    made = encode_images(weights(), [picture(*s) for s in given], CFG, numerics, batch=batch)
    for shape, features in zip(given, made, strict=True):
        np.testing.assert_array_equal(bits(features.rows), bits(alone(numerics)[shape]))


@pytest.mark.parametrize("shape", [(7, 5), (1, 1)])
@pytest.mark.parametrize("numerics", BOTH, ids=["bf16", "f32"])
def test_padding_changes_no_bit(numerics, shape):
    given, want = picture(*shape), alone(numerics)[shape]
    for size in (64, 192):
        made = encoding.encode(
            weights()["vision"], encoding.pack([given], size, VISION), VISION, numerics
        )
        np.testing.assert_array_equal(bits(np.asarray(made)[0, : len(want)]), bits(want))


def test_garbage_behind_a_picture_is_not_read():
    given, want = picture(7, 5), alone(NATIVE)[7, 5]
    packed = encoding.pack([given], 64, VISION)
    pixels = np.array(packed.pixels)
    pixels[:, 35:] = 3e38
    made = encoding.encode(
        weights()["vision"], dataclasses.replace(packed, pixels=pixels), VISION, NATIVE
    )
    np.testing.assert_array_equal(bits(np.asarray(made)[0, : len(want)]), bits(want))


def test_one_program_for_a_size_class():
    encode_images(weights(), [picture(3, 4), picture(2, 50)], CFG, NATIVE)
    before = encoding.encode._cache_size()
    many = [picture(h, w) for h in (1, 2, 5, 9) for w in (1, 3, 8, 15)]
    encode_images(weights(), many, CFG, NATIVE)
    assert encoding.encode._cache_size() == before


@pytest.mark.exhaustive
def test_the_forward_pass_under_a_gradient_keeps_its_bits():
    """And the slopes are those of plain products."""
    patches = encoding.pack([picture(7, 5), picture(3, 3)], 64, VISION)
    cells = [12, 4]

    def loss(tower, numerics):
        rows = encoding.encode(tower, patches, VISION, numerics)
        real = jnp.stack([jnp.arange(rows.shape[1]) < n for n in cells])[..., None]
        total = jnp.sum(jnp.where(real, jnp.sin(3 * rows), 0))
        return total, rows

    def slope(numerics):
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), weights()["vision"])
        run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames="numerics")
        (_, rows), slopes = run(wide, numerics=numerics)
        return rows, slopes

    rows, slopes = slope(FLOAT32)
    for place, shape in enumerate(((7, 5), (3, 3))):
        want = encode_images(weights(), [picture(*shape)], CFG, FLOAT32)[0].rows
        np.testing.assert_array_equal(bits(rows[place, : len(want)]), bits(want))
    _, plain = slope(dataclasses.replace(FLOAT32, rows="batched"))
    for name in ("patch_embed", "blocks", "norm", "aligner"):
        pairs = zip(jax.tree.leaves(slopes[name]), jax.tree.leaves(plain[name]), strict=True)
        for left, right in pairs:
            np.testing.assert_allclose(left, right, atol=1e-4 * float(jnp.abs(right).max()))


@pytest.mark.parametrize("shape", [(7, 5), (1, 1), (1, 23)])
def test_numbers_are_those_of_the_slow_model(shape):
    """Where bfloat16 rounds, by a few of its units; exhaustive in float32, to its last bits."""
    given = picture(*shape)
    _, want = image_rows(
        dataclasses.asdict(VISION), Params(released(weights())), given.patches, *shape
    )
    np.testing.assert_allclose(alone(NATIVE)[shape].astype(np.float64), want, atol=0.05)


@pytest.mark.exhaustive
def test_numbers_in_float32_are_those_of_the_slow_model():
    for shape in SHAPES:
        _, want = image_rows(
            dataclasses.asdict(VISION), Params(released(weights())), picture(*shape).patches, *shape
        )
        np.testing.assert_allclose(alone(FLOAT32)[shape], want, atol=2e-5)


def test_every_released_picture_has_a_size():
    """At most 1,024 tokens, also where a picture is one row or column of patches."""
    for height in range(1, 1022):
        cells = -(-height // 3)
        most = 3 * ((1022 // cells) - 1)
        for width in {1, max(1, most // 2), max(1, most)}:
            size = encoding.size_class(height, width, 3)
            assert height * width <= size
            assert cells * -(-width // 3) <= encoding.cell_room(size, 3)


def test_cells_are_row_major_and_filled_with_nothing():
    made = vision.grid_cells(3, 4, 2)
    assert made.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, -1, -1], [10, 11, -1, -1]]


def test_what_is_refused():
    text = dataclasses.replace(CFG, vision=None, image_token_id=None)
    with pytest.raises(ValueError, match="no vision tower: load"):
        encode_images(weights(), [picture(2, 2)], text, NATIVE)
    with pytest.raises(ValueError, match="no vision tower"):
        encode_images({}, [picture(2, 2)], CFG, NATIVE)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        encode_images(weights(), [picture(2, 2)], CFG, NATIVE, batch=0)
    with pytest.raises(ValueError, match=r"picture 1: .* of 30 x 30 .* 242 tokens, .* allows 200"):
        encode_images(weights(), [picture(2, 2), picture(30, 30)], CFG, NATIVE)
    other = dataclasses.replace(CFG, vision=dataclasses.replace(VISION, patch_size=3))
    with pytest.raises(ValueError, match="patches of 2 pixels a side, this model takes 3"):
        encode_images(weights(), [picture(2, 2)], other, NATIVE)
    with pytest.raises(ValueError, match="larger than the largest size, 9216"):
        encoding.size_class(97, 97, 3)
