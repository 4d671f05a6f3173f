"""Requests with a grammar: compiled before they are scheduled, masked while they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from deepinfer_jax import grammar
from deepinfer_jax.engine.seats import Work
from deepinfer_jax.grammar import Compiler, GrammarError, Masks, Ticket
from deepinfer_jax.loading import Model
from deepinfer_jax.scheduling import Job


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A request whose grammar is being compiled, and its job once that is done."""

    work: Work
    job: Job
    ticket: Ticket


class Structured:
    """The grammars of one engine. llguidance is imported with the first of them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._compiler: Compiler | None = None
        self._waiting: list[Waiting] = []

    @property
    def waiting(self) -> bool:
        """Whether grammars are being compiled."""
        return bool(self._waiting)

    def submit(self, work: Work, job: Job) -> None:
        """Begin to compile the request's grammar. Raises ImportError without llguidance."""
        cfg, rule = self._model.cfg, work.request.options.rule
        assert rule is not None, "the request has no grammar"
        if self._compiler is None:
            vocabulary = grammar.make_vocabulary(
                self._model.tokenizer, cfg.vocab_size, cfg.eos_token_id
            )
            self._compiler = Compiler(vocabulary)
        ticket = self._compiler.submit(rule)
        self._waiting.append(Waiting(work, job, ticket))

    def forget(self, number: int) -> bool:
        """Cancel a request that waits here; False where it does not."""
        before = len(self._waiting)
        self._waiting = [each for each in self._waiting if each.work.number != number]
        return len(self._waiting) < before

    def ready(self, wait: bool) -> Iterator[tuple[Waiting, GrammarError | None]]:
        """Requests that may be scheduled, and those whose grammar failed, with the reason.

        `wait`: there is nothing else to do; the first of them is waited for.
        """
        if wait and self._waiting:
            self._waiting[0].ticket.wait()
        for each in tuple(self._waiting):
            outcome = each.ticket.outcome()
            if outcome is None:
                continue
            self._waiting.remove(each)
            if isinstance(outcome, GrammarError):
                yield each, outcome
            else:
                each.work.state = grammar.start(outcome)
                yield each, None

    def masks(self, works: Sequence[Work | None], drafts: np.ndarray) -> Looked:
        """Masks of the slots whose request has a grammar, along drafts [B, N]."""
        assert self._compiler is not None, "no request has a grammar"
        looked = [
            grammar.masks(work.state, row) if work and work.state else None
            for work, row in zip(works, drafts.tolist(), strict=True)
        ]
        packed = grammar.stack(looked, drafts.shape[1] + 1, self._compiler.vocabulary)
        legal = [one.legal if one else drafts.shape[1] for one in looked]
        return Looked(packed, np.array(legal, np.int32), tuple(looked))


@dataclasses.dataclass(frozen=True)
class Looked:
    """packed [B, N + 1, W] uint32, legal [B]: leading drafts that may be verified."""

    packed: np.ndarray
    legal: np.ndarray
    each: tuple[Masks | None, ...]

    def failures(self) -> Iterator[tuple[int, GrammarError]]:
        """Slots whose reply cannot go on, and why."""
        for slot, one in enumerate(self.each):
            if one is not None and one.failure is not None:
                yield slot, one.failure
