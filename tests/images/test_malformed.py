"""Malformed files: each is refused by name or is a picture; none stops or fills the process."""

import random
import resource
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from deepinfer_jax import images
from deepinfer_jax.images import ImageLimits
from tests.images import files
from tests.images.files import VISION, encoded, pattern

COUNT = 70  # of every format
LARGE = ImageLimits(max_pixels=2**22)
MEBIBYTES = 64  # decoding 2**22 pixels takes less


def originals(kind):
    """Sound files of a format: the codings that differ inside."""
    clear = np.concatenate([pattern(37, 53), pattern(37, 53, 1)], axis=2)
    image = Image.fromarray(pattern(37, 53))
    if kind == "PNG":
        return [encoded(image, kind), encoded(image.quantize(9), kind), encoded(clear, kind)]
    if kind == "JPEG":
        return [
            encoded(image, kind),
            encoded(image, kind, progressive=True),
            encoded(image.convert("CMYK"), kind),
        ]
    return [encoded(image, kind), encoded(image, kind, lossless=True), encoded(clear, kind)]


def flipped(data, draw):
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 30))):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(data, draw):
    return data[: draw.randrange(len(data))]


def lying(data, draw):
    """Sizes and lengths in the header are others; checksums of a PNG are made right again."""
    changed = bytearray(data)
    if data[:4] == b"\x89PNG":
        sizes = [draw.choice((0, 1, 2**31 - 1, 2**14, draw.randint(1, 3000))) for _ in range(2)]
        head = struct.pack(">II", *sizes) + data[24:29]
        changed[16:29] = head
        changed[29:33] = struct.pack(">I", zlib.crc32(b"IHDR" + head))
    elif data[:2] == b"\xff\xd8":
        frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        changed[frame + 5 : frame + 9] = draw.randbytes(4)
    else:
        at = draw.choice((4, 16, 20, 24, 26, 30))
        changed[at : at + 4] = draw.randbytes(4)
    return bytes(changed)


def malformed(kind):
    """COUNT files, the same ones every time, and how each came about."""
    draw, sound = random.Random(f"malformed {kind}"), originals(kind)
    for number in range(COUNT):
        change = (flipped, cut, lying)[number % 3]
        yield change, change(sound[draw.randrange(len(sound))], draw)


def peak():
    """Most memory that the process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_malformed_files_are_refused_or_pictures(kind):
    for data in originals(kind):
        images.picture_from_bytes(data, VISION, LARGE)
    before, begun, said, read = peak(), time.process_time(), [], []
    for change, data in malformed(kind):
        try:
            assert images.picture_from_bytes(data, VISION, LARGE).patches.size
            read.append(change)
        except ValueError as error:
            said.append(str(error))
    assert len(said) + len(read) == COUNT
    assert len(said) >= COUNT // 2
    assert max(map(len, said)) < 300
    assert cut not in read
    assert kind != "PNG" or flipped not in read  # its parts have checksums
    assert time.process_time() - begun < 20  # measured: 0.1 s
    assert peak() - before <= MEBIBYTES


def test_a_bomb_costs_no_memory():
    """128 MiB of zeros in 600 KiB, as text beside a small image and as its pixels."""
    before = peak()
    zeros = zlib.compressobj(1)
    packed = b"".join([zeros.compress(bytes(2**20)) for _ in range(128)]) + zeros.flush()
    with pytest.raises(ValueError, match="at most 67108864"):
        images.picture_from_bytes(files.png(13000, 13000), VISION)
    small = files.png(12, 12, bytes(12 * 37), before=files.chunk(b"zTXt", b"a\0\0" + packed))
    assert images.picture_from_bytes(small, VISION).height == 3
    body = files.chunk(b"IDAT", packed)
    large = files.png(12, 12)
    start, end = large.index(b"IDAT") - 4, large.index(b"IEND") - 4
    assert images.picture_from_bytes(large[:start] + body + large[end:], VISION).height == 3
    assert peak() - before <= MEBIBYTES
