"""Replies: the same bits alone and in any company, all forms of asking agree."""

import dataclasses
import functools
import io
import itertools
import random
import sys
import typing

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import engine, generation
from deepinfer_jax.engine import Update, programs
from deepinfer_jax.engine.sizes import SHORTEST_CAPACITY
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import OptionArguments, Options
from deepinfer_jax.training import corpus
from tests import tiny_model

SLOTS = 5  # of the programs that several tests share


@functools.cache
def real_prompts():
    """Fifty prompts of the corpus; options of all kinds, replies of one to fourteen tokens."""
    prompts = []
    for index, example in enumerate(itertools.islice(corpus.examples(11), 50)):
        options = [{}, {"temperature": 0}, {"top_p": 0.7}, {"top_k": 3, "min_p": 0.01}]
        prompts.append(
            {
                "messages": list(example.prompt_messages),
                "id": f"{example.task}-{index}",
                "max_tokens": 1 + index % 14,
                "thinking": example.reasoning is not None,
                **options[index % 4],
            }
        )
    return prompts


@functools.cache
def one_by_one():
    """Every prompt by itself, in order."""
    return {
        result.id: result
        for prompt in real_prompts()
        for result in di.generate(tiny_model.model(), [prompt], seed=3)
    }


def neighbour(tokens):
    """A long prompt: it makes the cache larger and its calls cut into others' prompts."""
    return {"tokens": [(7 * i) % 2048 for i in range(tokens)], "max_tokens": 9, "id": "neighbour"}


@pytest.mark.exhaustive
def test_replies_do_not_depend_on_batch_order_or_padding():
    """Five slots instead of one, another order, twice the capacity, larger prefill calls."""
    prompts = [*real_prompts(), neighbour(600)]
    random.Random(5).shuffle(prompts)
    results = di.generate(tiny_model.model(), prompts, seed=3, batch_size=SLOTS)
    assert [result.id for result in results] == [prompt["id"] for prompt in prompts]
    for result in results:
        if result.id != "neighbour":
            assert result == one_by_one()[result.id]
    kinds = {(result.finish_reason, len(result.tokens)) for result in results}
    assert len(kinds) > 10


def test_replies_do_not_depend_on_where_the_host_looks():
    """Any number of decode steps between two looks, prompts cut elsewhere."""
    prompts, model = real_prompts()[:7], tiny_model.model()
    requests = make(prompts)
    one = engine.sizes_for(requests, model.cfg, model.max_length, 1)
    running = engine.Engine(model, dataclasses.replace(one, prefill=(32,)), eager=True)
    for request in requests:
        running.submit(request)
    found = []
    for number, update in enumerate(running.updates()):
        running._limit = 1 + number % 4
        found += [update.result] if update.result else []
    assert found == [one_by_one()[prompt["id"]] for prompt in prompts]


def make(prompts, **options):
    model = tiny_model.model()
    options = Options(seed=3, **options)
    return make_requests(prompts, options, model.tokenizer, model.cfg, model.max_length)


def test_a_reply_is_that_of_the_transitions():
    """`prefill` by hand, again and again with one row: the same tokens and log-probabilities."""
    model = tiny_model.model()
    (request,) = make([{"prompt": "What is 12 + 7?", "max_tokens": 4, "temperature": 0.8}])
    (result,) = di.generate(model, [{"prompt": "What is 12 + 7?", "seed": request.seed}],
                            max_tokens=4, temperature=0.8)  # fmt: skip
    cache = di.init_cache(model.cfg, model.numerics, 1, SHORTEST_CAPACITY)
    sampling = di.make_sampling(1, 0.8, seeds=[request.seed])
    prefill = jax.jit(di.prefill, static_argnames=("cfg", "numerics"))
    new, found = list(request.tokens), []
    for _ in range(4):
        start = int(cache.lengths[0])
        part = [(token, 0, start + i) for i, token in enumerate(new)]
        sampled, cache = prefill(
            model.params, model.tables, programs.make_rows(part, 32), cache, sampling,
            model.cfg, model.numerics,
        )  # fmt: skip
        new = [int(sampled.token[0])]
        found.append((new[0], float(sampled.logprob_raw[0])))
    assert found == list(zip(result.tokens, result.logprobs, strict=True))


def test_prompts_of_every_length_share_the_programs():
    one_by_one()
    every = (programs.fill_program, programs.decode_program)
    before = [program._cache_size() for program in every]
    prompts = [
        {"tokens": [7] * n, "max_tokens": m} for n, m in ((1, 1), (33, 3), (64, 17), (15, 2))
    ]
    for prompt in prompts:
        di.generate(tiny_model.model(), [prompt])
    assert [program._cache_size() for program in every] == before


def test_a_stream_joins_to_the_text():
    prompt = {"prompt": "Tell me a story.", "max_tokens": 23}
    (result,) = di.generate(tiny_model.model(), [prompt], seed=6)
    pieces = list(di.stream(tiny_model.model(), prompt, seed=6))
    assert "".join(pieces) == result.text
    assert len(pieces) > 3


