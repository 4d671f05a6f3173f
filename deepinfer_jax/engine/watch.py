"""What the host sees of the device: how long it waited for the host, and what was compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

# What JAX reports of making a program: tracing, lowering, and compiling or reading it from a cache.
_MAKING = "/jax/core/compile/"
_MADE = "/jax/core/compile/backend_compile_duration"


class RecompileWarning(UserWarning):
    """A program was compiled in the middle of a run that had been warmed up."""


@dataclasses.dataclass
class Compiled:
    """Programs made, and the seconds that it took."""

    count: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def compilations(every_thread: bool = False) -> Iterator[Compiled]:
    """Counts what this thread, or every one, compiles inside the `with`."""
    found, thread = Compiled(), threading.get_ident()

    def hear(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(_MAKING) and (every_thread or threading.get_ident() == thread):
            found.seconds += duration_secs
            found.count += event == _MADE

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


Signature = dict[str, str]  # what a program was given, by the name of the argument


class Watch:
    """Through this one the engine asks for programs and reads what they return.

    The device is idle while everything that was asked for is done and nothing new is asked. What
    it has done is only looked at when something is asked or read, and where that comes late the
    time in between counts as idle: `idle_s` is never too small. Compiling does not count.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, launching: bool = False
    ) -> None:
        """`launching`: a call lasts while it launches kernels, at which the device is already at
        work, to the end of its rounds maybe: then it counts as work from its beginning.
        """
        self.idle_s = self.compile_s = self.seconds = 0.0
        self.compiled = self.recompiled = 0
        self._clock, self._launching = clock, launching
        self._lock = threading.Lock()  # one thread asks while another reads
        self._latest: Any = None  # an array of what was asked for last
        self._busy: float | None = None  # when the device was last known to have work
        self._seen: float | None = None  # when this was last called
        self._known: dict[str, list[Signature]] | None = None

    def ask(self, program: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """What `program` returns, which need not be there yet."""
        with self._lock:
            before, begun, busy = self._latest, self._clock(), self._busy
        if before is not None and not _ready(before):
            busy = begun
        with compilations() as compiled:
            made = program(*args, **more)
        latest = jax.tree.leaves(made)[0]
        with self._lock:
            now, self._latest = self._clock(), latest
            if busy is not None and before is not None and _ready(before):
                # It has its values already: it was run within the call, from its beginning.
                within = self._launching or _ready(latest)
                self.idle_s += max(0.0, (begun if within else now - compiled.seconds) - busy)
            self._pass(now, compiled.seconds)
            self._busy = now
            self.compiled += compiled.count
        if compiled.count and self._known is not None:
            self._warn(program, args, more, compiled)
        return made

    def read(self, values: Any) -> Any:
        """`values` on the host, as soon as they are there."""
        waited = not all(map(_ready, jax.tree.leaves(values)))
        found = jax.device_get(values)
        with self._lock:
            now = self._clock()
            self._pass(now)
            if waited:
                self._busy = now
        return found

    def rest(self) -> None:
        """There is nothing to do: what follows is nobody's time."""
        self._busy = self._seen = None

    def warmed(self, known: dict[str, list[Signature]], seconds: float, count: int) -> None:
        """From now on whatever is compiled is warned of; `known`: signatures by program."""
        self.compile_s += seconds
        self.compiled += count
        self._known = {**(self._known or {}), **known}

    def _pass(self, now: float, compiling: float = 0.0) -> None:
        self.compile_s += compiling
        if self._seen is not None:
            self.seconds += now - self._seen - compiling
        self._seen = now

    def _warn(
        self, program: Callable[..., Any], args: tuple, more: dict[str, Any], compiled: Compiled
    ) -> None:
        self.recompiled += 1
        warnings.warn(
            f"{name_of(program)} was compiled in the middle of a run, which took "
            f"{compiled.seconds:.1f} s: {self._news(program, signature(program, args, more))}; "
            "call Engine.warm_up when all kinds of requests are submitted",
            RecompileWarning,
            stacklevel=3,
        )

    def _news(self, program: Callable[..., Any], given: Signature) -> str:
        """What `given` has that the nearest of the signatures that were foreseen has not."""
        known = (self._known or {}).get(name_of(program), [])
        if not known:
            return "nothing like it was foreseen"
        others = [
            {name for name in {*given, *one} if given.get(name) != one.get(name)} for one in known
        ]
        nearest = min(range(len(known)), key=lambda place: len(others[place]))
        names, one = sorted(others[nearest]), known[nearest]
        shown = [
            f"{n} is {given.get(n, 'missing')}, not {one.get(n, 'missing')}" for n in names[:3]
        ]
        if not shown:
            return "with arguments that were foreseen: a setting of JAX has changed"
        return "; ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def name_of(program: Callable[..., Any]) -> str:
    """Of the function."""
    return getattr(program, "__name__", repr(program))


def signature(program: Callable[..., Any], args: tuple, more: dict[str, Any]) -> Signature:
    """Shapes and dtypes of the arrays, and the other arguments, as a program is chosen by them."""
    try:
        named = inspect.signature(program).bind(*args, **more).arguments
    except (TypeError, ValueError):
        named = {**{str(place): value for place, value in enumerate(args)}, **more}
    leaves, _ = jax.tree_util.tree_flatten_with_path(named)
    return {jax.tree_util.keystr(path, simple=True, separator="."): _kind(x) for path, x in leaves}


def _kind(value: Any) -> str:
    if isinstance(value, jax.Array) and getattr(value, "committed", False):
        # An array that is bound to devices makes another program than one that is not.
        return f"{value.dtype}{list(value.shape)} on {value.sharding}"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def _ready(value: Any) -> bool:
    """Whether an array has its values; of one that was given away that cannot be told."""
    if not isinstance(value, jax.Array):
        return True
    # Part of every array that a program returns, though not of the type that they share.
    return not value.is_deleted() and getattr(value, "is_ready", bool)()
