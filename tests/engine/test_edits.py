"""Requests that change their logits, in the engine: the replies that they give by hand."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import edits as editing
from deepinfer_jax import planning
from deepinfer_jax.engine import Engine, memory, programs
from deepinfer_jax.engine.sizes import grown, sizes_for
from deepinfer_jax.engine.structured import Structured
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import Options
from tests import tiny_model
from tests.engine.test_engine import SIZES

V, FORCED = 2048, SIZES.forced
SET = list(range(1, 60, 2))  # the model's end token, 1, among them
# What requests ask, and the same for `make_edits`.
KINDS = [
    ({}, None),
    (
        {"logit_bias": {"77": 9.5, "78": -3}, "temperature": 3.0},
        {"bias": {77: 9.5, 78: -3.0}},
    ),
    (
        {"repetition_penalty": 1.7, "frequency_penalty": 0.8, "presence_penalty": 0.4,
         "allowed_token_ids": SET, "temperature": 0},
        {"repetition": 1.7, "frequency": 0.8, "presence": 0.4, "allowed": SET},
    ),
    (
        {"allowed_token_ids": SET, "min_tokens": 6, "stop_token_ids": SET[3:6], "top_p": 0.9,
         "temperature": 30.0},
        {"allowed": SET, "least": 6, "ends": [1, *SET[3:6]]},
    ),
    (
        {"golden_token_ids": [5, 1, -1, 9], "ignore_eos": True, "banned_token_ids": [5, 6]},
        {"forced": [5, 1, -1, 9], "banned": [5, 6]},
    ),
]  # fmt: skip


@functools.cache
def requests():
    """Ten, half of them beginning alike; every kind once in each half."""
    rng = np.random.default_rng(6)
    head = rng.integers(3, V, 37).tolist()
    prompts = [
        {
            "tokens": (head if n % 2 else []) + rng.integers(3, V, 3 + 2 * n).tolist(),
            "id": str(n),
            "max_tokens": 7 + 3 * n % 16,
            **KINDS[n % len(KINDS)][0],
        }
        for n in range(2 * len(KINDS))
    ]
    model = tiny_model.model()
    return make_requests(prompts, Options(seed=5), model.tokenizer, model.cfg, model.max_length)


def answered(asked, sizes=SIZES, **more) -> dict[int, di.Result]:
    running = Engine(tiny_model.model(), sizes, **more)
    numbers = {running.submit(requests()[n]): n for n in asked}
    made = {update.index: update.result for update in running.updates() if update.result}
    assert made.keys() == numbers.keys()
    return {numbers[index]: result for index, result in made.items()}


def by_hand(number: int, length: int) -> list[tuple]:
    """Tokens and numbers of a request by calls with prompts, its edits made anew for each token."""
    model, request, asked = tiny_model.model(), requests()[number], KINDS[number % len(KINDS)][1]
    o, mine = request.options, np.arange(SIZES.slots) == 1
    seeds = [request.seed] * SIZES.slots
    sampling = di.make_sampling(
        SIZES.slots, o.temperature, o.top_p, o.top_k, o.min_p, seeds=seeds
    )  # fmt: skip
    cache = di.init_cache(model.cfg, model.numerics, SIZES.slots, 96, paging=SIZES.paging)
    pages = np.where(mine[:, None], np.arange(SIZES.table), -1).astype(np.int32)
    cache = dataclasses.replace(cache, pages=jnp.asarray(pages))
    idle = programs.widened(programs.idle(SIZES.slots, SIZES.stop_ids), SIZES, V)
    idle = dataclasses.replace(idle, left=idle.left + 99)
    fed, found, nobody = list(request.tokens), [], np.zeros(SIZES.slots, bool)
    while len(found) < length:
        start, reply = int(cache.lengths[1]), [token for token, *_ in found]
        running = dataclasses.replace(idle, edits=edited(idle.edits, request.tokens, reply, asked))
        part, fed = [(t, 1, start + i) for i, t in enumerate(fed[:32])], fed[32:]
        made, _, cache = programs.fill_program(
            model.params, model.tables, programs.make_rows(part, 32), nobody if fed else mine,
            nobody, running, cache, sampling, model.cfg, model.numerics, None,
        )  # fmt: skip
        if not fed:
            seen = made.sampled
            numbers = seen.token, seen.logprob_raw, seen.logprob_processed, seen.kept_mass
            found.append(tuple(np.asarray(x)[0, 1, 0].item() for x in numbers))
            fed = [found[-1][0]]
    return found


def edited(idle, prompt, reply, asked):
    """The edits of slot 1, if it has any."""
    if asked is None:
        return idle
    room = {
        name: [*asked.get(name, []), *[-1] * size][:size]
        for name, size in (("ends", SIZES.stop_ids), ("forced", FORCED))
    }
    return editing.place(
        idle, np.int32(1), editing.make_edits(V, prompt, reply, **{**asked, **room})
    )


@functools.cache
def drafted() -> dict[int, di.Result]:
    """All at once, drafted for, with fewer pages than they need."""
    return answered(range(10), policy=planning.Fixed(2))


@pytest.mark.slow
@pytest.mark.exhaustive  # by default edits are held to a reference in tests/test_edits.py
def test_replies_are_those_by_hand():
    """With drafts, beside others, in chunks and after preemption: tokens and numbers."""
    for n, result in drafted().items():
        numbers = result.tokens, result.logprobs, result.logprobs_processed, result.kept_mass
        assert list(zip(*numbers, strict=True)) == by_hand(n, len(result.tokens))
    assert sum(result.timing.accepted for result in drafted().values()) > 5


@pytest.mark.slow
@pytest.mark.exhaustive
def test_replies_do_what_their_options_say():
    for n, result in drafted().items():
        kind, most = n % len(KINDS), requests()[n].options.max_tokens
        if kind in (2, 3):
            assert set(result.tokens) <= set(SET)
        if kind == 2:  # greedy: what was said becomes less probable at once
            assert len(set(result.tokens)) > len(result.tokens) // 2
        if kind == 3:
            assert len(result.tokens) > 6
            assert not set(result.tokens[:6]) & {1, *SET[3:6]}
            assert result.finish_reason == "stop"
        if kind == 4:
            assert np.take(result.tokens, [0, 1, 3]).tolist() == [5, 1, 9]
            assert np.take(result.logprobs_processed, [0, 1, 3]).tolist() == [0.0] * 3
            assert all(logprob < 0 for logprob in result.logprobs)
            assert not {5, 6} & {*result.tokens[4:]}
            assert (len(result.tokens), result.finish_reason) == (most, "length")


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", [planning.OFF, planning.Fixed(1)], ids=["off", "one"])
def test_no_use_of_the_drafter_changes_a_bit(policy):
    assert answered([7, 2, 9, 4, 1, 0, 3, 5, 8, 6], policy=policy, eager=True) == drafted()


@pytest.mark.exhaustive
def test_a_request_without_edits_does_not_notice_those_with():
    """Its bits are those of programs that know no edits."""
    plain = dataclasses.replace(SIZES, edits=False, forced=0)
    found = answered([0, 5], plain, policy=planning.Fixed(2))
    assert found == {n: drafted()[n] for n in (0, 5)}


@pytest.mark.exhaustive
def test_an_engine_grows_with_what_is_asked():
    """In the middle of its work, and not again for what it has room for."""
    running = Engine(tiny_model.model(), dataclasses.replace(SIZES, edits=False, forced=0),
                     policy=planning.Fixed(2))  # fmt: skip
    running.submit(requests()[0])
    found, later = {}, [5, 3, 4, 2]
    numbers = [0, *later]
    for update in running.updates():
        while later:
            running.submit(requests()[later.pop(0)])
        if update.result:
            found[numbers[update.index]] = update.result
    assert found == {n: drafted()[n] for n in numbers}


# -- grammars -------------------------------------------------------------------------------------


def ruled(**options) -> dict:
    rule = {"kind": "regex", "schema": "(ab|cd|e)*f"}
    return {"tokens": [5, 6, 7], "grammar": rule, "max_tokens": 20, **options}


def looked(prompt: dict):
    """The masks of a request's first token."""
    model = tiny_model.model()
    (request,) = make_requests([prompt], Options(), model.tokenizer, model.cfg, model.max_length)
    waiting, running = Structured(model), Engine(model, SIZES)
    running._structured = waiting
    work = running._works[running.submit(request)]
    ((_, error),) = waiting.ready(wait=True)
    assert error is None
    return waiting.masks([work], np.zeros((1, 0), np.int32))


