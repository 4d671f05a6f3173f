"""One prompt, in any of its forms, as token ids with the spans of its images (docs/images.md 2)."""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.images import sources
from deepinfer_jax.images.features import Features
from deepinfer_jax.images.pixels import Picture
from deepinfer_jax.images.spans_in_prompt import ImageSpan, place_images
from deepinfer_jax.requests import Options
from deepinfer_jax.text import Tokenizer, parts

Folder = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered:
    """What the model reads of a prompt.

    Attributes:
      prompt: what was given, without what image parts held; token ids as a tuple.
      tokens: ids, every place of a span the model's image token.
      spans: the images in their order there.
      keys: of the images, in the order in which they were given.
    """

    prompt: Any
    tokens: tuple[int, ...]
    spans: tuple[ImageSpan, ...] = ()
    keys: tuple[str, ...] = ()


def render(
    form: str, value: Any, images: Sequence[Any], chat: Mapping[str, Any], options: Options,
    tokenizer: Tokenizer, cfg: ModelConfig, folder: Folder,
) -> Rendered:  # fmt: skip
    """A prompt of the form "prompt", "messages" or "tokens".

    images: what was given beside it, for image parts that hold none, for the image tokens of token
    ids, or to stand before the text of a "prompt". chat: `tools` and `schema`. folder: where paths
    begin.

    Raises TypeError or ValueError for a prompt or an image that is none, for another number of
    images than of their places, and for images without a tower.
    """
    if form == "tokens":
        if chat:
            raise ValueError(f"{next(iter(chat))!r} needs 'prompt' or 'messages', got 'tokens'")
        # Token ids as a tuple: a NumPy array would make `Result.__eq__` ambiguous.
        tokens = _token_ids(value)
        given = [(f"images[{k}]", image) for k, image in enumerate(images)]
        return _placed(tokens, tokens, given, range(len(given)), cfg, folder)
    messages = _messages(form, value, len(images))
    flat = parts.flatten(messages)
    given = _filled(flat.images, images)
    how: Any = {"thinking": options.thinking, "effort": options.effort, **chat}
    if not given:
        return Rendered(value, tuple(tokenizer.render_chat(messages, **how)))
    _, token = _sight(cfg, given[0][0])
    ids, order = tokenizer.render_with_images(flat, token, **how)
    kept = value if form == "prompt" else parts.emptied(messages)
    return _placed(kept, ids, given, order, cfg, folder)


def _messages(form: str, value: Any, images: int) -> Sequence[Any]:
    """`value` as messages; of a text, one that shows this number of images before it."""
    if form == "prompt":
        if not isinstance(value, str) or not value:
            raise ValueError(f"prompt must be a non-empty string, got {reprlib.repr(value)}")
        shown = [{"type": "image"}] * images + [{"type": "text", "text": value}]
        return [{"role": "user", "content": shown if images else value}]
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise TypeError(f"messages must be a list of messages, got {reprlib.repr(value)}")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{index}] must be a mapping, got {reprlib.repr(message)}")
    return value


def _filled(shown: Sequence[tuple[str, Any]], beside: Sequence[Any]) -> list[tuple[str, Any]]:
    """Images of parts, each with its place; an empty part takes the next of `beside`."""
    empty = sum(image is parts.ELSEWHERE for _, image in shown)
    if empty != len(beside):
        raise ValueError(
            f"the messages have {empty} image parts without an image and `images` has "
            f"{len(beside)}: give each part its image, or one in `images`"
        )
    left = iter([(f"images[{k}]", image) for k, image in enumerate(beside)])
    return [next(left) if image is parts.ELSEWHERE else (place, image) for place, image in shown]


def _placed(
    kept: Any, ids: Sequence[int], given: Sequence[tuple[str, Any]], order: Sequence[int],
    cfg: ModelConfig, folder: Folder,
) -> Rendered:  # fmt: skip
    """`ids`, with one image token for each image, and the images that come there in this order."""
    if not given and (cfg.vision is None or cfg.image_token_id is None):
        return Rendered(kept, tuple(ids))
    vision, token = _sight(cfg, given[0][0] if given else "tokens")
    pictures = [_picture(place, image, vision, folder) for place, image in given]
    tokens, spans = place_images(ids, [pictures[number] for number in order], token, vision)
    return Rendered(kept, tokens, spans, tuple(picture.key for picture in pictures))


def _picture(
    place: str, source: Any, vision: VisionConfig, folder: Folder
) -> Picture | Features:  # fmt: skip
    try:
        return sources.picture_of(source, vision, folder)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{place}: {error}") from None


def _sight(cfg: ModelConfig, place: str) -> tuple[VisionConfig, int]:
    """(the tower's sizes, the id of the image token) of a model that reads images."""
    if cfg.vision is None or cfg.image_token_id is None:
        missing = "vision tower (`vision_config`)" if cfg.vision is None else "`image_token_id`"
        raise ValueError(
            f"{place}: the model has no {missing} and reads no images: leave them out, or take a "
            "model that has one"
        )
    return cfg.vision, cfg.image_token_id


def _token_ids(value: Any) -> tuple[int, ...]:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"tokens must be a non-empty list of token ids, got {reprlib.repr(value)}")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"tokens must be integers, got {reprlib.repr(token)}")
    return tuple(int(token) for token in value)
