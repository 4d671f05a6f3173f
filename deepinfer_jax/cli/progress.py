"""How far a run has come: a line on a terminal while it goes on, a report at its end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from deepinfer_jax.engine import Statistics, Warming

_BARS = 10, 24  # characters of the bar, at least and at most
_INTERVAL = 0.1  # seconds between redraws


class Progress:
    """Replies of `total`, tokens, speed, drafts, cache, time left; silent where nobody watches."""

    def __init__(self, total: int, stream: TextIO, clock: Callable[[], float] = time.perf_counter):
        self._total = total
        self._stream = stream
        self._clock = clock
        self._shown = stream.isatty()
        self._first: float | None = None
        self._last = -_INTERVAL
        self._width = 0

    def warming(self, now: Warming) -> None:
        """Say what is being compiled."""
        if self._shown:
            self._draw(f"compiling {now.done + 1} of {now.total}: {now.label}")

    def show(self, ended: int, statistics: Callable[[], Statistics]) -> None:
        """Redraw, at most ten times a second: `ended` requests have a reply or have failed."""
        now = self._clock()
        if not self._shown or (now - self._last < _INTERVAL and ended < self._total):
            return
        self._last = now
        found = statistics()
        if found.tokens and self._first is None:
            self._first = now
        seconds = 0.0 if self._first is None else now - self._first
        self._draw(line(ended, self._total, found, seconds, columns()))

    def close(self) -> None:
        """Leave the line behind."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0

    def _draw(self, text: str) -> None:
        text = text[: columns()]
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)


def columns() -> int:
    """What a line of the terminal holds without going over to the next."""
    return max(shutil.get_terminal_size().columns - 1, 1)


def line(ended: int, total: int, statistics: Statistics, seconds: float, width: int) -> str:
    """The line, as much as fits into `width`; `seconds` since the first token."""
    parts = [f"{statistics.tokens:,} tokens"]
    if seconds:
        parts.append(f"{statistics.tokens / seconds:.0f}/s")
    if 0 < ended < total and seconds:
        parts.append(f"{_clock(seconds * (total - ended) / ended)} left")
    if statistics.acceptance is not None:
        parts.append(f"drafts {statistics.acceptance:.0%}")
    if statistics.pages:
        parts.append(f"cache {statistics.used_pages / statistics.pages:.0%}")
    text, room = f" {ended}/{total} replies", width - _BARS[0] - 2
    for part in parts:
        if len(text) + 2 + len(part) <= room:
            text += f", {part}"
    bar = min(_BARS[0] + max(room - len(text), 0), _BARS[1])
    return f"[{'=' * (bar * ended // total):{bar}}]{text}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def report(statistics: Statistics, *, refused: int, skipped: int) -> list[str]:
    """What a run came to, for the end of it; `skipped` had their results already."""
    s = statistics
    speed = f" ({s.tokens / s.seconds:,.0f} tokens/s)" if s.seconds else ""
    lines = [
        f"requests   {s.done} done, {s.failed + refused} failed, {skipped} skipped",
        f"tokens     {s.tokens:,} in {s.seconds:.1f} s{speed}",
        f"prompts    {s.prompt_tokens:,} tokens computed, {s.shared_tokens:,} shared",
        f"cache      at most {s.peak_pages} of {s.pages} pages, {s.preempted} preemptions",
        f"device     idle {s.idle_share:.1%} of the time",
        f"compiling  {s.compile_s:.1f} s, {s.compiled} programs",
    ]
    if s.acceptance is not None:
        accepted = f"{s.accepted:,} of {s.verified:,} accepted ({s.acceptance:.0%})"
        lines.insert(2, f"drafts     {accepted}")
    return lines
