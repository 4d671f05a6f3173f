"""The perturbations of programs really happen: caches are given up, programs are read back."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax import cache as caches
from deepinfer_jax.determinism import compilation, feeding, serving
from tests.invariance import setups

HIT = "/jax/compilation_cache/cache_hits"


@pytest.mark.exhaustive
def test_a_donated_cache_is_given_up():
    setup = setups.setup("float32")
    model = setup.model
    shapes = caches.cache_shapes(model.cfg, model.numerics, serving.SLOTS, 2 * setup.capacity)
    cache = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes)
    part = [feeding.piece(0, setup.references[0].text, 0, 3)]
    _, after = feeding.feed(model, cache, part, serving.FEW, program=serving.donated, names=())
    assert cache.window.is_deleted()
    assert not after.window.is_deleted()


@pytest.fixture
def hits():
    """Counts what is read back from a persistent cache."""
    found = []

    def listen(event, **_):
        found.extend([event] if event == HIT else [])

    jax.monitoring.register_event_listener(listen)
    yield found
    jax.monitoring.unregister_event_listener(listen)


def test_a_second_program_is_read_back_and_the_settings_return(hits):
    """The machinery of the check `compilation`, with a program that costs nothing to compile."""
    names = ("jax_compilation_cache_dir", *compilation.SETTINGS)
    before = {name: jax.config.values[name] for name in names}

    def double():
        return jax.jit(lambda x: x * 2)

    with compilation.own_cache() as folder:
        double()(np.float32(1.5))
        written = sorted(path.name for path in Path(folder).iterdir())
        assert written
        assert not hits
        double()(np.float32(1.5))
        assert len(hits) == 1
    assert {name: jax.config.values[name] for name in names} == before
    assert not Path(folder).exists()


def test_fresh_programs_share_nothing(monkeypatch):
    """Each is traced anew; of one function jitted twice JAX would keep the first program."""
    traced = []

    def observe(params, *_):
        traced.append(params)
        return params

    monkeypatch.setattr(feeding, "observe", observe)
    for _ in range(2):
        program = feeding.compiled()
        for _ in range(2):
            program(np.float32(1), *[None] * 6, cfg=None, numerics=None, replay=None)
    assert len(traced) == 2
