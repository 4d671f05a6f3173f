"""What is posted to a device is done in order, by a thread that is never waited for in vain."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from deepinfer_jax.engine import Sizes
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.seats import sampling_of
from deepinfer_jax.engine.watch import Watch
from tests import tiny_model

SIZES = Sizes(slots=2, capacity=32, pages=2, page_tokens=32)
PATIENCE = 30.0  # seconds, on a busy machine


@pytest.fixture
def device():
    made = Device(tiny_model.model(), SIZES, sampling_of([None, None], False), Watch())
    yield made
    made.close()


def noting(name, seen):
    """A change that notes the page table that it finds, and leaves another."""

    def change(state):
        seen.append((name, np.asarray(state.cache.pages).max()))
        cache = dataclasses.replace(state.cache, pages=np.full((2, 1), len(seen), np.int32))
        return state._replace(cache=cache), name

    return change


def test_everything_is_done_in_order_on_what_was_there_before(device):
    seen: list = []
    promises = [device._post(noting(n, seen)) for n in range(20)]
    assert [promise.result(PATIENCE) for promise in promises] == [*range(20)]
    assert seen == [(0, -1), *((n, n) for n in range(1, 20))]
    assert np.asarray(device.state().cache.pages).max() == 20


def test_what_follows_a_failure_fails_too(device):
    seen: list = []

    def failing(state):
        raise ValueError("planted")

    before = device._post(noting(0, seen))
    failed, after = device._post(failing), device._post(noting(1, seen))
    assert before.result(PATIENCE) == 0
    for promise in (failed, after):
        with pytest.raises(ValueError, match="planted"):
            promise.result(PATIENCE)
    assert seen == [(0, -1)]
    with pytest.raises(ValueError, match="planted"):
        device.state()


def test_a_call_that_lasts_keeps_nobody_from_what_is_done(device):
    """What was done before it is told when it begins, not earlier and not when it has ended."""
    gate, begun, held = threading.Event(), threading.Event(), threading.Event()

    def waiting(state):
        held.wait(PATIENCE)
        return state, "first"

    def program():
        begun.set()
        gate.wait(PATIENCE)
        return np.zeros(1)

    first = device._post(waiting)
    second = device._post(lambda state: (state, device._ask(program)))
    assert not first.done()
    held.set()
    assert first.result(PATIENCE) == "first"
    begun.wait(PATIENCE)
    assert not second.done()
    gate.set()
    assert second.result(PATIENCE).tolist() == [0]


def test_an_engine_that_never_truncates_has_no_limits_to_ask_for(device):
    sampling = device.state().sampling
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (None, None, None)
    device.sample(sampling_of([None, None], True))
    assert device.state().sampling.top_p is not None
