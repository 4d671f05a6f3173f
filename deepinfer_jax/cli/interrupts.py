"""Ctrl-C while requests are at work: once to let them end, twice to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_jax.engine import Engine


class Interrupts:
    """As a context: the first Ctrl-C lets the running requests of an engine end and no other begin,
    the second one, or one while nothing runs, is a KeyboardInterrupt.

    Outside the main thread, where the process was told to ignore or handle the signal in another
    way, and where it is not `alone` (the others would go on), nothing is changed.
    """

    def __init__(self, engine: Engine, *, alone: bool = True) -> None:
        self._alone = alone
        self.asked = False  # whether the run is to end
        self._engine = engine
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._alone and usual and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self._engine.usage().running:
            raise KeyboardInterrupt
        self.asked = True
        self._engine.drain()