def test_edits_that_leave_nothing_of_a_grammar_are_an_error_of_the_request():
    first = [i for i in range(V) if tiny_model.tokenizer().decode([i])[:1] in ("a", "c", "e", "f")]
    assert not list(looked(ruled(logit_bias={5: 3})).failures())
    assert not list(looked(ruled(allowed_token_ids=first[:1])).failures())
    ((slot, error),) = looked(ruled(banned_token_ids=first)).failures()
    assert slot == 0
    assert error.reason == "unsatisfiable"
    assert "request 0: allowed_token_ids, banned_token_ids" in str(error)
    assert "after 0 tokens; loosen them or the grammar" in str(error)


def test_ends_before_min_tokens_leave_nothing_of_a_short_grammar():
    empty = ruled(grammar={"kind": "regex", "schema": ""})
    assert not list(looked(empty).failures())
    ((_, error),) = looked({**empty, "min_tokens": 1}).failures()
    assert "min_tokens=1" in str(error)


@pytest.mark.exhaustive
def test_a_grammar_and_a_bias_hold_together():
    """The same replies with drafts and without; the bias decides among what is allowed."""
    model = tiny_model.model()
    one = tiny_model.tokenizer().encode_user("e")[0]
    asked = [ruled(logit_bias={one: bias}, id=str(bias), min_tokens=4) for bias in (30, -30)]
    made = di.generate(model, asked, seed=3)
    assert made == di.generate(model, asked, seed=3, speculative=planning.Fixed(2))
    liked, disliked = made
    assert liked.tokens == (one,) * 20
    assert one not in disliked.tokens
    assert len(disliked.tokens) >= 4
    assert re.fullmatch("(ab|cd|e)*f", disliked.text) or disliked.finish_reason == "length"


