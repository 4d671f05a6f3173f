"""Pixels become patches as the release makes them, from every kind of file and array."""

import dataclasses
import struct

import ml_dtypes
import numpy as np
import pytest
from PIL import Image, ImageOps

from deepinfer_jax import images
from deepinfer_jax.images import ImageLimits, Picture, sizes
from tests.images import files
from tests.images.files import RELEASED, VISION, encoded, pattern

FIT = (12, 24, 3)  # an array that VISION takes as it is


def levels(picture):
    """uint8 [H, W, 3] that a picture was cut from."""
    patch = picture.patch_size
    whole = picture.patches.reshape(picture.height, picture.width, 3, patch, patch)
    whole = whole.transpose(0, 3, 1, 4, 2).reshape(patch * picture.height, -1, 3)
    return np.rint((whole * 0.5 + 0.5) * 255).astype(np.uint8)


# -- patches ---------------------------------------------------------------------------------------


def test_patches_lie_row_by_row_and_hold_channel_y_x():
    pixels = pattern(*FIT)
    picture = images.picture_from_array(pixels, VISION)
    assert (picture.height, picture.width, picture.patch_size) == (3, 6, 4)
    assert picture.patches.shape == (18, 3, 4, 4)
    for row, column, channel in ((0, 0, 0), (1, 4, 2), (2, 5, 1)):
        cut = pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4, channel]
        patch = picture.patches[6 * row + column, channel]
        assert np.array_equal(np.rint((patch * 0.5 + 0.5) * 255), cut)


def test_values_are_normalised_in_float32_and_rounded_to_bfloat16():
    pixels = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    values = images.picture_from_array(pixels, VISION).patches
    unit = pixels.astype(np.float32) / np.float32(255)
    wanted = ((unit - np.float32(0.5)) / np.float32(0.5)).astype(ml_dtypes.bfloat16)
    assert values.dtype == np.float32
    assert set(values.ravel()) == set(wanted.astype(np.float32).ravel())
    assert np.array_equal(levels(images.picture_from_array(pattern(*FIT), VISION)), pattern(*FIT))


@pytest.mark.parametrize("size", [(9, 30), (64, 64), (200, 90), (301, 77), (5, 300), (700, 3)])
@pytest.mark.parametrize("ratio", [None, 8.0])
def test_an_image_is_fitted_as_the_release_does_it(size, ratio):
    """Bicubic, centred between grey bars; filling the size where the ratio is capped."""
    vision = dataclasses.replace(RELEASED, min_pixels=20000, max_wh_ratio=ratio)
    pixels = pattern(*size)
    image, best = Image.fromarray(pixels), sizes.resized(size[1], size[0], vision)
    if ratio is not None and size[1] >= ratio * size[0]:
        wanted = image.resize(best)
    else:
        wanted = ImageOps.pad(image, best, color=(127, 127, 127))
    assert np.array_equal(levels(images.picture_from_array(pixels, vision)), np.asarray(wanted))


def test_the_bits_of_a_resized_image():
    """Recorded: a Pillow that resizes to other bits would make other replies."""
    picture = images.picture_from_array(pattern(95, 130), RELEASED)
    assert (picture.height, picture.width) == (34, 46)
    assert picture.key == "9dacb4fc2a5021c1f04bb5055edc05d20a0ea94a47471945752190807f309934"


def test_the_key_names_the_contents():
    pixels = pattern(*FIT)
    picture = images.picture_from_array(pixels, VISION)
    other = pixels.copy()
    other[5, 7, 1] ^= 1
    assert picture == images.picture_from_bytes(encoded(pixels, "PNG"), VISION)
    assert hash(picture) == hash(images.picture_from_array(pixels.copy(), VISION))
    assert picture != images.picture_from_array(other, VISION)
    turned = Picture(picture.patches, picture.width, picture.height)
    assert picture.key != turned.key
    assert len(picture.key) == 64
    picture.patches[0] = 0  # of a copy
    assert picture.patches[0].any()


def test_patches_from_pixels_are_kept_in_a_quarter_of_their_size():
    picture = images.picture_from_array(pattern(*FIT), VISION)
    assert picture.kept.nbytes * 4 == picture.patches.nbytes
    assert picture == Picture(picture.patches, 3, 6)
    other = picture.patches
    other[3, 1, 2, 2] = 2.0  # no level's
    assert Picture(other, 3, 6).kept.dtype == np.float32
    assert np.array_equal(Picture(other, 3, 6).patches, other)
    negative = np.full_like(other, -0.0)
    assert np.signbit(Picture(negative, 3, 6).patches).all()


