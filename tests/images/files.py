"""Image files for tests, by hand where no library would write them."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

from deepinfer_jax.config import VisionConfig

VISION = VisionConfig(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=48,
    patch_size=4,
    rope_theta=1e4,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=64,
)
RELEASED = VisionConfig(32, 1024, 16, 2816, 14, 1e4, 3, 1024, 295936)


def pattern(height, width, channels=3):
    """uint8 [height, width, channels]: smooth in both directions, no two rows or columns equal."""
    y, x, c = np.ogrid[:height, :width, :channels]
    return ((7 * y + 3 * x + 40 * c + y * x // 16) % 256).astype(np.uint8)


def encoded(image, kind, **options):
    """Bytes of a file of this kind of an image or array."""
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name, body=b""):
    """One chunk of a PNG, its checksum right."""
    data = name + body
    return struct.pack(">I", len(body)) + data + struct.pack(">I", zlib.crc32(data))


def png(width, height, rows=b"", *, depth=8, colour=2, before=b"", after=b""):
    """A PNG whose header says what it is told; `rows`: what its data unpacks to."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = before + chunk(b"IDAT", zlib.compress(rows)) + after
    return b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND")


def riff(*chunks):
    """A WebP file of (name, data) chunks."""
    parts = [n + struct.pack("<I", len(d)) + d + b"\0" * (len(d) % 2) for n, d in chunks]
    body = b"WEBP" + b"".join(parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body
