"""What an image file says about itself, and the parts of it that make pixels.

Read without a decoder and before one is asked for memory: the size that a header claims, animation,
checksums, the ends of parts. A file that passes may still be broken inside, which its decoder says;
it cannot be larger than it claimed here.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Literal, NoReturn, TypeVar

from deepinfer_jax.images.limits import ImageLimits

Format = Literal["PNG", "JPEG", "WebP"]
Part = TypeVar("Part")

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_CONTAINERS = {  # how files begin that are images of another format
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\1\0": "ICO",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"8BPS": "Photoshop",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<?xml": "XML",
}
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF"}
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # markers that begin a frame
_SCAN = 0xDA
_FILL = re.compile(rb"\xff*")


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """Format and size in pixels of a file, and `data`: what of it a decoder has to see."""

    format: Format
    width: int
    height: int
    data: bytes


def read_header(data: bytes, limits: ImageLimits) -> Header:
    """The header of a PNG, JPEG or WebP file.

    Raises ValueError for another format, a file that is cut short, damaged or animated, and one
    beyond `limits`.
    """
    if len(data) > limits.max_bytes:
        raise ValueError(
            f"the file has {len(data)} bytes, at most {limits.max_bytes} are read: save it smaller "
            "or raise ImageLimits.max_bytes"
        )
    if data.startswith(_PNG):
        header = _png(data, limits)
    elif data.startswith(b"\xff\xd8\xff"):
        header = _jpeg(data, limits)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        header = _webp(data, limits)
    else:
        raise ValueError(f"expected a PNG, JPEG or WebP file, got {_name(data)}; convert it")
    _check_size(header, limits)
    return header


def _name(data: bytes) -> str:
    """What a file of another format is, for the refusal."""
    if not data:
        return "an empty file"
    for start, name in _CONTAINERS.items():
        if data.startswith(start):
            still = ", which may be animated" if name == "GIF" else ""
            return f"a {name} file{still}"
    if data[4:8] == b"ftyp":
        return f"a file of the brand {_BRANDS.get(data[8:12], data[8:12].decode('latin-1'))!r}"
    return f"a file that begins with {data[:8]!r}"


def _check_size(header: Header, limits: ImageLimits) -> None:
    width, height = header.width, header.height
    if width < 1 or height < 1:
        raise ValueError(f"the {header.format} file says that it is empty: {width} x {height}")
    if width * height > limits.max_pixels:
        raise ValueError(
            f"the {header.format} file says {width} x {height} pixels, at most {limits.max_pixels} "
            "in all are decoded: save it smaller or raise ImageLimits.max_pixels"
        )


def _short(format: Format, part: str) -> NoReturn:
    raise ValueError(f"the {format} file is cut short in {part}; get it again")


def _broken(format: Format, what: str) -> NoReturn:
    raise ValueError(f"the {format} file is damaged: {what}; get it again")


def _animated(format: Format) -> NoReturn:
    raise ValueError(f"the {format} file is animated, an image is one picture: save one frame")


def _counted(format: Format, parts: Iterable[Part], limits: ImageLimits) -> Iterator[Part]:
    """The parts of a file, as long as they are not too many."""
    for count, part in enumerate(parts, 1):
        if count > limits.max_parts:
            raise ValueError(
                f"the {format} file has more than {limits.max_parts} parts: save it anew or raise "
                "ImageLimits.max_parts"
            )
        yield part


# -- PNG: chunks of length, name, data and checksum ------------------------------------------------


def _png(data: bytes, limits: ImageLimits) -> Header:
    """Chunks that make no pixels (texts, profiles, EXIF) are not handed on."""
    kept, first = [_PNG], None
    for name, start, end in _counted("PNG", _png_chunks(data), limits):
        if first is None and name != b"IHDR":
            _broken("PNG", f"it begins with {name!r} instead of b'IHDR'")
        if name in (b"acTL", b"fcTL", b"fdAT"):
            _animated("PNG")
        if first is None:
            if end - start != 25:
                _broken("PNG", f"its first part has {end - start - 12} bytes instead of 13")
            first = start + 8
        if name in _PNG_KEPT:
            kept.append(data[start:end])
    assert first is not None, "a file without chunks is cut short"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (first, first + 4))
    return Header("PNG", width, height, b"".join(kept))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(name, start, end) of the chunks up to IEND, whole and with the right checksum."""
    at, name, view = len(_PNG), b"", memoryview(data)
    while name != b"IEND":
        name = data[at + 4 : at + 8]
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if len(name) < 4 or end > len(data):
            _short("PNG", f"its part at byte {at}")
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            _broken("PNG", f"the checksum of its part {name!r} is wrong")
        yield name, at, end
        at = end


