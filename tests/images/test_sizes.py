"""The size rule: the released one, in every pixel."""

import dataclasses
import random

import deepseek_recipe
import hypothesis.strategies as st
import pytest
from hypothesis import given

from deepinfer_jax.images import sizes, spans
from tests.images import files
from tests.images.files import RELEASED


def places(size, vision=RELEASED):
    """Of an image of this size in pixels, once it is resized."""
    cell = vision.patch_size * vision.downsample_ratio
    columns, rows = (-(-side // cell) for side in size)
    return spans.span_length(rows, columns)


def settled(size):
    """Resized until it no longer changes, as a service does that resizes what will be again."""
    while (again := sizes.resized(*size, RELEASED)) != size:
        size = again
    return size


def random_sizes(count):
    draw = random.Random(5)
    for _ in range(count):
        most = [draw.choice((60, 700, 3000, 30000)) for _ in range(2)]
        yield draw.randint(1, most[0]), draw.randint(1, most[1])


@pytest.mark.parametrize(
    ("size", "resized", "tokens"),
    [
        ((64, 64), (546, 546), 184),
        ((640, 480), (644, 490), 206),
        ((1920, 1080), (1708, 966), 968),
        ((1, 100_000), (42, 511 * 42), 1024),
        ((100_000, 1), (1021 * 42, 42), 1024),
    ],
)
def test_known_sizes(size, resized, tokens):
    assert sizes.resized(*size, RELEASED) == resized
    assert places(resized) == tokens


def test_token_counts_are_those_of_deepseek_recipe():
    """5,000 sizes up to 30,000 a side. The recipe resizes until the size stays, which changes some
    that are about six times as long as wide, or more; below that one pass is all.
    """
    for size in random_sizes(5000):
        info = deepseek_recipe.ImageInfo(b"", *size)
        wanted = deepseek_recipe.MultiModalData([info]).image_token_adjustment() + 1
        once = sizes.resized(*size, RELEASED)
        assert places(settled(once)) == wanted, size
        if max(size) < 5.8 * min(size):
            assert settled(once) == once, size


@pytest.mark.parametrize("size", [(64, 64), (133, 50), (50, 300), (700, 650)])
def test_pixels_are_those_of_deepseek_recipe(size):
    data = files.encoded(files.pattern(size[1], size[0]), "PNG")
    resolver = deepseek_recipe.ImageResolver(
        deepseek_recipe.ReqwestImageFetcher(), deepseek_recipe.OpenCvImagePreprocessor()
    )
    source = deepseek_recipe.BytesImageSource(data)
    (info,) = resolver.resolve([source], deepseek_recipe.ImageQuota()).images
    assert (info.width, info.height) == settled(sizes.resized(*size, RELEASED))


@given(
    st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    st.integers(2, 9),
    st.integers(1, 4),
    st.integers(4, 300),
    st.integers(1, 5000),
)
def test_every_size_is_whole_patches_within_the_tokens(size, patch, ratio, most, least):
    vision = dataclasses.replace(
        RELEASED, patch_size=patch, downsample_ratio=ratio, max_image_tokens=most, min_pixels=least
    )
    resized = sizes.resized(*size, vision)
    assert all(side >= patch and side % patch == 0 for side in resized)
    assert places(resized, vision) <= most


def test_a_wide_image_is_cut_short_where_the_config_says():
    vision = dataclasses.replace(RELEASED, max_wh_ratio=8.0)
    assert sizes.resized(9000, 100, vision) == sizes.resized(800, 100, RELEASED)
    assert sizes.resized(800, 100, vision) == sizes.resized(800, 100, RELEASED)
    assert sizes.resized(100, 9000, vision) == sizes.resized(100, 9000, RELEASED)
