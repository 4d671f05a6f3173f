"""A line that says how far a run has come, on a terminal only."""

from __future__ import annotations

import time
from typing import TextIO

_WIDTH = 24
_INTERVAL = 0.1  # seconds between redraws


class Progress:
    """`done` of `total` replies and the tokens so far; silent where nobody watches."""

    def __init__(self, total: int, stream: TextIO):
        self._total = total
        self._stream = stream
        self._shown = stream.isatty()
        self._first: float | None = None
        self._last = 0.0
        self._width = 0

    def show(self, done: int, tokens: int) -> None:
        """Redraw, at most ten times a second. Speed counts from the first token: not compiling."""
        now = time.perf_counter()
        if tokens and self._first is None:
            self._first = now
        if not self._shown or (now - self._last < _INTERVAL and done < self._total):
            return
        self._last = now
        speed = tokens / (now - self._first) if self._first not in (None, now) else 0.0
        full = _WIDTH * done // self._total
        line = (
            f"[{'=' * full}{' ' * (_WIDTH - full)}] {done}/{self._total} replies, "
            f"{tokens:,} tokens, {speed:.0f} tokens/s"
        )
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def close(self) -> None:
        """Leave the line behind."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
