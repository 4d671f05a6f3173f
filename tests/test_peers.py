"""The peers that `bench/gpu_peers.py` measures compute what ours computes."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import params, tables
from deepinfer_jax.cache import init_cache
from deepinfer_jax.model import head
from deepinfer_jax.model.forward import forward
from deepinfer_jax.numerics import Numerics, scores
from deepinfer_jax.rows import text_rows

torch = pytest.importorskip("torch", reason="the peer is written in torch")
BENCH = Path(__file__).parents[1] / "bench"
SLOTS, STEPS = 3, 70
SCRIPTS = ("released", "gpu_peers", "peers.torch_step")


@pytest.fixture(scope="module")
def peers():
    """`bench` on the path, as for its scripts."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCH))
    try:
        yield {name: importlib.import_module(name) for name in SCRIPTS}
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def parts(peers):
    """Config without stored formats, float32 parameters of ours, token map."""
    cfg = dataclasses.replace(peers["released"].slice_config(small=True), quantized=False)
    token_map = np.arange(cfg.vocab_size, dtype=np.int32) % cfg.engram_compressed_vocab_size
    made = params.widen(params.init(jax.random.key(3), cfg))
    return (
        cfg,
        made,
        token_map,
        np.random.default_rng(1).integers(3, cfg.vocab_size, (STEPS, SLOTS)),
    )


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"), donate_argnames="cache")
def ours(made, table, tokens, cache, cfg, numerics):
    rows = text_rows(tokens, jnp.arange(cache.slots, dtype=jnp.int32), cache.lengths)
    hidden, cache = forward(made, table, rows, cache, cfg, numerics)
    cache = dataclasses.replace(cache, lengths=cache.lengths + 1)
    return head.logits(made, hidden.output, numerics), cache


def best(values, count):
    """Ties go to the lower column, as ours do; torch.topk takes whichever. They are common: a score
    of which every head sees nothing is 0.
    """
    value, place = values.sort(stable=True, descending=True)
    return value[:, :count], place[:, :count]


def theirs(peers, parts, **how):
    step = peers["peers.torch_step"]
    cfg, made, token_map, tokens = parts
    weights, experts = step.taken(made, "cpu")
    shape = step.Shape(cfg, SLOTS, STEPS)
    model = step.Model(
        cfg, weights, experts, torch.from_numpy(token_map).long(), shape, best=best, **how
    )
    state = shape.state("cpu", torch.float32)
    return np.stack([model.step(torch.from_numpy(each), state).numpy() for each in tokens])


@pytest.fixture(scope="module")
def expected(parts):
    """Logits [steps, slots, V] of ours, whose index scores are rounded to bfloat16 whatever the
    numerics: two orders of a sum would round to two sides and choose other entries, so not here.
    """
    cfg, made, token_map, tokens = parts
    # Numerics that no other test has, so that nothing compiled here serves another.
    numerics = dataclasses.replace(Numerics.fp32(), index_block=499)
    table = tables.make_tables(cfg, token_map, STEPS)
    cache, found = init_cache(cfg, numerics, SLOTS, STEPS), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "round_to", lambda x, dtype: x)
        for each in tokens:
            logits, cache = ours(made, table, jnp.asarray(each, jnp.int32), cache, cfg, numerics)
            found.append(np.asarray(logits))
    return np.stack(found)


@pytest.mark.parametrize("routed", ["experts_gathered", "experts_grouped"])
def test_the_step_in_torch_is_ours(peers, parts, expected, routed):
    """Float32 and no quantizers: what is left are orders of sums, 4e-6 for logits of 3; asked is
    1e-4 of the largest. Long enough that windows wrap around and layers choose among entries and
    among candidates.
    """
    cfg = parts[0]
    pool = cfg.candidate_topk_blocks * cfg.candidate_block_size
    assert max(2 * cfg.sliding_window, 2 * cfg.index_topk, pool) < STEPS
    got = theirs(peers, parts, routed=getattr(peers["peers.torch_step"], routed))
    size = np.abs(expected).max(-1)
    np.testing.assert_array_less(np.abs(got - expected).max(-1), 1e-4 * size)


# -- the script --------------------------------------------------------------------------------


def test_a_peer_that_cannot_be_had_or_is_too_slow_takes_no_other(peers, tmp_path):
    script = peers["gpu_peers"]
    given = argparse.Namespace(cells=[(2, 64)], steps=1, repeats=1, small=True, seconds=0.01)
    late = script.asked("torch-eager", given, tmp_path / "late")
    assert late["failed"] == "not done within 0.01 seconds"
    assert late["rows"] == []
    if importlib.util.find_spec("flash_mla") is None:
        lacking = script.asked("torch-flashmla", given, tmp_path / "lacking")
        assert (lacking["failed"], lacking["rows"]) == ("not installed: flash_mla", [])


def test_peers_are_compared_with_ours_cell_by_cell(peers):
    def row(batch, *samples):
        return {"batch": batch, "context": 64, "samples_ms": list(samples)}

    answers = [
        {"peer": "ours", "rows": [row(1, 2.0, 9.0, 1.0), row(8, 4.0)]},
        {"peer": "xla", "failed": "not done", "rows": [row(1, 6.0)]},
    ]
    one, eight = peers["gpu_peers"].compared(answers)
    assert one["over_ours"] == {"ours": 1.0, "xla": 3.0}
    assert eight["ms"] == {"ours": 4.0}
