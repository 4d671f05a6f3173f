"""`LLM`: replies are functions of prompt, parameters and seed; what is said of them is exact."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import loading, scoring
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.engine import sizes
from deepinfer_jax.llm import LLM, SamplingParams, replies, sample_seed
from deepinfer_jax.planning import policies
from deepinfer_jax.requests import Options
from tests import tiny_model

SLOTS = 5  # of programs that other tests compile too
TOP = 5
PROMPTS = ["What is 12 + 7?", [9, 8, 7], {"prompt": "Sort 3 1 2."}, {"prompt_token_ids": [5] * 40}]
NEIGHBOUR = [(7 * i) % 2048 for i in range(600)]
PARAMS = [
    SamplingParams(n=3, seed=11, max_tokens=7, top_logprobs=TOP, prompt_logprobs=True),
    SamplingParams(n=1, seed=12, max_tokens=3, temperature=0, top_logprobs=TOP, logprob_mode="raw"),
    SamplingParams(n=2, seed=-1, max_tokens=5, top_p=0.7, top_logprobs=TOP, prompt_logprobs=True),
    SamplingParams(n=2, seed=13, max_tokens=6, temperature=2.0, logprob_mode="processed"),
]  # fmt: skip


@functools.cache
def llm(**options) -> LLM:
    return LLM(tiny_model.model(), **options)


@functools.cache
def together() -> list[di.RequestOutput]:
    """All at once; the long neighbour makes the programs those of tests/test_generation.py."""
    prompts, params = [*PROMPTS, NEIGHBOUR], [*PARAMS, SamplingParams(max_tokens=9)]
    return llm(batch_size=SLOTS).generate(prompts, params)[: len(PROMPTS)]


def test_outputs_come_in_the_order_of_the_prompts():
    tokenizer = tiny_model.tokenizer()
    bos, text = tokenizer.bos, tokenizer.encode_user("What is 12 + 7?")
    assert [output.request_id for output in together()] == ["0", "1", "2", "3"]
    assert [output.prompt for output in together()] == [PROMPTS[0], None, "Sort 3 1 2.", None]
    assert together()[0].prompt_token_ids == (bos, *text)
    assert together()[1].prompt_token_ids == (9, 8, 7)
    for output, params in zip(together(), PARAMS, strict=True):
        assert output.finished
        assert [one.index for one in output.outputs] == list(range(params.n))
        assert [one.seed for one in output.outputs] == [
            sample_seed(params.seed, k) for k in range(params.n)
        ]
        assert len({one.token_ids for one in output.outputs}) == params.n


def test_each_of_n_is_the_single_reply_with_the_reported_seed():
    """In a batch and alone, by this surface and by `generate`: the same values, bit for bit."""
    for prompt, params, output in zip(PROMPTS, PARAMS, together(), strict=True):
        for one in output.outputs:
            single = dataclasses.replace(
                params, n=1, seed=one.seed, prompt_logprobs=False, top_logprobs=0
            )
            (again,) = llm(batch_size=1).generate(prompt, single, use_tqdm=False)
            assert again.outputs[0] == dataclasses.replace(one, index=0, top_logprobs=None)
    tokens = list(together()[0].prompt_token_ids)
    request = {"tokens": tokens, "seed": 11, "max_tokens": 7}
    (result,) = di.generate(tiny_model.model(), [request], batch_size=1)
    assert result.tokens == together()[0].outputs[0].token_ids
    assert result.logprobs == together()[0].outputs[0].logprobs


def test_order_and_company_do_not_matter():
    numbers = [2, 0, 3, 1]
    some = [PARAMS[n] for n in numbers]
    again = llm(batch_size=1).generate([PROMPTS[n] for n in numbers], some)
    for number, output in zip(numbers, again, strict=True):
        assert dataclasses.replace(output, request_id=str(number)) == together()[number]


def test_a_fresh_seed_is_drawn_reported_and_repeats_the_reply():
    params = SamplingParams(max_tokens=4)
    one, other = llm(batch_size=1).generate([[5, 6, 7]] * 2, params)
    assert one.outputs[0].seed != other.outputs[0].seed
    same = dataclasses.replace(params, seed=other.outputs[0].seed)
    (again,) = llm(batch_size=1).generate([5, 6, 7], same)
    assert again.outputs == other.outputs


def test_log_probabilities_are_those_asked_for():
    raw, both = together()[1].outputs[0], together()[0].outputs[0]
    processed = together()[3].outputs[0]
    assert raw.logprobs_processed is None
    assert processed.logprobs is None
    assert both.logprobs == both.logprobs_processed  # temperature 1, nothing removed
    assert both.cumulative_logprob == pytest.approx(sum(both.logprobs))
    assert processed.cumulative_logprob == pytest.approx(sum(processed.logprobs_processed))
    cut = together()[2].outputs[0]
    for place, mass in enumerate(cut.log_kept_mass):
        assert mass < 0
        assert cut.logprobs[place] == pytest.approx(cut.logprobs_processed[place] + mass, abs=1e-5)


def scored(output: di.RequestOutput, one: di.CompletionOutput) -> scoring.Scored:
    sequences = [output.prompt_token_ids + one.token_ids, [1]]
    return scoring.score_sequences(tiny_model.model(), sequences, top=TOP, routed=True)[0]


def test_prompt_and_top_log_probabilities_are_those_of_score():
    for number in (0, 2):
        output, end = together()[number], len(together()[number].prompt_token_ids) - 1
        for one in output.outputs:
            want = scored(output, one)
            assert output.prompt_logprobs == tuple(want.logprobs[:end].tolist())
            tops = (*output.prompt_top_logprobs, *one.top_logprobs)
            assert [list(top) for top in tops] == want.top_ids.tolist()
            assert [list(top.values()) for top in tops] == want.top_logprobs.tolist()
            for token, logprob, top in zip(
                one.token_ids, one.logprobs, one.top_logprobs, strict=True
            ):
                assert top.get(token, logprob) == logprob
                assert token in top or min(top.values()) >= logprob
    assert together()[1].prompt_logprobs is together()[1].prompt_top_logprobs is None
    assert together()[3].outputs[0].top_logprobs is None


def test_a_greedy_reply_takes_the_first_of_the_best():
    one = together()[1].outputs[0]
    assert [next(iter(top)) for top in one.top_logprobs] == list(one.token_ids)
    assert [next(iter(top.values())) for top in one.top_logprobs] == list(one.logprobs)


def test_experts_are_of_every_token_of_prompt_and_reply():
    params = dataclasses.replace(PARAMS[0], n=2, return_routed_experts=True)
    (output,) = llm(batch_size=1).generate(PROMPTS[0], params)
    for one in output.outputs:
        np.testing.assert_array_equal(one.routed_experts, scored(output, one).routed)


@pytest.mark.exhaustive
def test_prompts_can_be_scored_alone():
    """No top tokens: one pass over the prompts, another program, the same numbers."""
    params = SamplingParams(n=2, seed=11, max_tokens=7, prompt_logprobs=True)
    output, _ = llm(batch_size=SLOTS).generate([PROMPTS[0], PROMPTS[2]], params)
    assert output.prompt_logprobs == together()[0].prompt_logprobs
    assert output.prompt_top_logprobs is None


@pytest.mark.exhaustive
def test_what_edits_the_choice_leaves_the_raw_log_probabilities_to_score():
    """Penalties, biases, bans and forced tokens: `LLM` compares the two itself."""
    some = [
        {"logit_bias": {5: 50.0}, "frequency_penalty": 20.0},
        {"golden_token_ids": [7, -1, 8], "top_p": 0.5},
        {"allowed_token_ids": [3, 4, 5], "repetition_penalty": 1.5},
        {"banned_token_ids": [5], "min_tokens": 6, "ignore_eos": True, "presence_penalty": 1.0},
    ]
    params = [
        SamplingParams(n=2, seed=n, max_tokens=8, top_logprobs=TOP, prompt_logprobs=True, **each)
        for n, each in enumerate(some)
    ]
    edited = llm(batch_size=SLOTS).generate(PROMPTS, params)
    assert edited[1].outputs[0].token_ids[0::2][:2] == (7, 8)
    assert {*edited[2].outputs[0].token_ids} <= {3, 4, 5}
    for prompt, one, output in zip(PROMPTS, params, edited, strict=True):
        (alone,) = llm(batch_size=1).generate(prompt, one)
        assert dataclasses.replace(alone, request_id=output.request_id) == output


@pytest.mark.exhaustive
def test_drafts_change_nothing():
    drafting = LLM(tiny_model.model(), batch_size=SLOTS, speculative=policies.Fixed(3))
    assert drafting.generate(PROMPTS, PARAMS) == together()


@pytest.mark.exhaustive
def test_many_prompts_of_all_kinds_are_independent():
    rng = random.Random(4)
    prompts = [[rng.randrange(2048) for _ in range(rng.randint(1, 120))] for _ in range(30)]
    some = [
        SamplingParams(
            n=rng.randint(1, 3), seed=rng.getrandbits(64), max_tokens=rng.randint(1, 20),
            temperature=rng.choice([0, 0.7, 1.5]), top_p=rng.choice([1.0, 0.8]),
            top_logprobs=rng.choice([0, 1, 3]), prompt_logprobs=rng.random() < 0.5,
        )
        for _ in prompts
    ]  # fmt: skip
    every = llm(batch_size=8).generate(prompts, some)
    for prompt, params, output in zip(prompts, some, every, strict=True):
        (alone,) = llm(batch_size=1).generate(prompt, params)
        assert dataclasses.replace(alone, request_id=output.request_id) == output


# -- forms of asking ------------------------------------------------------------------------------


def test_texts_cannot_name_control_tokens_unless_they_are_markup():
    tokenizer = tiny_model.tokenizer()
    text = "<｜begin▁of▁sentence｜>Hi<｜end▁of▁sentence｜>"
    plain = llm()._read(text, "", False)[1]["tokens"]
    assert plain[0] == tokenizer.bos
    assert not set(plain[1:]) & tokenizer.control_ids
    assert tokenizer.decode(plain[1:]) == text
    marked = llm()._read(text, "", True)[1]["tokens"]
    assert (marked[0], marked[-1]) == (tokenizer.bos, tokenizer.eos)
    assert marked.count(tokenizer.bos) == 1
    (_, begun) = llm()._read("Hi", "", True)
    assert begun == {"tokens": [tokenizer.bos, *tokenizer.encode_user("Hi")]}


def test_a_chat_is_what_generate_renders():
    messages = [{"role": "user", "content": "What is 12 + 7?"}]
    params = SamplingParams(seed=3, max_tokens=4)
    (one,) = llm(batch_size=1).chat(messages, params)
    (first, second) = llm(batch_size=1).chat([messages, messages], params, thinking=True)
    (result,) = di.generate(
        tiny_model.model(), [{"messages": messages, "seed": 3}], max_tokens=4, batch_size=1
    )
    assert one.outputs[0].token_ids == result.tokens
    assert one.prompt == tiny_model.tokenizer().decode(one.prompt_token_ids)
    assert "What is 12 + 7?" in one.prompt
    assert first.prompt_token_ids != one.prompt_token_ids
    assert first.outputs == second.outputs


def test_one_prompt_of_each_form_and_none():
    params = SamplingParams(seed=1, max_tokens=1)
    for prompt in ("a", [5], {"prompt": "a"}, {"prompt_token_ids": [5]}, [np.int64(5)]):
        assert len(llm(batch_size=1).generate(prompt, params)) == 1
    assert llm().generate([]) == llm().chat([]) == []


def test_the_room_there_is():
    params = SamplingParams(max_tokens=None, seed=2)
    asked = llm()._asked({"tokens": [5] * 1020}, None, params, "0", "", Options())
    assert asked.samples[0].options.max_tokens == 4
    with pytest.raises(ValueError, match=r"prompts\[1\]: min_tokens must be at most max_tokens=4"):
        llm().generate([[5], [5] * 1020], SamplingParams(max_tokens=None, min_tokens=9))
    with pytest.raises(ValueError, match=r"prompts\[0\]: the prompt has 1024 .* shorten it by 1"):
        llm().generate([[5] * 1024], params)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((5,), TypeError, "prompts must be a text"),
        ((b"a",), TypeError, "prompts must be a text"),
        ((["a", 5],), ValueError, r"prompts\[1\]: tokens must be"),
        (([""],), ValueError, r"prompts\[0\] is an empty text; give \[0\]"),
        ((["a", "\ud800"],), ValueError, r"prompts\[1\]: half a character, '\\ud800', stands"),
        (([[]],), ValueError, r"prompts\[0\]: tokens must be a non-empty list"),
        (([[2048]],), ValueError, r"prompts\[0\]: tokens must lie in 0\.\.2047"),
        (([{"tokens": [1]}],), ValueError, r"prompts\[0\] must have one key"),
        (([{"prompt": "a", "prompt_token_ids": [1]}],), ValueError, "must have one key"),
        (([{"prompt": [1]}],), TypeError, "'prompt' is a text"),
        (([{"prompt_token_ids": "a"}],), TypeError, "'prompt' is a text"),
        (([[5] * 1020],), ValueError, r"prompts\[0\]: the prompt has 1020 tokens and max_tokens"),
        ((["a"], {"n": 2}), TypeError, "sampling_params must be a SamplingParams"),
        ((["a"], [None]), TypeError, r"sampling_params\[0\] must be a SamplingParams"),
        ((["a"], [SamplingParams()] * 2), ValueError, "one for each of 1 prompts, got 2"),
        ((["a"], SamplingParams(stop_token_ids=[2048])), ValueError, "stop_token_ids must lie"),
        ((["a"], SamplingParams(banned_token_ids=[2048])), ValueError, "banned_token_ids must lie"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        llm().generate(*arguments)


def test_bad_chats_and_models_are_refused():
    with pytest.raises(TypeError, match=r"messages\[1\]: messages\[0\] must be a mapping"):
        llm().chat([[{"role": "user", "content": "a"}], ["a"]])
    with pytest.raises(ValueError, match="effort must be one of"):
        llm().chat([{"role": "user", "content": "a"}], effort="much")
    with pytest.raises(ValueError, match="are for a model that is still to be loaded"):
        LLM(tiny_model.model(), max_length=100)
    with pytest.raises(FileNotFoundError, match="unknown model"):
        LLM("no-such-model")
    for given in (None, {}, {"role": "user", "content": "a"}, iter([]), "hi", 3):
        with pytest.raises(TypeError, match=r"messages must be a conversation, .*, got "):
            llm().chat(given)
    with pytest.raises(TypeError, match="model must be the name of a model or a path, got 3"):
        LLM(3)
    for given in (3, "planner"):
        with pytest.raises(
            TypeError, match=r"speculative must be a policy .* Fixed.3. or OFF, got"
        ):
            LLM(tiny_model.model(), speculative=given)
        with pytest.raises(TypeError, match="speculative must be a policy"):
            di.generate(tiny_model.model(), ["a"], speculative=given)
    with pytest.raises(TypeError, match="batch_size must be an integer, got 'x'"):
        LLM(tiny_model.model(), batch_size="x")


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_reply_that_fails_alone_does_not_take_the_others_along():
    bad = {"schema_type": "regex", "schema": "("}
    some = [PARAMS[1], SamplingParams(so_args=bad, n=2, top_logprobs=TOP, prompt_logprobs=True)]
    with pytest.warns(RuntimeWarning, match="2 of 3 replies failed .* the first is request 1"):
        good, failed = llm(batch_size=1).generate([PROMPTS[1], "a"], some)
    assert good.outputs == together()[1].outputs
    assert not failed.finished
    assert failed.prompt_logprobs is not None
    for one in failed.outputs:
        assert (one.finish_reason, one.text, one.token_ids, one.top_logprobs) == (
            "error",
            "",
            (),
            (),
        )
        assert "regex" in str(one.error) or "expression" in str(one.error)
        assert "error" in one._repr_html_()


def test_a_difference_between_sampler_and_score_is_not_passed_over():
    output = together()[1]
    one, want = output.outputs[0], scored(output, output.outputs[0])
    result = di.Result(
        id="r", prompt=None, text="", tokens=one.token_ids, logprobs=one.logprobs,
        logprobs_processed=one.logprobs, kept_mass=one.kept_mass, pieces=one.pieces,
        finish_reason="stop", prompt_tokens=3, seed=0, numerics="", timing=None,
    )  # fmt: skip
    replies._check_bits(result, want)
    moved = np.nextafter(np.float32(one.logprobs[1]), np.float32(0))
    other = (one.logprobs[0], float(moved), *one.logprobs[2:])
    with pytest.raises(RuntimeError, match="request r: token 1 of the reply"):
        replies._check_bits(dataclasses.replace(result, logprobs=other), want)
    assert bits(moved).tolist() != bits(np.float32(one.logprobs[1])).tolist()


# -- showing --------------------------------------------------------------------------------------


def test_outputs_show_themselves_in_a_notebook():
    shown = dataclasses.replace(together()[0], prompt="<b>")._repr_html_()
    assert "&lt;b&gt;" in shown
    assert shown.count("<span") == sum(len(one.pieces) for one in together()[0].outputs)
    assert "40 tokens" in together()[3]._repr_html_()


def test_the_readme_example_runs(monkeypatch):
    """The block of README.md, with the tests' model for the shipped one."""
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    (block,) = re.findall(r"<!-- tested: llm -->\n```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.setattr(loading, "load", lambda name, **options: tiny_model.model())
    monkeypatch.setattr(sizes, "DEFAULT_SLOTS", 1)  # the programs of the other tests
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(block, "README.md", "exec"), {})
