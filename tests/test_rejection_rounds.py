"""Rejection through whole rounds: replies have the distribution of the model, token given token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import edits, planning, rounds, sampling
from deepinfer_jax.model import forward, head
from tests import tiny_model
from tests.test_sampling_draws import assert_fits

SLOTS, BATCHES, SIZE, NEW, KEPT = 256, 5, 2, 3, 3
PROMPT = np.random.default_rng(2).integers(3, 2048, 6).astype(np.int32)
HOT = 12.0  # so that three tokens are likely at every place

# What depends on the tokens before; the likeliest are made likelier, or nothing would come twice.
EDITED = {"bias": dict.fromkeys(range(40, 45), 9.0), "frequency": 14.0, "banned": [41],
          "repetition": 1.2, "ends": [44], "least": 2}  # fmt: skip

_prefill = jax.jit(di.prefill, static_argnames=("cfg", "numerics"))
_speculate = jax.jit(rounds.speculate, static_argnames=("cfg", "numerics", "size", "rows", "mode"))


def options(count: int, first: int = 0) -> sampling.Sampling:
    seeds = range(first, first + count)
    return jax.device_put(sampling.make_sampling(count, HOT, top_k=KEPT, seeds=seeds))


def edits_of(replies, asked) -> edits.Edits | None:
    """Of slots that have these replies."""
    if asked is None:
        return None
    vocab = tiny_model.model().cfg.vocab_size
    each = [edits.make_edits(vocab, PROMPT.tolist(), reply, **asked) for reply in replies]
    return jax.tree.map(lambda *x: np.concatenate(x), *each)


def expected(asked) -> dict[tuple[int, ...], float]:
    """Probability of every reply of NEW tokens, from whole sequences without a cache."""
    model = tiny_model.model()

    @jax.jit
    def following(params, tables, tokens, edited):
        """Log-probabilities [B, V] after the last token of tokens [B, S]."""
        count, length = tokens.shape
        rows = di.batch_rows(tokens, jnp.full((count,), length))
        hidden, _ = forward.forward(
            params, tables, rows, None, model.cfg, model.numerics, length=length
        )
        last = hidden.output.reshape(count, length, -1)[:, -1]
        logits = head.logits(params, last, model.numerics)
        own, allowed = edits.edited(logits, edited, jnp.full((count,), length), None)
        return sampling.transform(own, options(count), allowed)

    replies = {(): 1.0}
    for _ in range(NEW):
        starts = list(replies)
        tokens = np.array([[*PROMPT, *start] for start in starts], np.int32)
        edited = edits_of(starts, asked)
        logp = following(model.params, model.tables, tokens, edited)
        p = np.exp(np.asarray(logp, np.float64))
        replies = {
            (*start, int(token)): replies[start] * row[token]
            for start, row in zip(starts, p, strict=True)
            for token in np.flatnonzero(row)
        }
    return replies


def played(first: int, asked) -> list[tuple[int, ...]]:
    """SLOTS replies in rounds that verify none, one or two drafts of a slot."""
    model = tiny_model.model()
    chosen = options(SLOTS, first)
    cache = di.init_cache(model.cfg, model.numerics, SLOTS, 16)
    lengths = np.full(SLOTS, len(PROMPT), np.int32)
    rows = di.batch_rows(np.tile(PROMPT, (SLOTS, 1)), lengths)
    edited = edits_of([()] * SLOTS, asked)
    made, cache = _prefill(
        model.params, model.tables, rows, cache, chosen, model.cfg, model.numerics, edits=edited
    )
    found = [[token] for token in np.asarray(made.token).tolist()]
    left = jnp.full((SLOTS,), NEW - 1)
    edited = edits.committed(edited, made.token[:, None], jnp.ones((SLOTS, 1), bool))
    running = di.Running(made.token, left > 0, left, jnp.full((SLOTS, 1), -1), edited)
    asked = planning.Lengths(np.arange(SLOTS, dtype=np.int32) % 3)
    for _ in range(NEW - 1):
        made, running, cache = _speculate(
            model.params, model.tables, running, cache, chosen, asked, model.cfg, model.numerics,
            size=SIZE, rows=2 * SLOTS, mode="rejection",
        )  # fmt: skip
        tokens, emitted = jax.device_get((made.sampled.token, made.emitted))
        for slot, reply in enumerate(found):
            reply += tokens[slot][emitted[slot]].tolist()
    return [tuple(each) for each in found]


@pytest.mark.exhaustive
@pytest.mark.parametrize("asked", [None, EDITED], ids=["plain", "edited"])
def test_replies_have_the_distribution_of_the_model(asked):
    """Drafts that follow drafts, judged in place, after a cut and after a rejection."""
    want = expected(asked)
    assert len(want) == KEPT**NEW
    found = [each for batch in range(BATCHES) for each in played(batch * SLOTS, asked)]
    counts = np.array([found.count(reply) for reply in want])
    assert counts.sum() == len(found)
    assert_fits(counts, np.array(list(want.values())) * len(found))
