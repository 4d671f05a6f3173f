"""An engine that nobody holds any more has gone: its arrays, and the thread of its device."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import jax
import pytest

import deepinfer_jax as di
from deepinfer_jax.engine import Engine
from tests import tiny_model
from tests.engine.test_engine import SIZES, requests

PATIENCE = 30.0  # seconds, on a busy machine


def held() -> int:
    """Bytes of all arrays on all devices."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def device_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("deepinfer-device")}


@pytest.fixture
def before():
    """(bytes, threads) with the model loaded and nothing else."""
    tiny_model.model()
    gc.collect()
    return held(), device_threads()


def gone(before: tuple[int, set[threading.Thread]]) -> None:
    """What there was `before`, and no more; threads end a moment after their engine."""
    bytes_before, threads_before = before
    assert held() <= bytes_before
    end = time.monotonic() + PATIENCE
    while device_threads() - threads_before and time.monotonic() < end:
        time.sleep(0.01)
    assert not device_threads() - threads_before


def test_an_engine_that_ran_gives_its_memory_back(before):
    engine = Engine(tiny_model.model(), SIZES)
    engine.submit(requests()[3])
    assert held() > before[0] + 50_000  # its cache
    (result,) = [update.result for update in engine.updates() if update.result]
    assert result.tokens
    trace = weakref.ref(engine)
    del engine
    gc.collect()
    assert trace() is None
    gone(before)


def test_an_engine_left_in_the_middle_of_a_reply_does_too(before):
    """Its reader went away: updates were not read to their end."""
    updates = None
    engine = Engine(tiny_model.model(), SIZES)
    engine.submit(requests()[3])
    updates = engine.updates()
    assert next(updates).result is None
    engine.cancel(0)
    del updates, engine
    gone(before)


def test_a_deleted_llm_leaves_nothing_but_the_model(before):
    llm = di.LLM(tiny_model.model())
    with pytest.raises(TypeError, match="sampling_params"):
        llm.generate(["a"], "none")
    del llm
    gone(before)


def test_a_deleted_model_gives_its_weights_back(before):
    model = di.load(tiny_model.folder())
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert held() >= before[0] + weights
    llm = di.LLM(model)
    del model, llm
    gone(before)
