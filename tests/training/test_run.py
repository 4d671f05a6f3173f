"""A run from corpus to model folder, and its parts on the host."""

import argparse
import dataclasses
import functools
import json
import shutil
import threading
import time

import jax
import numpy as np
import pytest

from deepinfer_jax import checkpoint, loading, resources, tables
from deepinfer_jax.training import dataset, run, stream
from tests.training.small_training import CONFIG

CONTEXT = 128


def test_clock_goes_by_steps_or_by_time():
    by_steps = run.Clock(steps=4, until=float("inf"), step=3)
    assert by_steps.progress() == 0.75
    by_time = run.Clock(steps=4, until=0.0, step=0)
    assert by_time.progress() == 1.0


@pytest.mark.parametrize("preset", ["spark-tiny", "tiny-s"])
def test_presets_fit_the_shipped_tokenizer(preset):
    cfg, table = run.load_preset(preset)
    assert cfg.vocab_size == dataset.load_tokenizer().get_vocab_size(with_added_tokens=True)
    assert table.positions == dataset.CONTEXT


def test_a_stream_repeats_and_ends_with_a_reason(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    one, two = (stream.Stream(5, 3 * CONTEXT, CONTEXT, tmp_path / name) for name in "ab")
    np.testing.assert_array_equal(one.take(3), two.take(3))
    with pytest.raises(EOFError, match="--tokens"):
        one.take(1)


def test_a_stream_writes_few_parts_ahead(tmp_path, monkeypatch):
    written, full = [], threading.Event()

    def write(command, **_):
        file = command[command.index("--out") + 1]
        np.save(file, np.full((1, CONTEXT), len(written), np.uint16))
        written.append(file)
        if len(written) > stream.AHEAD:
            full.set()

    monkeypatch.setattr(stream.subprocess, "run", write)
    monkeypatch.setattr(stream, "PART_TOKENS", CONTEXT)
    made = stream.Stream(5, 9 * CONTEXT, CONTEXT, tmp_path)
    assert full.wait(10)
    time.sleep(0.05)
    assert len(written) == stream.AHEAD + 1  # the last one waits for its place
    np.testing.assert_array_equal(made.take(9)[:, 0], range(9))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_compile")
def test_a_run_writes_a_folder_that_loads(tmp_path, monkeypatch):
    vocabulary = dataset.load_tokenizer().get_vocab_size(with_added_tokens=True)
    token_map = np.fromfile(resources.model_folder("spark-tiny") / "engram_token_map.bin", "<i4")
    cfg = dataclasses.replace(
        CONFIG, vocab_size=vocabulary, engram_compressed_vocab_size=int(token_map.max()) + 1,
        num_hidden_layers=2, compress_ratios=(0, 1, 0), kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,), candidate_source_layer_id=-1, dspark_target_layer_ids=(1,),
    )  # fmt: skip
    table = tables.make_tables(cfg, token_map, CONTEXT)
    monkeypatch.setattr(run, "load_preset", lambda _: (cfg, table))
    monkeypatch.setattr(run, "Plan", functools.partial(run.Plan, context=CONTEXT))
    options = argparse.Namespace(
        preset="spark-tiny", out=tmp_path / "out", resume=None, fresh=False, stage="both", rows=1,
        tokens=16 * CONTEXT, peak=3e-3, seed=1, objective="coupled",
        backbone_until=np.inf, draft_until=np.inf,
    )  # fmt: skip
    run.train(options)
    model = loading.load(options.out)
    assert model.cfg == cfg
    for name, fields in (("backbone", "loss answer load"), ("draft", "loss acceptance")):
        lines = (options.out / f"{name}.jsonl").read_text("utf-8").splitlines()
        assert set(fields.split()) <= set(json.loads(lines[-1])), name
    _exchange_heads(options, tmp_path / "copy")


def _exchange_heads(options, copy):
    """Stage 2 on the model that was written: new heads, and nothing else is new."""
    shutil.copytree(options.out, copy, ignore=shutil.ignore_patterns("masters-*"))
    again = argparse.Namespace(**vars(options))
    again.resume, again.fresh, again.stage, again.out = copy, True, "draft", copy / "out"
    run.train(again)
    cfg = loading.load(copy).cfg
    before, after = (checkpoint.load_params(folder, cfg) for folder in (copy, again.out))
    equal = jax.tree.map(lambda x, y: bool((x == y).all()), before, after)
    assert not all(jax.tree.leaves(equal.pop("draft")))
    assert all(jax.tree.leaves(equal))
