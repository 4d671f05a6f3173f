"""One loop over all layers: each role is in it once, and the bits are those of layers in a row."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from deepinfer_jax import cache as caches
from deepinfer_jax import params, rows, tables
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, forward, looped, moe
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.numerics import Numerics
from kernels_bridge.building import NoKernelsError, find_compiler
from tests import every_role, small
from tests.test_forward import DEEP

CAPACITY, LENGTHS = 40, (31, 25)
EVERY_ROLE = ModelConfig.from_dict(json.loads(every_role.CONFIG_FILE.read_text("utf-8")))


def traces(monkeypatch, cfg, numerics, cached=True, **options):
    """How often a forward's tracing comes to attention and to experts."""
    counted = {"attend": 0, "moe": 0}

    def counting(name, real):
        def count(*args, **more):
            counted[name] += 1
            return real(*args, **more)

        return count

    for module, name in ((attention, "attend"), (moe, "moe")):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    batch = jax.eval_shape(
        rows.batch_rows,
        jax.ShapeDtypeStruct((2, 16), np.int32),
        jax.ShapeDtypeStruct((2,), np.int32),
    )
    cache = caches.cache_shapes(cfg, numerics, 2, CAPACITY) if cached else None
    given = params.shapes(cfg), tables.table_shapes(cfg, CAPACITY), batch, cache

    def run(*args):
        length = None if cached else 16
        return forward.forward(*args, cfg, numerics, length=length, **options)

    jax.eval_shape(run, *given)
    return counted


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("cfg", "looks"),
    [(EVERY_ROLE, 5), (small.WINDOW_ONLY, 1), (DEEP, 5)],
    ids=["every role", "windows", "deep"],
)
def test_every_role_is_traced_once(monkeypatch, cfg, looks, cached):
    """Window; full and reuse of each ratio; candidates, reindex: however many layers have it."""
    kinds = {looped._looking(kind) for kind in cfg.kinds()}
    counted = traces(monkeypatch, cfg, Numerics.native(), cached)
    assert counted == {"attend": len(kinds), "moe": 1}
    assert len(kinds) == looks


def test_layers_in_a_row_are_left_to_what_needs_them(monkeypatch):
    """Other forms of the numerics, and what is captured layer by layer."""
    cfg, capture = EVERY_ROLE, Capture(router_load="all")
    counted = traces(monkeypatch, cfg, Numerics.native(), capture=capture)
    assert counted["moe"] == cfg.num_hidden_layers
    for form in ("pallas", "batched", "dense"):
        assert not looped.serves(None, Numerics.native(rows=form))


@pytest.mark.parametrize("form", ["tiled", "ffi"])
def test_the_bits_are_those_of_layers_in_a_row(monkeypatch, form):
    """Hidden rows, taps, experts and the cache after two chunks that wrap the rings."""
    if form == "ffi":
        try:
            find_compiler()
        except NoKernelsError as error:
            pytest.skip(str(error))
    m = every_role.model("bfloat16")
    numerics = dataclasses.replace(m.numerics, rows=form)
    tokens = [every_role.text(m.cfg, length, seed).tokens for seed, length in enumerate(LENGTHS)]
    found = []
    for loops in (True, False):
        monkeypatch.setattr(looped, "serves", lambda *_, loops=loops: loops)
        # A function of its own, so that nothing of the other's tracing is found again.
        run = jax.jit(lambda *args: forward.forward(*args, m.cfg, numerics))
        cache, seen = caches.init_cache(m.cfg, numerics, 2, CAPACITY), []
        for first in (0, 16):
            parts = [
                [(t, slot, at) for at, t in enumerate(row)][first : first + 16]
                for slot, row in enumerate(tokens)
            ]
            flat = [each for part in parts for each in part]
            flat += [(0, -1, 0)] * (32 - len(flat))
            batch = rows.text_rows(*np.array(flat, np.int32).T)
            hidden, cache = run(m.params, m.tables, batch, cache)
            real = np.asarray(batch.real)
            seen += [hidden.output[real], hidden.taps[:, real], hidden.routed[:, real]]
        found.append([*seen, cache])
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_layer_may_have_several_parts_of_its_own(monkeypatch):
    """Engram, then the tap, then compressed KV: each sees what the one before it wrote."""
    cfg = dataclasses.replace(
        small.PLAIN, num_hidden_layers=2, num_nextn_predict_layers=0, compress_ratios=(0, 2),
        kv_source_layer_ids=(1,), index_source_layer_ids=(1,), candidate_source_layer_id=-1,
        engram_layer_ids=(0, 1), engram_num_embeddings=(400, 400), dspark_target_layer_ids=(0, 1),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    token_map = rng.integers(0, cfg.engram_compressed_vocab_size, cfg.vocab_size).astype(np.int32)
    weights, made = params.init(jax.random.key(1), cfg), tables.make_tables(cfg, token_map, 32)
    batch = rows.batch_rows(rng.integers(0, cfg.vocab_size, (2, 16)), np.array([16, 16]))
    found = []
    for loops in (True, False):
        monkeypatch.setattr(looped, "serves", lambda *_, loops=loops: loops)
        run = jax.jit(lambda *given: forward.forward(*given, cfg, Numerics.fp32(), length=16)[0])
        hidden = run(weights, made, batch, None)
        found.append([hidden.output, hidden.taps, hidden.routed])
    jax.tree.map(np.testing.assert_array_equal, *found)
