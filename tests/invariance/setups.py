"""References of the model with every role, made once per process and shared by all files here."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from deepinfer_jax.determinism import reference
from deepinfer_jax.determinism.reference import Setup
from deepinfer_jax.numerics import Numerics
from tests import every_role, tiny_model

DTYPES = ("bfloat16", "float32")
# The default run is in bfloat16; float32, the sharper one, is the exhaustive run's.
TWINS = ("bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive))
TOKENS, COUNT = 22, 4  # replies, requests
IMAGE = range(9, 16)  # in the longest prompt


@functools.cache
def setup(dtype: str) -> Setup:
    """Requests of text in the invariant form: each alone, one token at a time."""
    return reference.make_setup(every_role.model(dtype), tokens=TOKENS, seed=1, count=COUNT)


@functools.cache
def illustrated(dtype: str) -> Setup:
    """The same, with an image inside the first prompt."""
    plain = setup(dtype)
    first = plain.references[0]
    image = every_role.text(plain.model.cfg, first.prompt, 3, IMAGE)
    prompt = dataclasses.replace(image, tokens=first.text.tokens[: first.prompt])
    again = reference.refer(plain.model, first.request, plain.capacity, prompt)
    return dataclasses.replace(plain, references=(again, *plain.references[1:]))


@functools.cache
def batched() -> Setup:
    """Plain XLA in float32, where no rounding hides a difference; references made by it too.

    Of the smaller model: what is shown is that a check sees differences, wherever they come from.
    """
    numerics = dataclasses.replace(Numerics.fp32(), rows="batched")
    model = dataclasses.replace(tiny_model.model(), numerics=numerics)
    return reference.make_setup(model, tokens=TOKENS, seed=1, count=COUNT)


def flipped(whole: Setup, name: str, number: int = 1) -> Setup:
    """One bit of one value changed in one reference: of a row, or of its cache."""
    references = list(whole.references)
    rows, state = dict(references[number].rows), dict(references[number].state)
    place = rows if name in rows else state
    changed = np.array(place[name], order="C")
    changed.reshape(-1).view(np.uint8)[changed.nbytes // 2] ^= 1
    place[name] = changed
    references[number] = dataclasses.replace(references[number], rows=rows, state=state)
    return dataclasses.replace(whole, references=tuple(references))
