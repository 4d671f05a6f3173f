"""Log-probabilities of finished sequences: lists of token ids in, numbers out.

`steps.score` in padded batches. What sampling has no need of (the prompt's log-probabilities, the
most probable tokens, the experts of every token) is computed here afterwards: the pass gives the
sampler's numbers in every bit, so nothing has to be kept while sampling.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import steps, summaries
from deepinfer_jax.images import encoding
from deepinfer_jax.images.features import Features, check_fits
from deepinfer_jax.images.gallery import Gallery
from deepinfer_jax.images.spans_in_prompt import ImageSpan, places_of
from deepinfer_jax.loading import Model
from deepinfer_jax.rows import power_of_two

ROWS = 1024  # tokens of one call, padding included, unless one sequence is longer
SHORTEST = 64  # width of the narrowest call; wider ones double it

score_program = jax.jit(steps.score, static_argnames=("cfg", "numerics", "remat", "top"))


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
    """What the model says of one sequence of S tokens; arrays of NumPy.

    Attributes:
      logprobs: [S-1] float32, of token i+1 given tokens 0..i, at temperature 1 without truncation:
        `Result.logprobs` in every bit where the token is one of a reply.
      top_ids, top_logprobs: [S-1, K] int32 and float32, the most probable tokens at that place;
        value descending, lower id among equals.
      routed: [S, L, k] int32, experts of every token in every layer, best first; None unless asked.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    routed: np.ndarray | None = None

    __repr__ = summaries.of_fields


def score_sequences(
    model: Model, sequences: Sequence[Sequence[int]], *, top: int = 0, routed: bool = False,
    images: Sequence[Sequence[ImageSpan]] | None = None,
) -> list[Scored]:  # fmt: skip
    """What the model says of each of `sequences` (token ids), in order.

    They are scored in batches of one width each, a doubling of `SHORTEST`, so that few programs
    are compiled. What stands beside a sequence changes no bit of it.

    Args:
      top: how many of the most probable tokens to name at every place.
      routed: also give the experts of every token.
      images: of each sequence, as in `Request.images`; default none. Sequences with images have
        calls of their own, so that others run the programs that they run without.

    Raises TypeError or ValueError for a sequence that the model cannot run, or a `top` beyond the
    vocabulary, before anything is compiled.
    """
    _check(model, sequences, top)
    shown = [()] * len(sequences) if images is None else [tuple(each) for each in images]
    _check_images(model, sequences, shown)
    gallery = Gallery(model.params, model.cfg, model.numerics)
    found: dict[int, Scored] = {}
    sizes = [(len(tokens), bool(each)) for tokens, each in zip(sequences, shown, strict=True)]
    for width, sighted, numbers in _batches(sizes, model.max_length):
        batch = [sequences[number] for number in numbers if number >= 0]
        tokens, lengths = padded(batch, len(numbers), width)
        seen = {}
        if sighted:
            parts = [shown[number] for number in numbers if number >= 0]
            seen = _illustrations(parts, len(numbers), width, gallery, model)
        scores = score_program(
            model.params, model.tables, tokens, lengths, model.cfg, model.numerics,
            top=_top_bucket(top, model.cfg.vocab_size), **seen,
        )  # fmt: skip
        wanted: Any = (scores.raw, scores.top_ids[..., :top], scores.top_logprobs[..., :top])
        host = jax.device_get((*wanted, scores.routed) if routed else wanted)
        for row, number in enumerate(numbers[: len(batch)]):
            found[number] = _of_row(host, row, len(batch[row]))
    return [found[number] for number in range(len(sequences))]


def _of_row(host: Sequence[np.ndarray], row: int, length: int) -> Scored:
    raw, ids, best = (values[row, : length - 1] for values in host[:3])
    experts = np.moveaxis(host[3][:, row, :length], 0, 1) if len(host) > 3 else None
    return Scored(raw, ids, best, experts)


