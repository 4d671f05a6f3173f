"""From a grammar to a matcher, off the critical path: threads, time-out, cache.

A submission returns at once. A compilation that has not ended in time has failed for those who wait
for it; it cannot be killed, but gives up its place among the workers, so that it delays nobody, and
what it makes at last is still kept for the next request.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from deepinfer_jax.grammar import json_schema
from deepinfer_jax.grammar.cursor import Cursor
from deepinfer_jax.grammar.errors import GrammarError, explain
from deepinfer_jax.grammar.schema import Grammar
from deepinfer_jax.grammar.settings import GrammarLimits, GrammarSettings
from deepinfer_jax.grammar.vocabulary import Vocabulary, require_llguidance

_POLL_S = 0.1
# A token is allowed for its bytes alone. Left to itself, the library allows one tokenization only
# of a text that the grammar forces.
_BYTES_DECIDE = '\n%llguidance {"no_forcing": true}\n'


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar ready for use with one vocabulary.

    Attributes:
      grammar, vocabulary: what was compiled, for what.
      warnings: of the compiler, for the author of the grammar.
      prototype: llguidance's matcher at the start; only ever copied.
    """

    grammar: Grammar
    vocabulary: Vocabulary
    warnings: tuple[str, ...] = dataclasses.field(compare=False)
    prototype: Any = dataclasses.field(compare=False, repr=False)


Outcome = Compiled | GrammarError


class _Job:
    """One compilation: (kind, text), when the last who waits for it gives up, what came out."""

    def __init__(self, grammar: Grammar, deadline: float):
        self.grammar = grammar
        self.deadline = deadline
        self.settled = threading.Event()
        self.made: Outcome | None = None


class Ticket:
    """A submitted grammar; `Compiler.submit` makes it. Its outcome, once there, does not change."""

    def __init__(self, compiler: Compiler, grammar: Grammar, job: _Job, deadline: float):
        self.grammar = grammar
        self._compiler = compiler
        self._job = job
        self._deadline = deadline
        self._outcome: Outcome | None = None

    def outcome(self) -> Outcome | None:
        """`Compiled`, or the `GrammarError` that this request ends with; None: not yet."""
        if self._outcome is None:
            self._outcome = self._compiler.look(self.grammar, self._job, self._deadline)
        return self._outcome

    def wait(self) -> Outcome:
        """The outcome, waited for; never longer than the time-out."""
        while (outcome := self.outcome()) is None:
            self._job.settled.wait(_POLL_S)
        return outcome


class Compiler:
    """Compiles grammars for one vocabulary. Safe to use from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: GrammarSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.vocabulary = vocabulary
        self.settings = GrammarSettings() if settings is None else settings
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[tuple[str, str], Outcome] = collections.OrderedDict()
        self._open: dict[tuple[str, str], _Job] = {}  # queued or running
        self._queue: collections.deque[_Job] = collections.deque()
        self._running: list[_Job] = []

    def submit(self, grammar: Grammar) -> Ticket:
        """Begin to compile, or find it among what was compiled before.

        Requests for one text share a compilation, whatever their triggers. Raises ValueError for
        trigger tokens that the vocabulary does not have: nothing would be gained by waiting.
        """
        grammar.check_token_ids(self.vocabulary.size, self.vocabulary.eos)
        key = (grammar.kind, grammar.text)
        with self._lock:
            deadline = self._clock() + self.settings.timeout_s
            job = self._open.get(key)
            if job is None:
                job = _Job(grammar, deadline)
                job.made = self._kept.get(key)
                if job.made is not None:
                    self._kept.move_to_end(key)
                    job.settled.set()
                else:
                    self._open[key] = job
                    self._queue.append(job)
            job.deadline = max(job.deadline, deadline)
            self._start_jobs()
        return Ticket(self, grammar, job, deadline)

    def compile(self, grammar: Grammar) -> Compiled:
        """Submit and wait. Raises GrammarError if it cannot be compiled, or not in time."""
        outcome = self.submit(grammar).wait()
        if isinstance(outcome, GrammarError):
            raise GrammarError(outcome.reason, str(outcome))
        return outcome

    def look(self, grammar: Grammar, job: _Job, deadline: float) -> Outcome | None:
        """What a ticket's `outcome` is now."""
        with self._lock:
            if isinstance(job.made, Compiled):
                return dataclasses.replace(job.made, grammar=grammar)
            if job.made is not None:
                return job.made
            self._start_jobs()
            if self._clock() < deadline:
                return None
        return GrammarError(
            "timeout",
            f"schema: not compiled {self.settings.timeout_s:g} s after its submission; make it "
            "simpler, or raise GrammarSettings.timeout_s or workers",
        )

    def _start_jobs(self) -> None:
        """Fill the free places, with the lock held. Whoever is over time has given up its own.

        The threads are no daemons: Python would take the interpreter from under them at exit, and
        the library crashes then. So the process ends when the running compilations have.
        """
        if not threading.main_thread().is_alive():
            self._queue.clear()
        now = self._clock()
        self._running = [job for job in self._running if now < job.deadline]
        while self._queue and len(self._running) < self.settings.workers:
            job = self._queue.popleft()
            if job.deadline <= now:  # nobody waits for it any more
                del self._open[job.grammar.kind, job.grammar.text]
                continue
            self._running.append(job)
            name = "deepinfer-jax-grammar"
            threading.Thread(target=self._work, args=(job,), name=name, daemon=False).start()

    def _work(self, job: _Job) -> None:
        try:
            made: Outcome = build(job.grammar, self.vocabulary, self.settings.limits)
        except GrammarError as error:
            made = error
        except BaseException as error:  # a panic of the library is a BaseException
            made = GrammarError(
                "invalid", f"schema: the grammar compiler broke on it ({error!r}); simplify it"
            )
        key = (job.grammar.kind, job.grammar.text)
        with self._lock:
            job.made = made
            self._open.pop(key, None)
            self._running = [other for other in self._running if other is not job]
            self._kept[key] = made
            while len(self._kept) > self.settings.cache_entries:
                self._kept.popitem(last=False)
            self._start_jobs()
        job.settled.set()


def build(grammar: Grammar, vocabulary: Vocabulary, limits: GrammarLimits) -> Compiled:
    """Compile now, in this thread. Raises GrammarError."""
    library = require_llguidance()
    bounds = library.LLParserLimits(**dataclasses.asdict(limits), verbose_errors=False)
    source = library.LLMatcher.grammar_from_lark(_lark(grammar, library))
    matcher = library.LLMatcher(vocabulary.handle, source, log_level=0, limits=bounds)
    if matcher.is_error():
        raise explain(grammar.kind, matcher.get_error())
    if grammar.kind == "json":
        json_schema.check_minima(grammar.text)
    Cursor(grammar.kind, vocabulary, matcher).row()  # something may come, or it may end at once
    return Compiled(grammar, vocabulary, tuple(matcher.get_grammar_warnings()), matcher)


def _lark(grammar: Grammar, library: ModuleType) -> str:
    """The grammar in the library's one language."""
    if grammar.kind == "ebnf":
        return grammar.text + _BYTES_DECIDE
    if grammar.kind == "regex":
        return f"start: /{library.regex_to_lark(grammar.text, use_ascii='')}/{_BYTES_DECIDE}"
    return f"start: %json {json_schema.source(grammar.text)}{_BYTES_DECIDE}"