def test_a_stream_begins_with_the_first_token():
    updates = generation.updates(tiny_model.model(), make([[5, 6, 7]]), eager=True)
    counts = [update.tokens for update in updates]
    assert counts[:4] == [1, 2, 4, 8]


def test_no_prompts_give_no_results():
    assert di.generate(tiny_model.model(), []) == []
    assert list(generation.updates(tiny_model.model(), [], eager=True)) == []
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        di.generate(tiny_model.model(), [], batch_size=0)


def test_a_lost_result_is_noticed(monkeypatch):
    monkeypatch.setattr(generation, "updates", lambda *args, **options: iter(()))
    with pytest.raises(AssertionError, match="0 results of 1 requests"):
        di.generate(tiny_model.model(), ["a"])


def test_options_are_arguments():
    """All of them, of the same types, and no other; the documentation names each."""
    assert typing.get_type_hints(OptionArguments) == typing.get_type_hints(Options)
    assert OptionArguments.__optional_keys__ >= {"seed", "logit_bias"}
    for name in typing.get_type_hints(Options):
        assert name in di.generate.__doc__
    with pytest.raises(TypeError, match="unknown option 'temprature'; known are max_tokens, temp"):
        di.generate(tiny_model.model(), ["a"], temprature=1)
    with pytest.raises(TypeError, match="unknown option 'batch_size'"):
        di.stream(tiny_model.model(), "a", batch_size=1)


def test_a_name_is_no_model():
    for call in (di.generate, di.stream):
        with pytest.raises(TypeError, match="must be what `load` returns, got 'spark-tiny': load"):
            call("spark-tiny", ["a"])


def test_a_bad_argument_is_refused_by_the_call():
    with pytest.raises(ValueError, match="temperature must be finite"):
        di.stream(tiny_model.model(), "a", temperature=-1)
    with pytest.raises(ValueError, match=r"prompts\[0\]: .* shorten it"):
        di.stream(tiny_model.model(), [5] * 2000)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        di.generate(tiny_model.model(), ["a"], batch_size=0)


@pytest.mark.parametrize("how", ["string", "token"])
def test_a_stop_cuts_the_reply_and_changes_nothing_before(how):
    model = tiny_model.model()
    (whole,) = di.generate(model, ["Sort 3 1 2."], max_tokens=12, temperature=0)
    place = next(i for i in range(4, 12) if whole.pieces[i].strip())
    stop = {"stop": whole.pieces[place]} if how == "string" else {}
    stop = stop or {"stop_token_ids": [whole.tokens[place]]}
    (cut,) = di.generate(model, ["Sort 3 1 2."], max_tokens=12, temperature=0, **stop)
    count = len(cut.tokens)
    assert cut.finish_reason == "stop"
    assert count <= place + 1
    assert cut.tokens == whole.tokens[:count]
    assert cut.logprobs == whole.logprobs[:count]
    assert whole.text.startswith(cut.text)
    assert whole.pieces[place] not in cut.text


def test_the_reported_seed_repeats_the_reply():
    model = tiny_model.model()
    first, second = di.generate(model, ["a b c", "a b c"], max_tokens=6, batch_size=1)
    assert first.tokens != second.tokens
    (again,) = di.generate(model, [{"prompt": "a b c", "seed": second.seed}], max_tokens=6)
    assert dataclasses.replace(again, id=1) == second


def test_greedy_replies_have_a_certain_choice():
    (result,) = di.generate(tiny_model.model(), ["a"], max_tokens=5, temperature=0)
    assert result.logprobs_processed == (0.0,) * 5
    assert result.kept_mass == (1.0,) * 5
    assert all(logprob < 0 for logprob in result.logprobs)


def test_timing_is_in_order_and_not_compared():
    (result,) = di.generate(tiny_model.model(), ["a"], max_tokens=3)
    timing = result.timing
    assert 0 <= timing.admitted_s <= timing.first_token_s <= timing.finished_s
    assert dataclasses.replace(result, timing=None) == result


def test_damaged_weights_are_noticed():
    model = tiny_model.model()
    broken = {**model.params, "norm": model.params["norm"] * np.nan}
    with pytest.raises(FloatingPointError, match="request 'r': the log-probability of token 0"):
        di.generate(dataclasses.replace(model, params=broken), [{"prompt": "a", "id": "r"}])


def test_a_result_shows_its_tokens_in_a_notebook():
    (result,) = di.generate(tiny_model.model(), ["a"], max_tokens=3, temperature=0)
    shown = dataclasses.replace(result, pieces=("<b>", "\n", "c"))._repr_html_()
    assert "&lt;b&gt;" in shown
    assert shown.count("<span") == 3


def test_a_terminal_shows_how_many_replies_are_done(monkeypatch):
    """And nobody else; the updates pass through."""
    result, error = typing.cast(di.Result, object()), ValueError("unlucky")
    made = [Update(0, "a", 1), Update(0, "", 1, result), Update(1, "", 0, None, error)]
    for terminal, show in ((True, True), (True, False), (False, True)):
        written = io.StringIO()
        monkeypatch.setattr(written, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stderr", written)
        assert list(generation.watched(iter(made), 2, show)) == made
        assert ("2/2" in written.getvalue()) == (terminal and show)
