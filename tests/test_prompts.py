"""Prompts of every form to requests, and every way in which one is refused."""

import dataclasses
import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.prompts import make_requests, read_prompt_lines, request_seed
from deepinfer_jax.requests import Options
from tests import tiny_model

LENGTH = 300


def requests(prompts, options=None, **more):
    cfg = ModelConfig.from_json(tiny_model.folder())
    options = Options(max_tokens=7) if options is None else options
    return make_requests(prompts, options, tiny_model.tokenizer(), cfg, LENGTH, **more)


def test_the_forms_of_a_prompt_agree():
    message = [{"role": "user", "content": "What is 2 + 3?"}]
    ids = tiny_model.tokenizer().render_chat(message, thinking=False)
    forms = ["What is 2 + 3?", message, ids, tuple(ids), np.array(ids, np.int32)]
    forms += [{"prompt": forms[0]}, {"messages": message}, {"tokens": ids}]
    assert {request.tokens for request in requests(forms)} == {tuple(ids)}


def test_a_mapping_overrides_options_and_names_its_request():
    given = {"prompt": "a", "id": "x", "max_tokens": 3, "temperature": 0, "stop": "b", "seed": 5}
    (request,) = requests([given])
    assert (request.id, request.prompt, request.seed) == ("x", "a", 5)
    assert request.options == dataclasses.replace(
        Options(), max_tokens=3, temperature=0, stop=("b",), seed=5
    )


def test_options_may_be_numpy_scalars():
    options = Options(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.9))
    assert (options.temperature, options.top_k, options.top_p) == (0.5, 3, 0.9)


def test_options_of_choice_are_kept_in_one_form():
    given = {"logit_bias": {"7": 2, "5": -1.5}, "allowed_token_ids": [9, 3, 9]}
    (request,) = requests([{"prompt": "a", **given, "banned_token_ids": np.arange(2).tolist()}])
    options = request.options
    assert options.logit_bias == options.biases == ((5, -1.5), (7, 2.0))
    assert options.allowed_token_ids == (3, 9)
    assert options.banned_token_ids == (0, 1)
    assert dataclasses.replace(options) == options
    assert hash(options) == hash(dataclasses.replace(options, logit_bias={5: -1.5, 7: 2}))


@pytest.mark.parametrize(
    ("given", "edits"),
    [
        ({}, False),
        ({"ignore_eos": True, "stop": "a", "top_k": 3, "repetition_penalty": 1}, False),
        ({"logit_bias": {5: 0}}, True),
        ({"allowed_token_ids": [5]}, True),
        ({"banned_token_ids": [5]}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"repetition_penalty": 1.5}, True),
        ({"min_tokens": 1}, True),
        ({"golden_token_ids": [-1]}, True),
    ],
)
def test_what_changes_the_choice_is_known(given, edits):
    assert Options(**given).edits == edits


def test_what_ends_a_reply():
    assert Options(stop_token_ids=[7]).ends(1) == (1, 7)
    assert Options(stop_token_ids=[7], ignore_eos=True).ends(1) == (7,)


def test_thinking_and_tools_reach_the_prompt():
    tool = {"name": "weather", "parameters": {"type": "object"}}
    plain, thinking, tools = (
        tiny_model.tokenizer().decode(request.tokens)
        for request in make_requests(
            ["a", {"prompt": "a", "thinking": True}, {"prompt": "a", "tools": [tool]}],
            Options(),
            tiny_model.tokenizer(),
            ModelConfig.from_json(tiny_model.folder()),
            1000,
        )
    )
    assert plain.endswith("</think>")
    assert thinking.endswith("<think>")
    assert "weather" in tools


@given(order=st.permutations(range(5)))
def test_a_seed_follows_the_id_not_the_place(order):
    prompts = [{"prompt": "a", "id": f"n{i}"} for i in range(5)]
    seeds = {request.id: request.seed for request in requests(prompts)}
    shuffled = {request.id: request.seed for request in requests([prompts[i] for i in order])}
    assert seeds == shuffled
    assert len(set(seeds.values())) == 5


def test_seeds_are_part_of_the_format():
    """Written down: results of earlier versions must be reproducible."""
    assert request_seed(0, 0) == request_seed(0, "0") == 13913987977269637804
    assert request_seed(1, "kite") == 10302430248960778927
    assert requests(["a"], Options(max_tokens=7, seed=4))[0].seed == request_seed(4, 0)


