"""Embeddings of images: encoded once while they are kept, the same bits either way."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.images import Features, encode_images, span_embeddings
from deepinfer_jax.images.gallery import Gallery
from deepinfer_jax.numerics import Numerics
from tests.images.towers import CFG, picture, weights

NATIVE = Numerics.native(False)
ONE = 4 * CFG.hidden_size * 2  # bytes of the smallest span


class Asked:
    """Programs as they are, and how often."""

    def __init__(self):
        self.times = 0

    def __call__(self, program, *args):
        self.times += 1
        return program(*args)


@functools.cache
def encoded() -> tuple[Features, ...]:
    every = [picture(7, 5), picture(1, 1), picture(2, 2)]
    return encode_images(weights(), every, CFG, NATIVE)


def gallery(asked: Asked, **more) -> Gallery:
    return Gallery(weights(), CFG, NATIVE, ask=asked, **more)


@pytest.mark.parametrize(("number", "shape"), [(0, (7, 5)), (1, (1, 1)), (2, (2, 2))])
def test_pictures_and_their_features_have_the_same_bits(number, shape):
    want = np.asarray(span_embeddings(weights()["vision"], encoded()[number]))
    shown = gallery(Asked())
    on_device = Features(jnp.asarray(encoded()[number].rows), *shape_of(number), "")
    for image in (picture(*shape), encoded()[number], on_device):
        found = shown.embeddings(image)
        np.testing.assert_array_equal(bits(found), bits(want))
        assert not found.flags.writeable


def shape_of(number: int) -> tuple[int, int]:
    return encoded()[number].height, encoded()[number].width


def test_what_was_used_last_is_kept():
    asked = Asked()
    shown = gallery(asked, kept_bytes=2 * ONE)
    small = [picture(1, 1, seed) for seed in range(3)]
    for image, times in [(0, 1), (0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)]:
        shown.embeddings(small[image])
        assert asked.times == times
    shown.embeddings(picture(7, 5))  # larger than all that is kept: it stays alone
    shown.embeddings(picture(7, 5))
    assert asked.times == 5


def test_features_are_not_kept_under_the_name_of_their_picture():
    """Nor asked for: a wrong name on features changes no other request."""
    asked = Asked()
    shown = gallery(asked)
    wrong = Features(np.ones((1, CFG.hidden_size), jnp.bfloat16), 1, 1, picture(1, 1).key)
    other = shown.embeddings(wrong)
    assert asked.times == 0
    assert (bits(shown.embeddings(picture(1, 1))) != bits(other)).any()


def test_a_value_that_is_no_number_is_refused_and_not_kept():
    asked = Asked()
    shown = gallery(asked)
    rows = np.ones((2, CFG.hidden_size), jnp.bfloat16)
    rows[1, 3] = np.nan
    with pytest.raises(FloatingPointError, match="an image of 1 x 2 cells are not all finite"):
        shown.embeddings(Features(rows, 1, 2, ""))
    broken = Gallery(
        weights(),
        CFG,
        NATIVE,
        ask=lambda program, *args: jnp.full((1, 24, CFG.hidden_size), jnp.inf),
    )
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="are the tower's weights"):
            broken.embeddings(picture(1, 1))
