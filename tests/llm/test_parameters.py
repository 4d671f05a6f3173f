"""`SamplingParams`: every field is checked, other names mean the same, and it becomes `Options`."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.grammar import Grammar
from deepinfer_jax.llm import SamplingParams, sample_seed
from deepinfer_jax.llm.parameters import MOST_TOP
from deepinfer_jax.requests import Options

NAN, INF = math.nan, math.inf
SO_ARGS = {"schema_type": "regex", "schema": "[0-9]+"}
# field -> what it must refuse, the kind of error being told apart below
REFUSED = {
    "n": [0, -1, 1.0, True, None, 2**20 + 1],
    "temperature": [-0.1, NAN, INF, "1", True, None],
    "top_p": [0, 1.1, NAN, True, "1"],
    "top_k": [0, -2, 1.5, True, 2**31],
    "min_p": [-0.1, 1.1, NAN, True],
    "max_tokens": [-1, 2**31, 1.0, True],
    "min_tokens": [-1, 17, 1.0, True],
    "stop": [1, [""], [1]],
    "stop_token_ids": [1, "1", [-1], [1.0], [True], [2**31]],
    "ignore_eos": [0, None, "yes"],
    "logit_bias": [5, {1: NAN}, {1: INF}, {-1: 1.0}, {1.5: 1}, {1: "a"}, {True: 1}],
    "allowed_token_ids": [5, [], [-1], [1.0], "12"],
    "banned_token_ids": [5, [-1], [True]],
    "presence_penalty": [NAN, INF, "1", True],
    "frequency_penalty": [NAN, -INF, "1", True],
    "repetition_penalty": [0, -1, NAN, INF, True],
    "golden_token_ids": [5, [-2], [1.0], [1] * 17],
    "so_args": [5, {}, {"schema_type": "xml", "schema": ""}, {**SO_ARGS, "extra": 1}],
    "seed": [1.0, True, "1"],
    "prompt_logprobs": [1, 0, None],
    "top_logprobs": [-1, MOST_TOP + 1, 1.0, True, None],
    "logprob_mode": ["Raw", "", None, 1],
    "return_routed_experts": [1, None],
    "seq_seed": [1.0, True, "1"],
    "first_n_token_no_eos": [-1, 2, True, 1.0, None],
    "logprobs": [-1, MOST_TOP + 1, 1.0, "1"],
}


def test_every_field_has_something_to_refuse():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    aliases = {"seq_seed", "first_n_token_no_eos", "logprobs"}
    assert set(REFUSED) == fields | aliases


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, each in REFUSED.items() for v in each])
def test_what_a_field_must_not_hold_is_refused_by_name(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        SamplingParams(**{name: value})


def test_defaults_are_the_published_ones():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, -1, 16)
    assert (params.n, params.seed, params.top_logprobs, params.prompt_logprobs) == (1, None, 0, 0)
    assert params.options(5) == Options(max_tokens=16)


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        ({"seq_seed": 7}, {"seed": 7}),
        ({"seq_seed": -1}, {"seed": 2**64 - 1}),
        ({"seed": 2**64 + 3}, {"seed": 3}),
        ({"first_n_token_no_eos": 1}, {"min_tokens": 1}),
        ({"first_n_token_no_eos": 1, "min_tokens": 4}, {"min_tokens": 4}),
        ({"logprobs": 5}, {"top_logprobs": 5}),
        ({"logprobs": True}, {}),
        ({"max_tokens": 0}, {"max_tokens": 1}),
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"stop": None, "stop_token_ids": None, "banned_token_ids": None}, {}),
        ({"logit_bias": None, "golden_token_ids": None}, {}),
        ({"logit_bias": {"3": 1}}, {"logit_bias": {3: 1.0}}),
        ({"so_args": SO_ARGS}, {"so_args": Grammar("regex", "[0-9]+")}),
    ],
)
def test_other_names_and_forms_mean_the_same(other, ours):
    assert SamplingParams(**other) == SamplingParams(**ours)
    assert hash(SamplingParams(**other)) == hash(SamplingParams(**ours))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 1, "seq_seed": 1}, "two names of one thing"),
        ({"logprobs": 2, "top_logprobs": 3}, "two names of one number"),
        ({"golden_token_ids": [1], "so_args": SO_ARGS}, "cannot be given together"),
    ],
)
def test_what_contradicts_itself_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_every_shared_field_reaches_the_options():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logit_bias": {5: -2.0},
        "allowed_token_ids": [5, 6, 7],
        "banned_token_ids": [6],
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "golden_token_ids": [5, -1],
    }
    assert SamplingParams(**given).options(3) == Options(**given)
    assert SamplingParams(so_args=SO_ARGS).options(3).grammar == Grammar("regex", "[0-9]+")
    others = {"seed", "thinking", "effort", "grammar"}
    assert {field.name for field in dataclasses.fields(Options)} == set(given) | others


def test_no_limit_is_the_room_there_is():
    assert SamplingParams(max_tokens=None).options(321).max_tokens == 321


def test_values_can_be_changed_kept_and_sent():
    params = SamplingParams(seed=5, logit_bias={3: 1.0}, so_args=SO_ARGS, first_n_token_no_eos=1)
    assert dataclasses.replace(params, seed=6).seed == 6
    assert dataclasses.replace(params) == params
    assert pickle.loads(pickle.dumps(params)) == params


@given(seed=st.integers(0, 2**64 - 1))
def test_seeds_of_samples_are_seeds_and_differ(seed):
    seeds = [sample_seed(seed, index) for index in range(50)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 50
    assert all(0 <= each < 2**64 for each in seeds)