REFUSED = [
    ("", "non-empty"),
    (3, "got int"),
    (b"bytes", "got bytes"),
    ([], "non-empty list of token ids"),
    ([1, True], "tokens must be integers, got True"),
    ([1, 2.0], "tokens must be integers"),
    ([1, 2048], "tokens must lie in 0..2047, got 2048"),
    ([1, -1], "tokens must lie in 0..2047, got -1"),
    ({"prompt": "a", "colour": 1}, "unknown key 'colour'; known are prompt, messages"),
    ({"id": 1}, "got none of them"),
    ({"prompt": "a", "tokens": [1]}, "got both 'prompt' and 'tokens'"),
    ({"prompt": "a", "id": 1.5}, "id must be a string or an integer"),
    ({"prompt": "a", "id": None}, "id must be a string or an integer"),
    ({"tokens": [1], "tools": []}, "'tools' needs 'prompt' or 'messages'"),
    ({"messages": {"role": "user"}}, "messages must be a list"),
    ({"messages": ["a"]}, "messages\\[0\\] must be a mapping"),
    ({"messages": []}, "must not be empty"),
    ({"messages": [{"role": "king", "content": "a"}]}, "role must be one of"),
    ({"messages": [{"role": "user", "content": 0}]}, "messages\\[0\\].content must be a string"),
    ({"messages": [{"role": "user", "content": []}]}, "messages\\[0\\].content .*got \\[\\]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
        "messages\\[0\\].tool_calls\\[0\\] must be a mapping, got 'x'",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": "x"}]},
        "messages\\[0\\].tool_calls must be a list of mappings, got 'x'",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": 0}]},
        "messages\\[0\\].tool_calls must be a list of mappings, got 0",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
        "messages\\[0\\].tool_calls\\[0\\].function must be a mapping, got 'f'",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": 5}]}]},
        "messages\\[0\\].tool_calls\\[0\\].arguments must be a mapping or its JSON text, got 5",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "id": 5}]}]},
        "messages\\[0\\].tool_calls\\[0\\].id must be a string, got 5",
    ),
    (
        {"messages": [{"role": "assistant", "reasoning_content": 5}]},
        "messages\\[0\\].reasoning_content must be a string, got 5",
    ),
    ({"messages": [{"role": "assistant", "prefix": 1}]}, "messages\\[0\\].prefix must be true or"),
    (
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": 5}]},
        "messages\\[0\\].tool_call_id must be a string, got 5",
    ),
    ({"prompt": "a", "tools": "abc"}, "tools must be a list of mappings, got 'abc'"),
    ({"prompt": "a", "tools": {"name": "f"}}, "tools must be a list of mappings, got {"),
    ({"prompt": "a", "tools": 5}, "tools must be a list of mappings, got 5"),
    ({"prompt": "a", "tools": None}, "tools must be a list of mappings, got None"),
    ({"prompt": "a", "tools": ["x"]}, "tools\\[0\\] must be a mapping, got 'x'"),
    ({"prompt": "a", "tools": [{"name": "f", "description": 1}]}, "tools\\[0\\].description must"),
    ({"prompt": "a", "tools": [{"name": "f", "parameters": 1}]}, "tools\\[0\\].parameters must be"),
    ({"prompt": "a", "schema": [1]}, "schema must be a mapping, got \\[1\\]"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens must be in"),
    ({"prompt": "a", "max_tokens": 1.0}, "max_tokens must be an integer"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature must be finite"),
    ({"prompt": "a", "temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"prompt": "a", "temperature": [0.5]}, "temperature must be a number, got \\[0.5\\]"),
    ({"prompt": "a", "temperature": None}, "temperature must be a number, got None"),
    ({"prompt": "a", "temperature": True}, "temperature must be a number, got True"),
    ({"prompt": "a", "top_p": [0.5]}, "top_p must be a number, got \\[0.5\\]"),
    ({"prompt": "a", "top_k": [5]}, "top_k must be a number, got \\[5\\]"),
    ({"prompt": "a", "top_k": 5.0}, "top_k must be integers"),
    ({"prompt": "a", "min_p": np.array([0.5])}, "min_p must be a number, got array"),
    ({"prompt": "a", "top_p": 0}, "top_p must be in"),
    ({"prompt": "a", "top_k": 0}, "top_k must be"),
    ({"prompt": "a", "min_p": 2}, "min_p must be in"),
    ({"prompt": "a", "seed": -1}, "seed must be in"),
    ({"prompt": "a", "seed": None}, "seed must be an integer"),
    ({"prompt": "a", "stop": [""]}, "stop must be non-empty strings"),
    ({"prompt": "a", "stop": 3}, "stop must be"),
    ({"prompt": "a", "stop": b"ab"}, "stop must be a list of strings, got b'ab'"),
    ({"prompt": "a", "stop": ["\ud800"]}, "stop must be non-empty strings of whole characters"),
    ({"prompt": "a", "stop_token_ids": b"ab"}, "stop_token_ids must be a list, got b'ab'"),
    ({"prompt": "a", "golden_token_ids": ""}, "golden_token_ids must be a list, got ''"),
    (
        {"prompt": "a", "temperature": 10**400},
        r"temperature must be a finite number, got 1000.*\.\.",
    ),
    ({"prompt": "a", "top_k": 2**64 - 1}, "top_k must be -1 .all. or >= 1, got"),
    ({"prompt": "a", "top_k": 2**63}, "top_k must be -1 .all. or >= 1, got 9223372036854775807"),
    ({"prompt": "a", "effort": np.array([1, 2])}, "effort must be one of .* got array"),
    ({"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "a token id must be an integer, got '1111"),
    ({"prompt": "a", "grammar": {"kind": "json", "schema": 3}}, "grammar: schema must be a JSON"),
    ({"prompt": "a", "grammar": {"kind": "xml", "schema": ""}}, "grammar: kind must be one of"),
    ({"prompt": "a", "grammar": {"kind": "json", "x": 1}}, "grammar has the unknown key 'x'"),
    ({"prompt": "a", "stop_token_ids": [4000]}, "stop_token_ids must lie in 0..2047"),
    ({"prompt": "a", "stop_token_ids": "ab"}, "stop_token_ids must be an integer"),
    ({"prompt": "a", "thinking": 1}, "thinking must be true or false"),
    ({"prompt": "a", "ignore_eos": None}, "ignore_eos must be true or false, got None"),
    ({"prompt": "a", "logit_bias": 5}, "logit_bias must be a mapping of token ids to numbers"),
    ({"prompt": "a", "logit_bias": "5"}, "logit_bias must be a mapping of token ids to numbers"),
    ({"prompt": "a", "logit_bias": [5]}, "logit_bias must be a mapping or pairs"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias: a token id must be an integer, got 'x'"),
    ({"prompt": "a", "logit_bias": {True: 1}}, "logit_bias: a token id must be an integer, got T"),
    ({"prompt": "a", "logit_bias": {-1: 1}}, "logit_bias: a token id must be in"),
    ({"prompt": "a", "logit_bias": {5: "1"}}, "logit_bias of token 5 must be a number, got '1'"),
    ({"prompt": "a", "logit_bias": {5: float("-inf")}}, "got -inf; banned_token_ids rules a token"),
    ({"prompt": "a", "logit_bias": {5: float("nan")}}, "logit_bias of token 5 must be in"),
    ({"prompt": "a", "logit_bias": {5: 1, "5": 2}}, "logit_bias must name a token once, got tok"),
    ({"prompt": "a", "logit_bias": {2048: 1}}, "logit_bias must lie in 0..2047, got 2048"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids must not be empty"),
    ({"prompt": "a", "allowed_token_ids": 5}, "allowed_token_ids must be a list, got 5"),
    ({"prompt": "a", "allowed_token_ids": [2048]}, "allowed_token_ids must lie in 0..2047"),
    ({"prompt": "a", "banned_token_ids": None}, "banned_token_ids must be a list, got None"),
    ({"prompt": "a", "banned_token_ids": [-1]}, "banned_token_ids must be in"),
    ({"prompt": "a", "banned_token_ids": [2048]}, "banned_token_ids must lie in 0..2047"),
    (
        {"prompt": "a", "allowed_token_ids": [5], "banned_token_ids": [6, 5]},
        "allowed_token_ids without banned_token_ids must not be empty",
    ),
    ({"prompt": "a", "banned_token_ids": list(range(2048))}, "nothing could be said"),
    (
        {"prompt": "a", "allowed_token_ids": [1, 7], "stop_token_ids": [7], "min_tokens": 1},
        r"min_tokens=1 needs a token .* got only \[1, 7\]",
    ),
    ({"prompt": "a", "presence_penalty": 2e9}, "presence_penalty must be in"),
    ({"prompt": "a", "frequency_penalty": float("nan")}, "frequency_penalty must be in"),
    ({"prompt": "a", "frequency_penalty": [1.0]}, "frequency_penalty must be a number"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty must be in"),
    ({"prompt": "a", "repetition_penalty": float("inf")}, "repetition_penalty must be in"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens must be in"),
    ({"prompt": "a", "min_tokens": 8}, "min_tokens must be at most max_tokens=7, got 8: lower it"),
    ({"prompt": "a", "golden_token_ids": [-2]}, "golden_token_ids must be in"),
    ({"prompt": "a", "golden_token_ids": [2048]}, "golden_token_ids must lie in 0..2047"),
    ({"prompt": "a", "golden_token_ids": [5] * 8}, "at most max_tokens=7 entries, got 8"),
    (
        {"prompt": "a", "golden_token_ids": [5], "grammar": {"kind": "regex", "schema": "a"}},
        "golden_token_ids and grammar cannot be given together",
    ),
    ({"prompt": "a", "effort": "much"}, "effort must be one of"),
    ({"prompt": "\ud800"}, "half a character"),
]


@pytest.mark.parametrize(("prompt", "reason"), REFUSED)
def test_a_bad_prompt_is_refused_with_its_place(prompt, reason):
    with pytest.raises((TypeError, ValueError), match=reason) as caught:
        requests(["fine", prompt])
    assert str(caught.value).startswith("prompts[1]: ")
    assert "row 0" not in str(caught.value)


@pytest.mark.parametrize("key", ["prompt", "messages", "tokens", "id", "schema", "stop", "colour"])
def test_a_deep_value_is_refused_with_its_place(key):
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises((TypeError, ValueError), match=r"^prompts\[0\]") as caught:
        requests([{"prompt": "a", key: deep}])
    assert len(str(caught.value)) < 500


def test_two_prompts_of_one_id_are_refused():
    with pytest.raises(ValueError, match=r"prompts\[1\]: id '0' is also that of prompts\[0\]"):
        requests(["a", {"prompt": "b", "id": "0"}])


@pytest.mark.parametrize("prompts", ["text", b"text", {"prompt": "a"}, 3])
def test_one_prompt_is_not_a_list_of_prompts(prompts):
    with pytest.raises(TypeError, match="must be a list of prompts"):
        requests(prompts)


def test_no_prompts_are_no_requests():
    assert requests([]) == []


def test_token_prompts_are_kept_as_tuples():
    forms = [np.array([3, 5], np.int32), [3, 5], {"tokens": np.array([3, 5])}]
    assert [request.prompt for request in requests(forms)] == [(3, 5)] * 3


@pytest.mark.parametrize(
    ("length", "reply", "message"),
    [
        (290, 11, "together 301, the model is loaded for max_length=300; lower max_tokens to 10"),
        (300, 1, "has 300 tokens and max_tokens is 1: .* shorten it by 1 or more"),
        (350, 1, "shorten it by 51 or more"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_with_the_arithmetic(length, reply, message):
    with pytest.raises(ValueError, match=message):
        requests([[5] * length], Options(max_tokens=reply))
    assert requests([[5] * (LENGTH - reply)], Options(max_tokens=reply))


def test_lines_of_a_prompt_file():
    lines = ['{"prompt": "a"}\n', "\n", '{"tokens": [1, 2], "id": "x"}']
    prompts, places = read_prompt_lines("f.jsonl", lines)
    assert prompts == [json.loads(lines[0]), json.loads(lines[2])]
    assert places == ["f.jsonl:1", "f.jsonl:3"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "f holds no prompts"),
        (["\n", "  \n"], "f holds no prompts"),
        (['{"prompt": "a"}', "{"], "f:2: broken JSON"),
        (["[" * 100_000], "f:1(: broken JSON| is nested too deep)"),
        (["[" * 100_000 + "]" * 100_000], "f:1 is nested too deep"),
        (['"text"'], "f:1: expected an object .* got str"),
        (['{"prompt": "a", "prompt": "b"}'], "f:1: broken JSON: key 'prompt' appears twice"),
    ],
)
def test_a_bad_prompt_file_is_refused_with_its_line(lines, message):
    with pytest.raises(ValueError, match=message):
        read_prompt_lines("f", lines)
