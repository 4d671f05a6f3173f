"""Requests with images in the engine: replies are those of a request alone, whatever happens."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import ml_dtypes
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import images, planning
from deepinfer_jax.determinism import reference
from deepinfer_jax.determinism.feeding import Text
from deepinfer_jax.engine import Engine, Sizes, seats, sizes, warming
from deepinfer_jax.engine.watch import signature
from deepinfer_jax.images import Features, Picture
from deepinfer_jax.images.gallery import Gallery
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import Options, Request
from tests import sighted, tiny_model
from tests.engine.test_engine import watched
from tests.sighted import TOKEN

# Room for one long request, or two or three short ones. Calls have 32 rows.
SIZES = Sizes(slots=3, capacity=80, pages=5, page_tokens=16, snapshots=2, span=14, prefill=(32,))
HEAD = np.random.default_rng(4).integers(11, 2048, 9).tolist()


@pytest.fixture(autouse=True)
def short_calls(monkeypatch):
    monkeypatch.setattr(sizes, "IMAGE_ROWS", (32,))


@functools.cache
def shown(number: int) -> Picture:
    """A picture of 10, 14 or 4 places."""
    return sighted.picture(*((6, 9), (8, 8), (2, 3))[number % 3], number)


def features(number: int, model) -> Features:
    (made,) = images.encode_images(model.params, [shown(number)], model.cfg, model.numerics)
    return made


def asking(model, prompts) -> list[Request]:
    options = Options(seed=5)
    return make_requests(prompts, options, model.tokenizer, model.cfg, model.max_length)


# -- what is said of requests before anything is run -----------------------------------------------


def test_an_image_that_no_call_can_hold_is_refused_with_the_arithmetic():
    model = sighted.glance()
    rows = np.zeros((30, model.cfg.hidden_size), ml_dtypes.bfloat16)  # 5 x 6 cells take 37 places
    prompt = {"tokens": [3, TOKEN], "images": [Features(rows, 5, 6, "")], "max_tokens": 2}
    (request,) = asking(model, [prompt])
    says = "image of 37 tokens at 1, .* a step has 32 prompt rows: show a smaller image"
    with pytest.raises(ValueError, match=says):
        Engine(model, dataclasses.replace(SIZES, span=0)).submit(request)
    made = sizes.sizes_for([request], model.cfg, model.max_length)
    assert (made.span, made.step_rows) == (37, 256)


def test_what_the_model_cannot_show_is_refused():
    model = sighted.glance()
    narrow = Features(np.zeros((1, 3), np.float32), 1, 1, "")
    (request,) = asking(model, [{"tokens": [TOKEN], "images": [narrow], "id": "a"}])
    with pytest.raises(ValueError, match=r"request 'a': rows of features must be \(1, 96\)"):
        Engine(model, SIZES).submit(request)
    rounded = Features(np.zeros((1, model.cfg.hidden_size), np.float32), 1, 1, "")
    (other,) = asking(model, [{"tokens": [TOKEN], "images": [rounded], "id": "b"}])
    with pytest.raises(ValueError, match=r"request 'b': .* must be bfloat16, .* got float32; enc"):
        Engine(model, SIZES).submit(other)
    with pytest.raises(ValueError, match="bfloat16"):
        di.score_sequences(model, [other.tokens], images=[other.images])
    with pytest.raises(ValueError, match="request 'a': this model has no vision tower"):
        Engine(tiny_model.model(), SIZES).submit(request)


def test_an_image_is_no_repetition():
    model = sighted.glance()
    prompt = {"tokens": [5, TOKEN, 6, TOKEN, 5], "images": [shown(0), shown(2)]}
    (request,) = asking(model, [prompt])
    assert request.tokens.count(TOKEN) == 10 + 4
    assert seats.said(request, model.cfg) == [5, 6, 5]
    assert seats.said(request, dataclasses.replace(model.cfg, vision=None)) == [*request.tokens]


# -- one layer, one token: a program in the time of a test -----------------------------------------


def seen_by(model) -> list[Request]:
    """Prompts of 15 places and less, which end with an image; half of them show what others do."""
    ids, nan = [30, 41, 52, 63, 74], features(0, model)
    nan = dataclasses.replace(nan, rows=np.full_like(nan.rows, np.nan))
    given = [
        ([*ids, TOKEN], [shown(0)]),
        ([*ids, TOKEN], [shown(3)]),
        ([*ids, TOKEN], [features(0, model)]),
        ([TOKEN, *ids[:2], TOKEN], [shown(2), shown(5)]),
        ([TOKEN, *ids, TOKEN], [shown(2), nan]),
        ([*ids[:1], TOKEN], [shown(1)]),
        ([TOKEN], [shown(0)]),
        ([*ids, TOKEN], [shown(6)]),
    ]
    return asking(
        model,
        [
            {"tokens": tokens, "images": pictures, "id": str(n), "max_tokens": 1, "seed": 3}
            for n, (tokens, pictures) in enumerate(given)
        ],
    )


def test_images_are_shown_once_encoded_and_fail_alone(monkeypatch):
    model = sighted.glance()
    monkeypatch.setattr(Gallery, "_encoded", failing(Gallery._encoded, shown(6).key, seen := []))
    asked = seen_by(model)
    room = dataclasses.replace(SIZES, slots=2, snapshots=0)
    found: list[dict] = []
    for group in (asked, *([each] for each in asked)):
        running = Engine(model, room)
        calls = record(monkeypatch, running)
        for request in group:
            running.submit(request)
        foreseen = planned(running, group)
        made = [u for u in running.updates() if u.result or u.error]
        assert running.usage().running == 0
        new = [call for call in calls if call not in foreseen]
        assert not new, "a program was not foreseen"
        found.append({group[u.index].id: u.result or u.error for u in made})
        if len(group) > 1:
            names = [shown(n).key for n in (0, 3, 2, 5, 1, 6)]
            assert sorted(seen) == sorted(names), "a picture was encoded twice"
    together, alone = found[0], {k: v for each in found[1:] for k, v in each.items()}
    for name, says in (("4", "image 1 could not be encoded: the features of"), ("7", "no memory")):
        for error in (together.pop(name), alone.pop(name)):
            assert re.search(f"request '{name}': .*{says}", str(error))
    assert together == alone
    same = {name: (r.tokens, r.logprobs) for name, r in together.items()}
    assert same["0"] == same["2"], "features have the bits of their picture"
    assert same["0"] != same["1"]


def failing(encoded, key: str, seen: list[str]):
    """`Gallery._encoded` that notes pictures, and fails at one of them as a device does."""

    def one(self, picture):
        seen.append(picture.key)
        if picture.key == key:
            raise jax.errors.JaxRuntimeError("no memory")
        return encoded(self, picture)

    return one


def record(monkeypatch, running: Engine) -> list:
    """Names and signatures of the programs that `running` asks for."""
    asked, ask = [], running._watch.ask

    def noted(program, *args, **more):
        asked.append((program.__name__, signature(program, args, more)))
        return ask(program, *args, **more)

    monkeypatch.setattr(running._watch, "ask", noted)
    monkeypatch.setattr(running._gallery, "_ask", noted)
    return asked


def planned(running: Engine, group: list[Request]) -> list:
    model, room = running._model, running._sizes
    wanted = warming.needs(group, room, model.cfg.vision)
    moves = planning.OFF.moves(running._memory)
    every = warming.planned(model, room, wanted, moves, running._device.state())
    return [
        (each.program.__name__, signature(each.program, each.args, each.more)) for each in every
    ]


# -- the exhaustive run ----------------------------------------------------------------------------


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
        ([*alike, *ids(3)], [features(0, sighted.model())]),
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
    return asking(sighted.model(), prompts)


def answered(asked, numerics: Numerics | None = None, **more) -> dict[int, di.Result]:
    """Results by the request's number."""
    running = Engine(seen_in(numerics), SIZES, **more)
    numbers = {running.submit(requests()[n]): n for n in asked}
    made = {update.index: update.result for update in running.updates() if update.result}
    assert made.keys() == numbers.keys()
    return {numbers[index]: result for index, result in made.items()}


