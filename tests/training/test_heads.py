"""Heads for another checkpoint: rows of lessons, and a run from folder to folder."""

import argparse
import itertools
import json
import types

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import checkpoint, planning
from deepinfer_jax.training import draft, heads
from tests import tiny_model

LESSONS = [heads.Lesson((0, 7, 9), (11, 12)), heads.Lesson((0, 8), (13, 14, 15, 1))]


def test_only_replies_are_taught():
    made = heads.padded(LESSONS)
    np.testing.assert_array_equal(made.lengths, [5, 6])
    np.testing.assert_array_equal(made.tokens, [[0, 7, 9, 11, 12, 0], [0, 8, 13, 14, 15, 1]])
    np.testing.assert_array_equal(made.tokens[made.answer], [11, 12, 13, 14, 15, 1])


def test_lessons_fill_whole_windows():
    assert heads.padded(LESSONS, 4).tokens.shape == (2, 8)


def test_batches_bring_every_lesson_before_any_returns():
    taught = heads.padded([heads.Lesson((number,), (number,)) for number in range(6)])
    settings = heads.Settings(rows=4, seed=3)
    batches = itertools.islice(heads.batches(taught, settings), 3)
    seen = np.concatenate([each.tokens[:, 0] for each in batches])
    np.testing.assert_array_equal(np.sort(seen.reshape(2, 6), axis=1), [range(6)] * 2)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_compile")
def test_new_heads_change_drafts_and_nothing_else(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    words = ("one two three", "four five", "six")
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    settings = heads.Settings(steps=3, rows=2, anchors=3, objective=draft.OBJECTIVES["coupled"])
    options = argparse.Namespace(
        model=tiny_model.folder(), prompts=prompts, out=tmp_path / "out", temperature=1.0,
        max_tokens=12, batch_size=3, fresh=False, seed=0,
    )  # fmt: skip
    heads.retrain(options, settings)
    cfg = tiny_model.model().cfg
    before, after = (checkpoint.load_params(path, cfg) for path in (options.model, options.out))
    equal = jax.tree.map(lambda x, y: bool((x == y).all()), before, after)
    moved = not all(jax.tree.leaves(equal.pop("draft")))
    assert moved
    assert all(jax.tree.leaves(equal))
    model = di.load(options.out)
    plain, drafted = (
        di.generate(model, list(words), max_tokens=9, speculative=policy)
        for policy in (planning.OFF, planning.Fixed(cfg.most_drafts))
    )
    assert plain == drafted == di.generate(tiny_model.model(), list(words), max_tokens=9)


def test_a_model_without_drafter_is_refused(tmp_path, monkeypatch):
    bare = types.SimpleNamespace(cfg=types.SimpleNamespace(most_drafts=0))
    monkeypatch.setattr(heads.loading, "load", lambda _: bare)
    options = argparse.Namespace(model=str(tiny_model.folder()))
    with pytest.raises(SystemExit, match="no drafter"):
        heads.retrain(options, heads.Settings())
