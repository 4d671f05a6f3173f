"""How long the device waited, against a simulated one that knows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.engine import watch
from deepinfer_jax.engine.watch import Watch


@dataclasses.dataclass(eq=False)
class Made:
    """What a program returns: there at a time of the simulation."""

    done: float


class Device:
    """One after the other, each `cost` seconds from when it was asked for or could begin."""

    def __init__(self, monkeypatch):
        self.now = self.free = self.idle = 0.0
        self.first = True
        monkeypatch.setattr(watch, "_ready", lambda value: self.now >= value.done)
        monkeypatch.setattr(watch.jax, "device_get", self.get)

    def call(self, cost: float, overhead: float) -> Made:
        self.now += overhead
        if not self.first:
            self.idle += max(0.0, self.now - self.free)
        self.first = False
        self.free = max(self.free, self.now) + cost
        return Made(self.free)

    def get(self, made: Made) -> Made:
        self.now = max(self.now, made.done)
        return made


SECONDS = st.floats(0, 3).map(lambda x: round(x, 2))
STEPS = st.lists(st.tuples(SECONDS.map(lambda x: x + 0.01), SECONDS, SECONDS), min_size=1)


@given(steps=STEPS, ahead=st.integers(0, 2))
def test_the_idle_time_is_never_too_small_and_exact_where_the_host_waits(steps, ahead):
    """Steps of (device, host after reading, host within the call) seconds, some asked ahead."""
    with pytest.MonkeyPatch.context() as patch:
        device = Device(patch)
        seen, flights, late = Watch(lambda: device.now), [], False
        for cost, work, overhead in steps:
            flights.append(seen.ask(device.call, cost, overhead))
            late |= any(device.now > each.done for each in flights[:-1])
            while len(flights) > ahead:
                late |= device.now > flights[0].done  # it was ready before it was read
                seen.read(flights.pop(0))
                device.now += work
                late |= any(device.now > each.done for each in flights)
        for made in flights:
            seen.read(made)
        assert seen.idle_s >= device.idle - 1e-9
        assert seen.idle_s <= seen.seconds + 1e-9
        if not late:
            assert seen.idle_s == pytest.approx(device.idle)


def test_a_call_that_does_its_work_itself_is_no_idle_time(monkeypatch):
    """As of small programs on a CPU: results are there when the call returns."""
    device = Device(monkeypatch)
    seen = Watch(lambda: device.now)

    def call(cost):
        device.now += cost
        return Made(device.now)

    seen.ask(call, 5.0)
    device.now += 1.0
    seen.ask(call, 7.0)
    assert seen.idle_s == 1.0
    assert seen.seconds == 8.0


def test_nobodys_time_does_not_count(monkeypatch):
    device = Device(monkeypatch)
    seen = Watch(lambda: device.now)
    for _ in range(2):
        seen.read(seen.ask(device.call, 2.0, 0.0))
        seen.rest()
        device.now += 100.0
    assert (seen.idle_s, seen.seconds) == (0.0, 4.0)


def test_compiling_is_neither_idle_nor_work():
    seen, program = Watch(), jax.jit(lambda x: x + 1)
    for size in (2, 3):
        seen.read(seen.ask(program, jnp.zeros(size)))
    assert seen.compile_s > 0
    assert seen.compiled == 2
    assert seen.seconds < seen.compile_s + 1
    assert seen.idle_s <= seen.seconds


def test_arrays_that_were_given_away_are_not_waited_for():
    program = jax.jit(lambda x: x + 1, donate_argnums=0)
    seen = Watch()
    made = seen.ask(program, jnp.zeros(3))
    made = seen.ask(program, made)
    made.delete()
    assert float(seen.read(seen.ask(program, jnp.zeros(3)))[0]) == 1
