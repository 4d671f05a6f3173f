"""Lists of tokens in and out: every row has its own options, seed and result."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import params as parameters
from deepinfer_jax import rl
from deepinfer_jax.engine import programs
from tests import tiny_model

# As many prompts as the programs have slots that other tests compile too.
PROMPTS = [[5, 900, 31], [77, 8, 1500, 42, 6], [12], [9, 10], [300, 4, 19, 7]]
SEEDS = [7, 2**63 + 1, 7, 0, 3]
LIMITS = [6, 4, 5, 2, 3]
HEAT = [1.0, 0.7, 0.0, 1.0, 0.9]
SLOTS = len(PROMPTS)


def sample(**changes) -> list[rl.SampledTokens]:
    given = {"seeds": SEEDS, "max_tokens": LIMITS, "temperature": HEAT, "batch_size": SLOTS}
    given |= changes
    return rl.sample_tokens(tiny_model.model(), PROMPTS, **given)


@functools.cache
def made() -> list[rl.SampledTokens]:
    return sample(prompt_logprobs=True)


@pytest.mark.exhaustive
def test_rows_are_those_of_generate():
    """Each with its own options; the end token of the model is none unless it is named."""
    asked = [
        {"tokens": tokens, "seed": seed, "max_tokens": most, "temperature": heat}
        for tokens, seed, most, heat in zip(PROMPTS, SEEDS, LIMITS, HEAT, strict=True)
    ]
    wanted = di.generate(tiny_model.model(), asked, ignore_eos=True, batch_size=SLOTS)
    for got, want in zip(made(), wanted, strict=True):
        assert got.tokens == want.tokens
        assert got.logprobs == want.logprobs
        assert got.logprobs_processed == want.logprobs_processed
        assert got.kept_mass == want.kept_mass
        assert got.stop_reason == want.finish_reason == "length"


def test_prompts_are_scored_where_asked_for():
    scored = di.score_sequences(tiny_model.model(), PROMPTS)
    for got, want in zip(made(), scored, strict=True):
        assert got.prompt_logprobs == tuple(want.logprobs.tolist())
        assert len(got.prompt_logprobs) + 1 in (3, 5, 1, 2, 4)
    assert all(each.prompt_logprobs is None for each in sample(stop_tokens=()))


def test_stop_tokens_of_one_row_end_that_row():
    stops = [[made()[0].tokens[2]], [], [2], [], []]
    ended = sample(stop_tokens=stops)
    assert ended[0].tokens == made()[0].tokens[:3]
    assert [each.stop_reason for each in ended] == ["stop", *["length"] * 4]
    assert ended[1].tokens == made()[1].tokens


def test_new_weights_compile_nothing():
    model = tiny_model.model()
    made()
    before = programs.decode_program._cache_size(), programs.fill_program._cache_size()
    other = parameters.decode(parameters.init(jax.random.key(1), model.cfg))
    assert sample(params=other)[0].tokens != made()[0].tokens
    after = programs.decode_program._cache_size(), programs.fill_program._cache_size()
    assert after == before


def test_a_key_is_a_seed():
    words = np.array([5, 9], np.uint32)
    assert rl.seed_of_key(words) == 5 + (9 << 32)
    key = jax.random.fold_in(jax.random.key(3), 1)
    assert rl.seed_of_key(key) == rl.seed_of_key(jax.random.key_data(key))
    with pytest.raises(TypeError, match="two uint32 words"):
        rl.seed_of_key(np.zeros(4, np.uint32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [1]}, r"seeds must have one entry for each of 5 prompts, got 1"),
        ({"temperature": [1.0]}, r"temperature must have one entry"),
        ({"stop_tokens": [[1]]}, r"stop_tokens must have one entry"),
    ],
)
def test_rows_without_an_entry_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sample(**changes)
