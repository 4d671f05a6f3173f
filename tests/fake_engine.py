"""An engine without a model, for tests of the command: replies that follow from the requests."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator

from deepinfer_jax.engine import StepRecord, Update, Warming
from deepinfer_jax.engine.statistics import Tally
from deepinfer_jax.engine.watch import Watch
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.requests import Request, Result, Timing
from deepinfer_jax.scheduling import Usage


def load(
    name: str, max_length: int | None, rows: str | None, onto: object = None
) -> types.SimpleNamespace:  # fmt: skip
    """Stands for `loading.load`: no weights."""
    return types.SimpleNamespace(
        numerics=Numerics(), confidence_temperatures=(), max_length=256,
        cfg=types.SimpleNamespace(most_drafts=0),
    )  # fmt: skip


def result(request: Request, seconds: float = 0.5) -> Result:
    """A reply that says its seed; only `timing` is not a function of the request."""
    one = (-0.25,)
    return Result(
        request.id, request.prompt, f"It is {request.seed}.", (7,), one, one, (1.0,), ("",),
        "stop", len(request.tokens), request.seed, Numerics().fingerprint(),
        Timing(0.0, seconds, seconds),
    )  # fmt: skip


class FakeEngine:
    """Replies in another order each time, `slots` at work at once.

    fails: ids of requests that end with an error. heard: is called with the number of updates so
    far before each of them.
    """

    slots = 3

    def __init__(self, requests, observer=None, fails=(), heard=None, seed=0):
        self.requests = list(requests)
        self._tally = Tally(Watch(), observer)
        self._observer = observer
        self._fails, self._heard = {*fails}, heard
        self._random = random.Random(seed)
        self._running: list[int] = []
        self._waiting = list(range(len(self.requests)))
        self.warmed = self.drained = False

    def warm_up(self, progress) -> None:
        progress(Warming(0, 1, "nothing"))
        self.warmed = True

    def drain(self) -> None:
        self.drained = True

    def usage(self) -> Usage:
        return Usage(len(self._waiting), len(self._running), 5, 8, 0)

    def statistics(self):
        return self._tally.statistics(self.usage())

    def updates(self) -> Iterator[Update]:
        counts, count = self._tally.counts, 0
        while True:
            if self.drained:
                self._waiting.clear()
            while self._waiting and len(self._running) < self.slots:
                self._running.append(self._waiting.pop(0))
            if not self._running:
                return
            if self._heard:
                self._heard(count)
            count += 1
            index = self._running.pop(self._random.randrange(len(self._running)))
            request = self.requests[index]
            if self._observer:
                self._observer(StepRecord(1e9 + count, "decode", 3, 0, 3, len(self._waiting), 4))
            if str(request.id) in self._fails:
                counts.failed += 1
                yield Update(index, "", 0, error=FloatingPointError("no number"))
                continue
            counts.done += 1
            counts.tokens += 1
            yield Update(index, "", 1, result(request, self._random.random()))
