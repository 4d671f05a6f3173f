"""Messages whose content is a list of parts, texts and images, as messages of plain text.

A part is `{"type": "text", "text": ...}`, `{"type": "image", "image": ...}`, `{"type": "image"}`
for an image that is given elsewhere, or `{"type": "image_url", "image_url": {"url": ...}}`.
deepseek-recipe joins parts by an empty line, and so does this.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

ELSEWHERE = None  # what a part holds whose image is given elsewhere
_MARK = "\ue000"  # of private use: no text means anything by it
_ROLES = ("system", "user", "tool")  # those that may show images
_TYPES = {"text": "text", "image": "image", "image_url": "image_url"}  # type -> key of its value


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """Messages of plain text, and their images.

    Attributes:
      messages: the same, each content a text in which `mark` stands for an image.
      images: what the image parts hold, in order, each with the place of its part.
      mark: a text that is in no content; "" where there are no images.
    """

    messages: list[Any]
    images: tuple[tuple[str, Any], ...]
    mark: str


def flatten(messages: Iterable[Any]) -> Flat:
    """Messages with their parts joined; what is no message is left as it is.

    Raises ValueError for a part of another form, or an image where none may be.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"messages must be a list of mappings, got {messages!r}")
    given = list(messages)
    read = [_parts(index, message) for index, message in enumerate(given)]
    images = tuple(each for parts in read for each in parts or () if not isinstance(each, str))
    texts = [each for parts in read for each in parts or () if isinstance(each, str)]
    texts += [each["content"] for each in given if _is_plain(each)]
    mark = _MARK
    while any(mark in text for text in texts):  # ends: no text holds a mark longer than itself
        mark += _MARK
    flat = [
        message if parts is None else
        {**message, "content": "\n\n".join(p if isinstance(p, str) else mark for p in parts)}
        for message, parts in zip(given, read, strict=True)
    ]  # fmt: skip
    return Flat(flat, images, mark if images else "")


def emptied(messages: Iterable[Any]) -> list[Any]:
    """Messages whose image parts hold no image, to be written down beside the images' keys."""

    def part(each: Any) -> Any:
        return each if each["type"] == "text" else {"type": "image"}

    return [
        {**message, "content": [part(each) for each in message["content"]]}
        if isinstance(message.get("content"), list | tuple) else message
        for message in messages
    ]  # fmt: skip


def _is_plain(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), str)


def _parts(index: int, message: Any) -> list[str | tuple[str, Any]] | None:
    """Texts, and (place, image) of images; None for a message that has no parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not content:
        return None
    parts = [_part(f"messages[{index}].content[{k}]", each) for k, each in enumerate(content)]
    place = next((part[0] for part in parts if not isinstance(part, str)), None)
    if place is not None and message.get("role") not in _ROLES:
        raise ValueError(
            f"{place} is an image, which only messages of the roles {', '.join(_ROLES)} may show, "
            f"got {message.get('role')!r}"
        )
    return parts


def _part(place: str, given: Any) -> str | tuple[str, Any]:
    """A text, or (place, image)."""
    if not isinstance(given, Mapping):
        raise ValueError(
            f'{place} must be a mapping as {{"type": "text", "text": "..."}}, '
            f"got {reprlib.repr(given)}"
        )
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(
            f"{place}.type must be one of {', '.join(_TYPES)}, got {reprlib.repr(kind)}"
        )
    unknown = [key for key in given if key not in ("type", _TYPES[kind])]
    if unknown:
        raise ValueError(
            f"{place} has the unknown key {reprlib.repr(unknown[0])}; beside 'type' it may have "
            f"{kind!r}"
        )
    value = given.get(kind)
    if kind == "image":
        return place, value
    if kind == "image_url":
        value = _url(place, value)
    if not isinstance(value, str) or (kind == "image_url" and not value):
        what = "text" if kind == "text" else "image_url.url"
        raise ValueError(f"{place}.{what} must be a string, got {reprlib.repr(value)}")
    return value if kind == "text" else (place, value)


def _url(place: str, value: Any) -> Any:
    """Of the mapping that an `image_url` holds."""
    if not isinstance(value, Mapping):
        return value
    detail = value.get("detail", "auto")
    if detail not in ("auto", "high", "original"):
        raise ValueError(
            f"{place}.image_url.detail must be 'auto', 'high' or 'original', which are one here, "
            f"got {reprlib.repr(detail)}; hand in a smaller image"
        )
    return value.get("url")