# -- JPEG: segments of a marker and a length, then scans -------------------------------------------


def _jpeg(data: bytes, limits: ImageLimits) -> Header:
    """Segments that make no pixels (EXIF, profiles, thumbnails, comments) are not handed on."""
    kept, size, start = [data[:2]], None, 2
    for marker, start, end in _counted("JPEG", _jpeg_segments(data), limits):
        if marker in _FRAMES:
            if size is not None:
                _broken("JPEG", "it has two frames")
            if end - start < 10:
                _broken("JPEG", "its frame header is too small")
            size = [int.from_bytes(data[start + k : start + k + 2], "big") for k in (5, 7)]
        if marker == _SCAN:
            break
        if not 0xE1 <= marker <= 0xED and marker not in (0xEF, 0xFE):  # JFIF and Adobe are kept
            kept.append(data[start:end])
    if size is None:
        _broken("JPEG", "its image begins without a frame header")
    scans = data.count(bytes((0xFF, _SCAN)), start)
    if scans > limits.max_scans:
        raise ValueError(
            f"the JPEG file has {scans} scans, at most {limits.max_scans} are decoded: save it "
            "anew or raise ImageLimits.max_scans"
        )
    height, width = size
    return Header("JPEG", width, height, b"".join([*kept, data[start:]]))


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of the segments up to the first scan's, all of which have a length."""
    marker, end = 0, 2
    while marker != _SCAN:
        start = _end_of_fill(data, end) - 1  # any number of 0xFF may stand before a marker
        if len(data) < start + 4:
            _short("JPEG", "its header")
        marker = data[start + 1]
        if start < end or not 0xC0 <= marker <= 0xFE or 0xD0 <= marker <= 0xD9:
            _broken("JPEG", f"there is no segment at byte {end}")
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        if end < start + 4:
            _broken("JPEG", f"the segment at byte {start} says that it is empty")
        if end > len(data):
            _short("JPEG", f"its segment at byte {start}")
        yield marker, start, end


def _end_of_fill(data: bytes, at: int) -> int:
    found = _FILL.match(data, at)
    return found.end() if found else at


# -- WebP: chunks of name, length and data inside one RIFF chunk -----------------------------------


def _webp(data: bytes, limits: ImageLimits) -> Header:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        _short("WebP", f"its data: {len(data)} bytes of {end}")
    canvas = size = None
    for name, start, stop in _counted("WebP", _webp_chunks(data, end), limits):
        part = data[start : min(stop, start + 10)]
        if name in (b"ANIM", b"ANMF") or (name == b"VP8X" and part[:1] and part[0] & 2):
            _animated("WebP")
        if name == b"VP8X" and len(part) == 10:
            canvas = tuple(1 + int.from_bytes(part[k : k + 3], "little") for k in (4, 7))
        elif name in (b"VP8 ", b"VP8L") and size is None:
            size = _webp_size(name, part)
    if size is None:
        _broken("WebP", "it has no image")
    if canvas is not None and canvas != size:
        _broken("WebP", f"its canvas is {canvas[0]} x {canvas[1]}, its image {size[0]} x {size[1]}")
    return Header("WebP", *size, data[:end])


def _webp_chunks(data: bytes, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(name, start, end) of the data of each chunk; an odd one is padded to an even length."""
    at = 12
    while at + 8 <= end:
        start = at + 8
        stop = start + int.from_bytes(data[at + 4 : start], "little")
        if stop > end:
            _short("WebP", f"its part {data[at : at + 4]!r}")
        yield data[at : at + 4], start, stop
        at = stop + (stop - start) % 2


def _webp_size(name: bytes, part: bytes) -> tuple[int, int]:
    """(width, height) of an image chunk, VP8 (lossy) or VP8L (lossless), by how it begins."""
    if name == b"VP8 " and len(part) == 10 and part[3:6] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(part[k : k + 2], "little") & 0x3FFF for k in (6, 8))
        return width, height
    if name == b"VP8L" and len(part) >= 5 and part[0] == 0x2F:
        bits = int.from_bytes(part[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    _broken("WebP", f"its part {name!r} begins with none of an image")
