"""Drafts, and what rejected ones leave behind."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_jax.determinism import Move, Table, Turn, equality, feeding, serving
from tests import every_role
from tests.invariance import setups

VERIFY = 6  # rows of the widest verification: the anchor and a block of drafts


def spoiled(setup):
    """An unwritten cache of the shape that the checks use."""
    return feeding.garbage(setup.model, serving.SLOTS, 2 * setup.capacity)


@pytest.mark.exhaustive  # tests/test_rounds.py has rounds in any company
@pytest.mark.parametrize("dtype", setups.TWINS)
def test_drafts_do_not_depend_on_rejected_tokens_or_neighbours(dtype):
    setup = setups.illustrated(dtype)
    model = setup.model
    slots, anchors = [3, 0, 1], [5, 6, 7]
    playing = Table(setup, [0, 1, 2], slots, spoiled(setup), {serving.MANY: feeding.step})
    turn = Turn((Move(1, 4, 4, 3), Move(2, 5, 1, 1), Move(0, 6, 2, 1)), (0, 1, 0))
    for pair in playing.play([turn] * 7):
        assert not equality.different(pair.got, pair.want), pair.where
    done = [len(setup.references[n].text) - playing.left(n) for n in range(3)]
    together = every_role.draft_of(model, playing.cache, slots, done, anchors)
    for number in range(3):
        prompt = [feeding.piece(0, setup.references[number].text, 0, done[number])]
        _, cache = feeding.feed(model, spoiled(setup), prompt, serving.MANY)
        where = [-1, 0, -1], [0, done[number], 0], [9, anchors[number], 8]
        alone = every_role.draft_of(model, cache, *where)
        for name in ("tokens", "logits", "base", "confidence"):
            left, right = getattr(together, name)[number], getattr(alone, name)[1]
            assert not equality.unequal(left, right).any(), (name, number)


@pytest.mark.parametrize("dtype", setups.TWINS)
@pytest.mark.parametrize("rows", [VERIFY, VERIFY + 3])
def test_rejecting_more_rows_than_the_slack_loses_state(dtype, rows):
    """At the cache's slack nothing is lost. Three rows more and every ring has been overrun."""
    setup = setups.setup(dtype)
    model, source, start = setup.model, setup.references[0].text, 22
    whole = [feeding.piece(0, source, 0, start)]
    _, cache = feeding.feed(model, spoiled(setup), whole, serving.MANY)
    drafted = feeding.piece(0, source, start, start + rows)
    drafted = feeding.wrong(drafted, 1, model.cfg.vocab_size)
    single = [feeding.piece(0, source, start, start + 1)]
    _, after = feeding.feed(model, cache, [drafted], serving.MANY)
    _, clean = feeding.feed(model, cache, single, serving.MANY)
    got, want = (feeding.visible(model, c, 0, start + 1) for c in (after, clean))
    lost = ["decoder", "draft", "encoder", "history", "pending"] if rows > VERIFY else []
    assert sorted(equality.different(got, want)) == lost


def test_wrong_drafts_are_wrong():
    """Every token from the given number on is another one, within the vocabulary."""
    model = every_role.model("float32")
    good = feeding.piece(1, every_role.text(model.cfg, 30, 4), 5, 12)
    for count in range(8):
        bad = feeding.wrong(good, count, model.cfg.vocab_size)
        same = bad.part.tokens == good.part.tokens
        assert np.array_equal(same, np.arange(7) < count)
        assert bad.part.tokens.max() < model.cfg.vocab_size