# -- room -----------------------------------------------------------------------------------------


def test_sizes_have_room_for_what_is_asked():
    model = tiny_model.model()
    few = sizes_for(requests()[:2], model.cfg, model.max_length)
    assert (few.edits, few.forced, few.stop_ids) == (True, 0, 4)
    assert not sizes_for(requests()[:1], model.cfg, model.max_length).edits
    many = grown(few, requests())
    assert many == dataclasses.replace(few, forced=4)
    (more,) = make_requests(
        [{"tokens": [5], "stop_token_ids": [3, 4, 5, 6]}], Options(), model.tokenizer, model.cfg,
        model.max_length,
    )  # fmt: skip
    assert grown(few, [more]) == dataclasses.replace(few, stop_ids=8)
    assert grown(many, requests()[:1]) == many


def test_memory_counts_what_edits_take():
    model = tiny_model.model()
    plain = dataclasses.replace(SIZES, edits=False, forced=0)
    more, less = (memory.need(model.cfg, model.numerics, sizes) for sizes in (SIZES, plain))
    assert (more.page, more.slot, less.edits) == (less.page, less.slot, 0)
    assert more.edits == 9 * V + 4 * (SIZES.stop_ids + FORCED) + 25
    free = int((5 * less.slot + 6 * less.page) / memory.SHARE) + 1
    assert memory.fitted(plain, model.cfg, model.numerics, free) == plain
    with pytest.raises(ValueError, match=f"and edits of {more.edits:,} bytes a slot, "):
        memory.fitted(SIZES, model.cfg, model.numerics, free)