def padded(
    sequences: Sequence[Sequence[int]], batch: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """tokens [batch, width] int32 and lengths [batch]: the sequences, right-padded with zeros.

    Rows beyond the sequences are single tokens.
    """
    tokens, lengths = np.zeros((batch, width), np.int32), np.ones(batch, np.int32)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = ids
        lengths[row] = len(ids)
    return tokens, lengths


def _illustrations(
    images: Sequence[Sequence[ImageSpan]], batch: int, width: int, gallery: Gallery, model: Model
) -> dict[str, np.ndarray]:
    """What `steps.score` is told of the images of `batch` sequences, the last ones empty."""
    dtype = jnp.dtype(model.numerics.dtype)
    image = np.zeros((batch, width), bool)
    embeddings = np.zeros((batch, width, model.cfg.hidden_size), dtype)
    for row, spans in enumerate(images):
        for span in spans:
            made = gallery.embeddings(span.picture)
            image[row, span.start : span.start + len(made)] = True
            embeddings[row, span.start : span.start + len(made)] = made
    return {"image": image, "embeddings": embeddings}


def _batches(
    sizes: Sequence[tuple[int, bool]], longest: int
) -> Iterator[tuple[int, bool, list[int]]]:
    """(width, with images, numbers of the sequences of a call), the numbers filled up with -1.

    `sizes`: length of each sequence, and whether it has images. A call has one sequence where there
    is only one of its kind, else as many as `ROWS` tokens allow: two programs of a kind at most.
    """
    kinds: dict[tuple[int, bool], list[int]] = {}
    for number, (length, sighted) in enumerate(sizes):
        width = min(max(power_of_two(length), SHORTEST), longest)
        kinds.setdefault((width, sighted), []).append(number)
    for (width, sighted), numbers in sorted(kinds.items()):
        size = max(1, ROWS // width) if len(numbers) > 1 else 1
        for start in range(0, len(numbers), size):
            part = numbers[start : start + size]
            yield width, sighted, part + [-1] * (size - len(part))


def _top_bucket(top: int, vocabulary: int) -> int:
    """How many are computed where `top` are wanted: a power of 8, so that programs are shared."""
    size = 8 if top else 0
    while size < top:
        size *= 8
    return min(size, vocabulary)


def _check(model: Model, sequences: Sequence[Sequence[int]], top: int) -> None:
    vocabulary = model.cfg.vocab_size
    if isinstance(top, bool) or not isinstance(top, int):
        raise TypeError(f"top must be an integer, got {top!r}")
    if not 0 <= top <= vocabulary:
        raise ValueError(f"top must lie in 0..{vocabulary}, the vocabulary, got {top}")
    for number, tokens in enumerate(sequences):
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise TypeError(
                f"sequences[{number}] must be a non-empty list of token ids, got "
                f"{reprlib.repr(tokens)}; `model.tokenizer` makes them of text and messages"
            )
        if ids.size > model.max_length:
            raise ValueError(
                f"sequences[{number}] has {ids.size} tokens, the model is loaded for "
                f"max_length={model.max_length}; cut it or load the model with more"
            )
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"sequences[{number}] has ids outside of 0..{vocabulary - 1}")


def _check_images(
    model: Model, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[ImageSpan]]
) -> None:
    if len(images) != len(sequences):
        raise ValueError(
            f"images must be a list for each of {len(sequences)} sequences, got {len(images)}"
        )
    for number, (tokens, spans) in enumerate(zip(sequences, images, strict=True)):
        if not spans:
            continue
        encoding.tower_of(model.params, model.cfg)
        assert model.cfg.vision is not None, "the model has a tower"
        before = 0
        for places in (places_of(span, model.cfg.vision) for span in spans):
            if not before <= places.start <= len(tokens) - len(places):
                raise ValueError(
                    f"images[{number}] must stand in order inside the {len(tokens)} tokens of the "
                    f"sequence, got one at {places.start} of {len(places)} tokens"
                )
            before = places.stop
        for span in spans:
            if isinstance(span.picture, Features):
                check_fits(span.picture, model.cfg, model.numerics)
