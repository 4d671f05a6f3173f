"""Grammars in the engine: replies that follow them, with drafts and without, in narrow places."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import threading

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import grammar, planning
from deepinfer_jax.engine import Engine, Sizes, structured
from deepinfer_jax.engine.seats import Work
from deepinfer_jax.grammar import Compiler, GrammarError, GrammarSettings, compiler
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import Options
from deepinfer_jax.scheduling import Job
from deepinfer_jax.transcript import Transcript
from tests import tiny_model
from tests.engine import test_engine

SIZES = Sizes(  # as in test_engine
    slots=3, capacity=96, pages=6, page_tokens=16, snapshots=2, edits=True, forced=4, prefill=(32,)
)  # fmt: skip
WORDS = r"(yes|no|maybe)( (yes|no)){2,5}\."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@functools.cache
def requests():
    """Six with a grammar, of which one is nonsense, among three without."""
    rng = np.random.default_rng(2)
    kinds = [
        {"grammar": {"schema_type": "regex", "schema": WORDS}},
        {},
        {"grammar": {"kind": "json", "schema": SCHEMA}, "temperature": 0.5},
    ]
    edits = {"presence_penalty": 3.0, "banned_token_ids": [40, 41], "min_tokens": 4}
    prompts = [
        {"tokens": rng.integers(3, 2048, 4 + 5 * n).tolist(), "id": str(n), "max_tokens": 48,
         **kinds[n % 3], **(edits if n in (4, 5, 6) else {})}
        for n in range(9)
    ]  # fmt: skip
    prompts[3]["grammar"] = {"schema_type": "regex", "schema": "(unclosed"}
    model = tiny_model.model()
    return make_requests(prompts, Options(seed=4), model.tokenizer, model.cfg, model.max_length)


def answered(order, policy=planning.OFF):
    running = Engine(tiny_model.model(), SIZES, policy=policy)
    numbers = {running.submit(requests()[n]): n for n in order}
    found, errors = {}, {}
    for update in running.updates():
        if update.result:
            found[numbers[update.index]] = update.result
        if update.error:
            errors[numbers[update.index]] = update.error
    return found, errors


@functools.cache
def plain():
    """Drafted for; that drafts change nothing is shown by the exhaustive run and without grammars
    by tests/test_rounds.py.
    """
    return answered(range(9), planning.Fixed(2))


@pytest.mark.slow
def test_replies_follow_their_grammars_and_failures_are_alone():
    found, errors = plain()
    assert found.keys() == set(range(9)) - {3}
    assert isinstance(errors[3], GrammarError)
    for n in (0, 6):
        assert re.fullmatch(WORDS, found[n].text), found[n].text
    for n in (2, 5, 8):
        value = json.loads(found[n].text)
        assert value["name"] in ("ann", "bob")
        assert isinstance(value["age"], int)
        assert value["age"] <= 99
    assert all(found[n].finish_reason == "stop" for n in (0, 2, 5, 6, 8))
    assert sum(found[n].timing.verified for n in (0, 2, 5, 6, 8)) > 0


@pytest.mark.exhaustive
def test_neither_drafts_nor_order_change_a_bit_under_a_grammar():
    found, errors = answered([8, 3, 1, 6, 0, 7, 2, 5, 4])
    assert found == plain()[0]
    assert errors.keys() == {3}


@pytest.mark.exhaustive
def test_a_reply_without_grammar_does_not_notice_those_with():
    alone, _ = answered([1, 4, 7], planning.Fixed(2))
    assert {n: plain()[0][n] for n in (1, 4, 7)} == alone


def test_grammars_are_refused_before_anything_runs():
    model = tiny_model.model()
    for wrong, message in (
        ({"schema_type": "xml", "schema": "a"}, r"prompts\[0\]: so_args: schema_type must be one"),
        ({"schema": "a"}, r"needs 'schema_type'"),
        ("a+", "grammar must be a mapping"),
        ({"kind": "regex", "schema": "a", "trigger_token_ids": [4000]}, "trigger_token_ids must"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            di.generate(model, [{"prompt": "a", "grammar": wrong}])


def test_generate_raises_what_ended_a_request_after_the_others():
    prompt = {"tokens": [5, 6], "grammar": {"schema_type": "regex", "schema": "(unclosed"}}
    with pytest.raises(GrammarError) as caught:
        di.generate(tiny_model.model(), [prompt])
    assert "0 of 1 requests have results" in caught.value.__notes__[0]


def test_a_draft_behind_which_nothing_may_be_said_is_not_verified():
    """Else a token would be drawn there from nothing: its number is none, and no fault of weights.

    The grammar wants two letters and then the end, which `min_tokens` does not allow.
    """
    model, (a, b) = tiny_model.model(), (tiny_model.tokenizer().encode_user(x)[0] for x in "ab")
    prompt = {"tokens": [5], "grammar": {"kind": "regex", "schema": "[ab]{2}"}, "min_tokens": 3}
    (asked,) = make_requests([prompt], Options(), model.tokenizer, model.cfg, model.max_length)
    work = Work(0, asked, Transcript(asked, model.tokenizer, model.cfg.eos_token_id))
    rules = structured.Structured(model)
    rules.submit(work, Job(0, asked.tokens, 4))
    assert [error for _, error in rules.ready(wait=True)] == [None]
    assert rules.masks([work], np.array([[a, b, a]])).legal.tolist() == [1]
    assert work.state is not None
    for count, token in enumerate((a, b)):
        assert not list(rules.masks([work], np.array([[a]])).failures()), count
        work.transcript.push(token)
        work.state = grammar.advance(work.state, [token])
    ((slot, error),) = rules.masks([work], np.array([[a]])).failures()
    assert (slot, error.reason) == (0, "unsatisfiable")
    assert "after 2 tokens" in str(error)


def nonsense(count: int) -> list:
    """Requests whose grammars cannot be compiled; no program runs for them."""
    model = tiny_model.model()
    prompts = [
        {"tokens": [5, 6, 7], "grammar": {"kind": "regex", "schema": f"({n}"}} for n in range(count)
    ]
    return make_requests(
        prompts, Options(max_tokens=9), model.tokenizer, model.cfg, model.max_length
    )


def test_whoever_reads_may_cancel_what_fails_together():
    """All have failed when the first is told; the cancelled ones may or may not be heard of."""
    running, heard = Engine(tiny_model.model(), SIZES), []
    numbers = {running.submit(request) for request in nonsense(5)}
    for update in running.updates():
        heard.append(update.index)
        rest = numbers - {*heard}
        if len(heard) == 1:
            with contextlib.suppress(ValueError):
                running.cancel(max(rest))
    assert {*heard} | {max(numbers - {heard[0]})} == numbers
    assert len(heard) == len({*heard})


@pytest.mark.slow
def test_whoever_reads_may_cancel_at_every_update():
    """Beside grammars, of which one fails; what is left has its bits."""
    running, found, gone = Engine(tiny_model.model(), SIZES, policy=planning.Fixed(2)), {}, set()
    numbers = [running.submit(request) for request in requests()]
    for update in running.updates():
        assert update.index not in gone
        if update.result:
            found[update.index] = update.result
        if update.index in (1, 2, 6) and update.result is None and len(gone) < 3:
            victim = {1: 4, 2: 5, 6: 7}[update.index]
            if victim not in gone and victim not in found:
                running.cancel(victim)
                gone.add(victim)
    assert gone
    assert found.keys() == set(numbers) - gone - {3}
    assert all(result == plain()[0][number] for number, result in found.items())


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_fails_alone(monkeypatch):
    """One that is never compiled in time, among requests without grammar."""
    gate = threading.Event()
    monkeypatch.setattr(compiler, "build", lambda *args: gate.wait(60) and None)
    monkeypatch.setattr(
        structured, "Compiler", functools.partial(Compiler, settings=GrammarSettings(timeout_s=0.2))
    )
    try:
        found, errors = answered([0, 1, 4], planning.Fixed(2))
    finally:
        gate.set()
    assert errors.keys() == {0}
    assert errors[0].reason == "timeout"
    assert {n: plain()[0][n] for n in (1, 4)} == found


@pytest.mark.slow
def test_programs_under_grammars_are_foreseen(monkeypatch):
    """Every call of a run with drafts is one of those that are compiled ahead of it."""
    plain()
    running = Engine(tiny_model.model(), SIZES, policy=planning.Fixed(2))
    for request in requests():
        running.submit(request)
    running.warm_up()
    called = test_engine.foreseen(monkeypatch, running)
    assert len([update for update in running.updates() if update.result]) == 8
    assert called == running._watch._known.keys()
    assert running.statistics().verified > 0


def test_a_request_that_is_compiling_can_be_cancelled():
    running = Engine(tiny_model.model(), SIZES)
    number = running.submit(requests()[0])
    running.cancel(number)
    assert list(running.updates()) == []


def test_what_never_fits_is_refused_with_a_grammar_too():
    running = Engine(tiny_model.model(), SIZES)
    long = dataclasses.replace(requests()[8].options, max_tokens=60)
    with pytest.raises(ValueError, match="the longest sequence is 96"):
        running.submit(dataclasses.replace(requests()[8], options=long))
