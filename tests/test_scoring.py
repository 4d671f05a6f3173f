"""Scores of finished sequences: the sampler's bits, whatever stands beside, and the best tokens."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepinfer_jax as di
from deepinfer_jax import scoring
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.images import ImageSpan
from tests import sighted, tiny_model

TOP = 5  # computed as 8


@functools.cache
def replies() -> list[di.Result]:
    """Of prompts of several lengths, one of them a single token."""
    prompts = [{"tokens": [(13 * i) % 2048 for i in range(n)], "id": n} for n in (1, 7, 33)]
    return di.generate(tiny_model.model(), prompts, max_tokens=9, seed=4, batch_size=1)


def sequences() -> list[tuple[int, ...]]:
    return [tuple(reply.prompt) + reply.tokens for reply in replies()]


@functools.cache
def together() -> list[scoring.Scored]:
    return scoring.score_sequences(tiny_model.model(), sequences(), top=TOP, routed=True)


def same(one: scoring.Scored, other: scoring.Scored) -> None:
    for name, values in dataclasses.asdict(one).items():
        np.testing.assert_array_equal(bits(values), bits(getattr(other, name)), err_msg=name)


def test_scores_of_a_reply_are_the_samplers_bits():
    for reply, scored in zip(replies(), together(), strict=True):
        own = scored.logprobs[reply.prompt_tokens - 1 :]
        np.testing.assert_array_equal(bits(own), bits(np.float32(reply.logprobs)))


def test_shapes_follow_the_sequences():
    cfg = tiny_model.model().cfg
    for tokens, scored in zip(sequences(), together(), strict=True):
        assert scored.logprobs.shape == (len(tokens) - 1,)
        assert scored.top_ids.shape == scored.top_logprobs.shape == (len(tokens) - 1, TOP)
        assert scored.routed is not None
        assert scored.routed.shape == (len(tokens), cfg.num_hidden_layers, cfg.num_experts_per_tok)
        assert ((scored.routed >= 0) & (scored.routed < cfg.n_routed_experts)).all()


def test_the_best_tokens_are_in_total_order_and_hold_the_chosen_one_in_its_bits():
    held = 0
    for tokens, scored in zip(sequences(), together(), strict=True):
        order = np.lexsort((scored.top_ids, -scored.top_logprobs))
        assert (order == np.arange(TOP)).all()
        places, columns = np.nonzero(scored.top_ids == np.array(tokens[1:])[:, None])
        held += len(places)
        chosen = scored.top_logprobs[places, columns]
        np.testing.assert_array_equal(bits(chosen), bits(scored.logprobs[places]))
        outside = np.setdiff1d(np.arange(len(tokens) - 1), places)
        assert (scored.logprobs[outside] <= scored.top_logprobs[outside, -1]).all()
    assert held


def test_scores_do_not_depend_on_the_company_or_the_order():
    again = scoring.score_sequences(
        tiny_model.model(), [*sequences()[::-1], [5] * 64], top=TOP, routed=True
    )
    for one, other in zip(together(), again[2::-1], strict=True):
        same(one, other)


@pytest.mark.exhaustive
def test_scores_do_not_depend_on_the_width_the_batch_or_how_many_are_named():
    model, (one, *_) = tiny_model.model(), [together()[2]]
    tokens = sequences()[2]
    for top in (1, 700):
        (alone,) = scoring.score_sequences(model, [tokens], top=top, routed=True)
        count = min(top, TOP)
        np.testing.assert_array_equal(bits(alone.logprobs), bits(one.logprobs))
        np.testing.assert_array_equal(alone.routed, one.routed)
        for name in ("top_ids", "top_logprobs"):
            np.testing.assert_array_equal(
                bits(getattr(alone, name)[:, :count]), bits(getattr(one, name)[:, :count])
            )
    longer = scoring.score_sequences(model, [tokens + (9,) * 60, tokens + (7,) * 61])
    for scored in longer:
        np.testing.assert_array_equal(bits(scored.logprobs[: len(tokens) - 1]), bits(one.logprobs))


def test_all_named_tokens_have_probability_one_together():
    """By the plain function on logits: nothing is left out, nothing counted twice."""
    logits = np.random.default_rng(0).normal(size=(3, 11)).astype(np.float32)
    ids, values = jax.jit(di.sampling.top_logprobs, static_argnums=1)(logits, 11)
    assert (np.sort(ids) == np.arange(11)).all()
    np.testing.assert_allclose(np.exp(values).sum(-1), 1, atol=1e-6)


@given(sizes=st.lists(st.tuples(st.integers(1, 700), st.booleans()), max_size=40))
@settings(max_examples=50)
def test_every_sequence_has_one_place_in_few_shapes(sizes):
    batches = list(scoring._batches(sizes, 600))
    numbers = [n for *_, part in batches for n in part if n >= 0]
    assert sorted(numbers) == list(range(len(sizes)))
    for width, shows, part in batches:
        assert width <= 600
        real = [sizes[n] for n in part if n >= 0]
        assert all((min(length, 600) <= width, seen) == (True, shows) for length, seen in real)
        assert len(part) == 1 or len(part) * width <= scoring.ROWS
    for kind in (False, True):
        assert len({(w, len(part)) for w, shows, part in batches if shows == kind}) <= 5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[1], []],), TypeError, r"sequences\[1\] must be a non-empty list"),
        ((["text"],), TypeError, r"got 'text'; `model\.tokenizer` makes them"),
        (([[1.5]],), TypeError, "must be a non-empty list of token ids"),
        (([[2048]],), ValueError, r"outside of 0\.\.2047"),
        (([[-1]],), ValueError, r"outside of 0\.\.2047"),
        (([[1] * 1025],), ValueError, "1025 tokens, the model is loaded for max_length=1024"),
        (([[1]], 2049), ValueError, r"top must lie in 0\.\.2048"),
        (([[1]], True), TypeError, "top must be an integer"),
    ],
)
def test_what_cannot_be_scored_is_refused(arguments, error, message):
    sequences, top = (*arguments, 0)[:2]
    with pytest.raises(error, match=message):
        scoring.score_sequences(tiny_model.model(), sequences, top=top)


def test_images_that_do_not_fit_are_refused():
    model, image = sighted.glance(), ImageSpan(2, sighted.picture(2, 3, 0))  # 4 places
    for images, says in (
        ([[], []], "a list for each of 1 sequences, got 2"),
        ([[image]], r"images\[0\] must .* the 5 tokens .* one at 2 of 4 tokens"),
        ([[ImageSpan(0, image.picture), image]], "got one at 2 of 4"),
    ):
        with pytest.raises(ValueError, match=says):
            scoring.score_sequences(model, [[5] * 5], images=images)
    with pytest.raises(ValueError, match="no vision tower"):
        scoring.score_sequences(tiny_model.model(), [[5] * 9], images=[[image]])


def test_nothing_is_scored_without_sequences():
    assert scoring.score_sequences(tiny_model.model(), []) == []