@pytest.mark.parametrize(
    ("patches", "said"),
    [
        (np.zeros((6, 3, 4, 4)), "must be float32"),
        (np.zeros((5, 3, 4, 4), np.float32), r"2 x 3 patches, got float32 \[5, 3, 4, 4\]"),
        (np.zeros((6, 3, 4, 5), np.float32), r"got float32 \[6, 3, 4, 5\]"),
        (np.full((6, 3, 4, 4), 0.1, np.float32), "must hold bfloat16 values"),
    ],
)
def test_patches_of_another_form_are_refused(patches, said):
    with pytest.raises(ValueError, match=said):
        Picture(patches, 2, 3)


# -- arrays and files of every kind ----------------------------------------------------------------


def test_arrays_of_every_number_of_channels():
    colour, opacity = pattern(*FIT), pattern(12, 24, 1)
    white = (colour * (opacity / 255.0) + 255 * (1 - opacity / 255.0)).round()
    read = images.picture_from_array(np.concatenate([colour, opacity], axis=2), VISION)
    assert np.array_equal(levels(read), white)
    grey = colour[:, :, :1]
    for form in (grey, grey[:, :, 0], np.concatenate([grey, np.full_like(grey, 255)], axis=2)):
        assert np.array_equal(
            levels(images.picture_from_array(form, VISION)), np.repeat(grey, 3, axis=2)
        )


def file_of(mode):
    """(bytes of a file, the RGB array that it shows)."""
    colour, opacity = pattern(*FIT), pattern(12, 24, 1)
    image = Image.fromarray(colour)
    white = images.picture_from_array(np.concatenate([colour, opacity], axis=2), VISION)
    if mode == "RGBA":
        return encoded(np.concatenate([colour, opacity], axis=2), "PNG"), levels(white)
    if mode == "palette":
        flat = image.quantize(16)
        return encoded(flat, "PNG"), np.asarray(flat.convert("RGB"))
    if mode == "palette, one clear":
        flat = image.quantize(16)
        shown = np.array(flat.convert("RGB"))
        shown[np.asarray(flat) == 5] = 255
        return encoded(flat, "PNG", transparency=5), shown
    if mode == "bilevel":
        return encoded(image.convert("1"), "PNG"), np.asarray(image.convert("1").convert("RGB"))
    if mode == "WebP":
        return encoded(image, "WEBP", lossless=True), colour
    if mode == "CMYK":
        data = encoded(image.convert("CMYK"), "JPEG", quality=95)
        return data, np.asarray(Image.open(files.io.BytesIO(data)).convert("RGB"))
    deep = pattern(12, 24, 1).astype(np.uint16) * 257 + 3
    if mode == "16 bits of grey":
        return encoded(deep[:, :, 0], "PNG"), np.repeat(deep >> 8, 3, axis=2)
    assert mode == "16 bits of RGB"
    deep = colour.astype(np.uint16) * 256 + 200
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    return files.png(24, 12, rows, depth=16), colour


@pytest.mark.parametrize(
    "mode",
    ["RGBA", "palette", "palette, one clear", "bilevel", "WebP", "CMYK", "16 bits of grey",
     "16 bits of RGB"],
)  # fmt: skip
def test_files_of_every_mode(mode):
    data, shown = file_of(mode)
    assert np.array_equal(levels(images.picture_from_bytes(data, VISION)), shown)
    with Image.open(files.io.BytesIO(data)) as image:
        assert images.picture_from_image(image, VISION) == images.picture_from_bytes(data, VISION)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_orientation_and_other_notes_change_nothing(kind):
    """As in the release and in deepseek-recipe: pixels are taken as they lie in the file."""
    image, notes = Image.fromarray(pattern(*FIT)), Image.Exif()
    notes[0x112] = 6
    plain = encoded(image, kind)
    noted = encoded(image, kind, exif=notes, icc_profile=b"none" * 100)
    assert len(noted) > len(plain)
    assert images.picture_from_bytes(noted, VISION) == images.picture_from_bytes(plain, VISION)


