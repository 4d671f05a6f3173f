"""Requests with images in the engine: replies are those of a request alone, whatever happens."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import engine, images, params, planning
from deepinfer_jax.engine import Engine, Sizes, seats, sizes, warming
from deepinfer_jax.engine.watch import signature
from deepinfer_jax.images import Features, Picture
from deepinfer_jax.images.gallery import Gallery
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import Options, Request
from tests import sighted, tiny_model
from tests.sighted import TOKEN

# Room for one long request, or two or three short ones. Calls have 32 rows, and a step 35.
SIZES = Sizes(slots=3, capacity=80, pages=5, page_tokens=16, snapshots=2, span=14)
HEAD = np.random.default_rng(4).integers(11, 2048, 9).tolist()


@pytest.fixture(autouse=True)
def short_calls(monkeypatch):
    monkeypatch.setattr(sizes, "PREFILL_ROWS", (32,))
    monkeypatch.setattr(sizes, "IMAGE_ROWS", (32,))


@functools.cache
def shown(number: int) -> Picture:
    """A picture of 10, 14 or 4 places."""
    return sighted.picture(*((6, 9), (8, 8), (2, 3))[number % 3], number)


@functools.cache
def features(number: int) -> Features:
    model = sighted.model()
    (made,) = images.encode_images(model.params, [shown(number)], model.cfg, model.numerics)
    return made


@functools.cache
def requests() -> list[Request]:
    """Seven with images and four without; some that begin alike, with the same picture or not."""
    rng = np.random.default_rng(9)

    def ids(count: int) -> list[int]:
        return rng.integers(11, 2048, count).tolist()

    alike = [*HEAD, TOKEN, *ids(15)]
    given = [
        (alike, [shown(0)]),
        ([*alike, *ids(1)], [shown(3)]),  # the same ids, another picture
        ([*alike, *ids(2)], [shown(0)]),
        ([*alike, *ids(3)], [features(0)]),
        ([TOKEN, *ids(21), TOKEN, *ids(5), TOKEN], [shown(2), shown(1), shown(5)]),
        ([TOKEN], [shown(1)]),
        ([*ids(20), TOKEN, TOKEN], [shown(1), shown(2)]),
        *(([*HEAD, *ids(n)], []) for n in (3, 16, 24, 30)),
    ]
    prompts = [
        {"tokens": tokens, "images": pictures, "id": str(n), "max_tokens": 5 + (7 * n + 4) % 17,
         "temperature": (0.0, 1.0, 9.0)[n % 3]}
        for n, (tokens, pictures) in enumerate(given)
    ]  # fmt: skip
    m = sighted.model()
    return make_requests(prompts, Options(seed=5), m.tokenizer, m.cfg, m.max_length)


def answered(asked, room: Sizes = SIZES, **more) -> dict[int, di.Result]:
    """Results by the request's number."""
    running = Engine(sighted.model(), room, **more)
    numbers = {running.submit(requests()[n]): n for n in asked}
    made = {update.index: update.result for update in running.updates() if update.result}
    assert made.keys() == numbers.keys()
    return {numbers[index]: result for index, result in made.items()}


@functools.cache
def alone() -> list[di.Result]:
    return [answered([n])[n] for n in range(len(requests()))]


def watched(monkeypatch) -> list:
    """The steps that an engine was told to take."""
    steps, step = [], engine.engine.Scheduler.step

    def record(self, *args):
        steps.append(step(self, *args))
        return steps[-1]

    monkeypatch.setattr(engine.engine.Scheduler, "step", record)
    return steps


SIGHTED = range(7)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_nothing_that_happens_beside_an_image_changes_a_bit(monkeypatch):
    """Beginnings are shared, requests preempted; requests of text run in calls with images."""
    want = alone()
    steps = watched(monkeypatch)
    found = answered(range(len(requests())))
    assert [found[n] for n in range(len(requests()))] == want
    assert {p.job for step in steps for p in step.preempted} & {*SIGHTED}
    assert any({c.job for c in step.chunks} & {*SIGHTED} and step.decode for step in steps)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_beginning_with_an_image_is_shared_by_those_who_show_the_same(monkeypatch):
    """Warm or cold, the same bits; another picture at the same ids, or features, begin anew."""
    want, steps, reused = alone(), watched(monkeypatch), []
    for pair in ([0, 2], [0, 1], [0, 3]):
        steps.clear()
        found = answered(pair)
        assert [found[n] for n in pair] == [want[n] for n in pair]
        reused.append([s.reused for step in steps for s in step.seated])
    assert reused == [[0, 32], [0, 0], [0, 0]]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_drafts_after_images_change_no_bit():
    found = answered(range(len(requests())), policy=planning.Fixed(2))
    assert [found[n] for n in range(len(requests()))] == alone()
    assert any(found[n].timing.verified for n in SIGHTED)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_scores_are_what_the_sampler_saw():
    made = [(request, result) for request, result in zip(requests(), alone(), strict=True)]
    scored = di.score_sequences(
        sighted.model(),
        [request.tokens + result.tokens for request, result in made],
        images=[request.images for request, _ in made],
    )
    for (request, result), each in zip(made, scored, strict=True):
        assert tuple(each.logprobs[len(request.tokens) - 1 :].tolist()) == result.logprobs