def seen_in(numerics: Numerics | None):
    model = sighted.model()
    return model if numerics is None else dataclasses.replace(model, numerics=numerics)


@functools.cache
def alone(numerics: Numerics | None = None) -> list[di.Result]:
    return [answered([n], numerics)[n] for n in range(len(requests()))]


SIGHTED = range(7)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("numerics", [None, Numerics.fp32()], ids=["bfloat16", "float32"])
def test_nothing_that_happens_beside_an_image_changes_a_bit(monkeypatch, numerics):
    """Requests are preempted, and those of text run in calls with images."""
    want = alone(numerics)
    steps = watched(monkeypatch)
    found = answered(range(len(requests())), numerics)
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
def test_the_plainest_run_says_the_same():
    """One token per call from the first on, images too: nothing of a chunk is part of a result."""
    model = sighted.model()
    gallery = Gallery(model.params, model.cfg, model.numerics)
    for number in (1, 4):
        request, want = requests()[number], alone()[number]
        image = np.zeros(len(request.tokens), bool)
        vectors = np.zeros((len(request.tokens), model.cfg.hidden_size), np.float32)
        for each in request.images:
            made = gallery.embeddings(each.picture)
            image[each.start : each.start + len(made)] = True
            vectors[each.start : each.start + len(made)] = made
        prompt = Text(np.array(request.tokens, np.int32), image, vectors)
        rows = reference.refer(model, request, SIZES.capacity, prompt).rows
        reply = slice(len(request.tokens) - 1, len(request.tokens) - 1 + len(want.tokens))
        assert rows["token"][reply].tolist() == [*want.tokens]
        assert rows["raw"][reply].tolist() == [*want.logprobs]
        assert rows["processed"][reply].tolist() == [*want.logprobs_processed]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_nobody_begins_from_what_failed():
    """Two that begin alike with an image that fails: the second waits for the first, and fails."""
    model, ids = sighted.model(), [*range(20, 60)]
    nan = features(0, model)
    nan = dataclasses.replace(nan, rows=np.full_like(nan.rows, np.nan))
    bad = [{"tokens": [5, TOKEN, *ids], "images": [nan], "id": f"bad {n}"} for n in (0, 1)]
    good = [{"tokens": [5, TOKEN, *ids], "images": [shown(0)], "id": f"good {n}"} for n in (0, 1)]
    asked = asking(model, [{**each, "max_tokens": 4, "seed": 2} for each in (*bad, *good)])
    running = Engine(model, SIZES)
    for request in asked:
        running.submit(request)
    ended = {
        asked[u.index].id: u.result or u.error for u in running.updates() if u.result or u.error
    }
    for n in (0, 1):
        assert isinstance(ended[f"bad {n}"], FloatingPointError)
    assert ended["good 0"].tokens == ended["good 1"].tokens
    assert running.statistics().shared_tokens == 48


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