def test_files_by_path(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(pattern(*FIT), "PNG"))
    read = images.picture_from_file(path, VISION)
    assert read == images.picture_from_array(pattern(*FIT), VISION)
    small = ImageLimits(max_bytes=20)
    with pytest.raises(ValueError, match=r"a\.png: the file has \d+ bytes, at most 20 are read"):
        images.picture_from_file(path, VISION, small)
    with pytest.raises(ValueError, match="is not a file"):
        images.picture_from_file(tmp_path, VISION)
    with pytest.raises(FileNotFoundError):
        images.picture_from_file(tmp_path / "b.png", VISION)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pixels", "error", "said"),
    [
        (np.zeros((4, 4, 3)), TypeError, "uint8, got float64"),
        ([[0]], TypeError, "uint8, got list"),
        (np.zeros((0, 4, 3), np.uint8), ValueError, r"at least one pixel, got \[0, 4, 3\]"),
        (np.zeros((4, 4, 5), np.uint8), ValueError, r"got \[4, 4, 5\]"),
        (np.zeros((2, 4, 4, 3), np.uint8), ValueError, r"got \[2, 4, 4, 3\]"),
        (np.zeros((1, 100_000), np.uint8), ValueError, "too narrow: 100000 x 1 pixels"),
    ],
)
def test_arrays_that_are_no_images_are_refused(pixels, error, said):
    with pytest.raises(error, match=said):
        images.picture_from_array(pixels, RELEASED)


def frames():
    return [Image.fromarray(pattern(*FIT)), Image.fromarray(pattern(*FIT)[::-1].copy())]


def animated(kind):
    first, second = frames()
    return encoded(first, kind, save_all=True, append_images=[second])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: b"", "got an empty file"),
        (lambda: b"hello there", "a file that begins with b'hello th'"),
        (lambda: encoded(pattern(*FIT), "GIF"), "a GIF file, which may be animated"),
        (lambda: animated("GIF"), "a GIF file, which may be animated"),
        (lambda: animated("PNG"), "the PNG file is animated"),
        (lambda: animated("WEBP"), "the WebP file is animated"),
        (lambda: encoded(pattern(*FIT), "BMP"), "a BMP file"),
        (lambda: encoded(pattern(*FIT), "TIFF"), "a TIFF file"),
        (lambda: b"\0\0\0\x1cftypavif" + bytes(20), "of the brand 'AVIF'"),
        (lambda: files.png(0, 5), "says that it is empty: 0 x 5"),
        (lambda: files.png(60000, 60000), r"60000 x 60000 pixels, at most 67108864 in all"),
        (lambda: files.png(2**31 - 1, 1), "at most 67108864 in all"),
        (lambda: files.png(4000, 4000, bytes(9)), "damaged or cut short"),
        (lambda: files.png(12, 12, bytes(444), depth=3), "damaged or cut short"),
        (lambda: b"\xff\xd8" + b"\xff\xe0\0\4ab" * 70000, "more than 65536 parts"),
        (lambda: encoded(pattern(*FIT), "JPEG") + b"\xff\xda" * 64, "has 65 scans, at most 64"),
        (lambda: encoded(pattern(90, 90), "JPEG")[:-60], "JPEG file of 90 x 90 .* cut short"),
        (lambda: encoded(pattern(*FIT), "WEBP")[:-1], "WebP file is cut short in its data"),
        (lambda: encoded(pattern(*FIT), "PNG")[:-1], "PNG file is cut short"),
        (lambda: files.riff((b"VP8L", b"\x2f" + b"\xff" * 4)), "16384 x 16384 pixels, at most"),
        (lambda: files.riff((b"VP8X", struct.pack("<II", 0, 4)[:10].ljust(10, b"\0")),
                            (b"VP8L", b"\x2f\3\0\0\0")), "canvas is"),
        (lambda: files.riff((b"EXIF", b"none")), "it has no image"),
    ],
)  # fmt: skip
def test_files_that_are_not_one_whole_picture_are_refused_by_name(data, said):
    with pytest.raises(ValueError, match=said):
        images.picture_from_bytes(data(), VISION)


def test_limits_are_fields():
    data = encoded(pattern(*FIT), "PNG")
    assert images.picture_from_bytes(data, VISION, ImageLimits(max_pixels=12 * 24))
    with pytest.raises(ValueError, match=r"ImageLimits\.max_pixels"):
        images.picture_from_bytes(data, VISION, ImageLimits(max_pixels=12 * 24 - 1))
    for field in dataclasses.fields(ImageLimits):
        for value in (0, 2**31, 1.5, True):
            with pytest.raises(ValueError, match=field.name):
                ImageLimits(**{field.name: value})


def test_a_missing_pillow_is_said_with_its_extra(monkeypatch):
    import sys

    data, pixels = encoded(pattern(*FIT), "PNG"), pattern(*FIT)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install deepinfer-jax\[vision\]"):
        images.picture_from_bytes(data, VISION)
    assert images.picture_from_array(pixels, VISION).height == 3  # nothing to resize
