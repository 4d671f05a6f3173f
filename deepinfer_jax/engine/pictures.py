"""The images of requests: what the scheduler must know of them, and what calls show of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from deepinfer_jax.engine.calls import Shown
from deepinfer_jax.engine.seats import Work
from deepinfer_jax.images import encoding
from deepinfer_jax.images.features import Features, check_fits
from deepinfer_jax.images.gallery import Gallery
from deepinfer_jax.images.pixels import Picture
from deepinfer_jax.images.spans_in_prompt import places_of
from deepinfer_jax.loading import Model
from deepinfer_jax.requests import Request
from deepinfer_jax.scheduling import Chunk, Span


def spans_of(request: Request, model: Model) -> tuple[Span, ...]:
    """The spans of the request's images, named by what they show.

    Raises ValueError for an image that the model cannot show.
    """
    if not request.images:
        return ()
    vision, found = model.cfg.vision, []
    try:
        encoding.tower_of(model.params, model.cfg)
        assert vision is not None, "the model has a tower"
        for image in request.images:
            places = places_of(image, vision)
            found.append(Span(places.start, len(places), _key(image.picture, model)))
        return tuple(found)
    except ValueError as error:
        raise ValueError(f"request {request.id!r}: {error}") from None


def _key(image: Picture | Features, model: Model) -> bytes:
    """Equal keys, equal embeddings: of features their own bits, whatever they say they are of."""
    if isinstance(image, Picture):
        return b"picture " + image.key.encode()
    check_fits(image, model.cfg, model.numerics)
    rows = np.ascontiguousarray(image.rows)
    digest = hashlib.blake2b(f"{image.height} {image.width} {rows.dtype} ".encode())
    digest.update(rows.view(np.uint8).data)
    return b"features " + digest.digest()


def shown(
    chunks: Iterable[Chunk], works: Sequence[Work | None], gallery: Gallery
) -> tuple[list[Shown], dict[int, Exception]]:
    """The images among the rows of `chunks`, one after the other, and why those of a slot failed.

    `works`: of every slot. They are encoded here, when their rows are about to run: what waits
    holds nothing but its pictures.
    """
    found, failed, before = [], {}, 0
    for chunk in chunks:
        work = works[chunk.slot]
        assert work is not None, "an empty slot has work"
        for number, image in enumerate(work.request.images):
            first = image.start - chunk.start
            if not 0 <= first < chunk.count or chunk.slot in failed:
                continue
            try:
                found.append(Shown(before + first, gallery.embeddings(image.picture)))
            except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
                failed[chunk.slot] = _named(error, work.request, number)
        before += chunk.count
    return found, failed


def _named(error: Exception, request: Request, number: int) -> Exception:
    kind = FloatingPointError if isinstance(error, FloatingPointError) else RuntimeError
    made = kind(f"request {request.id!r}: image {number} could not be encoded: {error}")
    made.__cause__ = error
    return made
