"""Masks: what a slot may say, by place, with drafts and without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import cache as caches
from deepinfer_jax import planning, rounds, sampling, steps
from tests import tiny_model
from tests.test_steps import ACTIVE, NUMERICS, PLAIN, TABLES, TOKENS, B, options

SLOTS, SIZE, NEW = 3, 2, 9
PROMPT = np.random.default_rng(4).integers(3, 2048, (SLOTS, 6)).astype(np.int32)
_STATIC = ("cfg", "numerics", "size", "rows", "mode", "steps")
_prefill = jax.jit(steps.prefill, static_argnames=("cfg", "numerics"))
_propose = jax.jit(rounds.propose, static_argnames=("cfg", "numerics", "size", "mode"))
_verify = jax.jit(rounds.verify, static_argnames=("cfg", "numerics", "rows"))
_decode_many = jax.jit(rounds.decode_many, static_argnames=_STATIC)


def allowed(index, vocab: int) -> np.ndarray:
    """A rule of three classes of tokens that take turns, each slot in its own phase: [..., V]."""
    slot = np.arange(SLOTS).reshape((SLOTS,) + (1,) * (np.ndim(index) - 1))
    phase = (np.asarray(index) + slot) % 3
    return np.arange(vocab) % 3 == phase[..., None]


def started(mask: np.ndarray):
    """First tokens and the cache after the prompts, at a temperature where noise decides."""
    model = tiny_model.model()
    chosen = jax.device_put(di.make_sampling(SLOTS, 30.0, seeds=range(SLOTS)))
    cache = di.init_cache(model.cfg, model.numerics, SLOTS, 32)
    rows = di.batch_rows(PROMPT, np.full(SLOTS, PROMPT.shape[1], np.int32))
    first, cache = _prefill(
        model.params, model.tables, rows, cache, chosen, model.cfg, model.numerics, mask=mask
    )
    return model, chosen, first.token, cache


def by_place(drafted: bool) -> tuple[list[list[int]], int]:
    """Replies under the rule, and how many drafts were right."""
    vocab = tiny_model.model().cfg.vocab_size
    n = SIZE if drafted else 0
    ends = np.full(SLOTS, PROMPT.shape[1])
    model, chosen, newest, cache = started(allowed(ends, vocab))
    replies, right = [[token] for token in newest.tolist()], 0
    active, full = jnp.ones(SLOTS, bool), jnp.full((SLOTS,), n)
    given = (model.params, model.tables)
    sizes = (model.cfg, model.numerics)
    while min(map(len, replies)) < NEW:
        place = np.asarray(cache.lengths)[:, None] + 1 + np.arange(n + 1)
        mask = allowed(place, vocab)
        drafts = jnp.zeros((SLOTS, 0), jnp.int32)
        if drafted:
            running = di.Running(newest, active, full, jnp.full((SLOTS, 1), -1))
            made = _propose(*given, running, cache, chosen, *sizes, size=n, mask=mask[:, :n])
            drafts = made.tokens
            assert np.take_along_axis(mask[:, :n], np.asarray(drafts)[..., None], axis=2).all()
        seen, cache = _verify(
            *given, newest, drafts, full, active, cache, chosen, *sizes, mask=mask
        )
        hits = sampling.accepted(seen.token, drafts, full)
        for slot, count in enumerate(hits.tolist()):
            replies[slot] += seen.token[slot, : count + 1].tolist()
        right += int(hits.sum())
        newest = jnp.take_along_axis(seen.token, hits[:, None], axis=1)[:, 0]
        cache = dataclasses.replace(cache, lengths=cache.lengths + hits + 1)
    return [reply[:NEW] for reply in replies], right


@pytest.mark.exhaustive  # tests/engine/test_structured.py shows it in the engine
def test_a_rule_by_place_holds_with_and_without_drafts():
    plain, _ = by_place(drafted=False)
    drafted, right = by_place(drafted=True)
    assert drafted == plain
    assert right > 0
    start = PROMPT.shape[1]
    for slot, reply in enumerate(plain):
        assert [token % 3 for token in reply] == [(start + k + slot) % 3 for k in range(NEW)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_a_set_for_the_whole_reply_holds_in_many_rounds(mode):
    vocab = tiny_model.model().cfg.vocab_size
    mask = allowed(np.zeros(SLOTS, int), vocab)
    found = []
    for size in (0, SIZE):
        model, chosen, newest, cache = started(mask)
        left = jnp.full((SLOTS,), NEW)
        running = di.Running(newest, left > 0, left, jnp.full((SLOTS, 1), -1))
        made, *_ = _decode_many(
            model.params, model.tables, running, cache, chosen, model.cfg, model.numerics,
            steps=NEW, size=size, mask=mask, schedule=planning.Lengths(np.int32(size)), mode=mode,
        )  # fmt: skip
        emitted, tokens = np.asarray(made.emitted), np.asarray(made.sampled.token)
        found.append([tokens[:, slot][emitted[:, slot]].tolist() for slot in range(SLOTS)])
    for reply in (*found[0], *found[1]):
        assert len(reply) == NEW
    for slot in range(SLOTS):
        assert all(token % 3 == slot for replies in found for token in replies[slot])
    if mode == "coupled":
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (np.ones((B, PLAIN.vocab_size)), r"\(3, 131\) or \(3, 2, 131\).*float64"),
        (np.ones((B, PLAIN.vocab_size - 1), bool), "bool of \\(3, 130\\)"),
        (np.ones((B, 3, PLAIN.vocab_size), bool), "bool of \\(3, 3, 131\\)"),
    ],
)
def test_masks_that_do_not_fit(mask, wanted):
    cache = caches.init_cache(PLAIN, NUMERICS, B, 24)
    drafts = jnp.zeros((B, 1), jnp.int32)
    with pytest.raises(ValueError, match=wanted):
        rounds.verify(
            {}, TABLES, TOKENS, drafts, TOKENS, ACTIVE, cache, options(B), PLAIN, NUMERICS,
            mask=mask,
        )  # fmt: skip
