"""Requests with a grammar: compiled before they are scheduled, masked while they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from deepinfer_jax import edits as editing
from deepinfer_jax import grammar
from deepinfer_jax.engine.seats import Work
from deepinfer_jax.grammar import Compiler, GrammarError, Masks, State, Ticket
from deepinfer_jax.loading import Model
from deepinfer_jax.scheduling import Job


@dataclasses.dataclass(frozen=True)
class Compiling:
    """A request whose grammar is being compiled, and its job once that is done."""

    work: Work
    job: Job
    ticket: Ticket


class Structured:
    """The grammars of one engine. llguidance is imported with the first of them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._compiler: Compiler | None = None
        self._compiling: list[Compiling] = []

    @property
    def compiling(self) -> bool:
        """Whether requests wait for their grammars."""
        return bool(self._compiling)

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
        self._compiling.append(Compiling(work, job, ticket))

    def forget(self, number: int) -> bool:
        """Cancel a request that waits here; False where it does not."""
        before = len(self._compiling)
        self._compiling = [each for each in self._compiling if each.work.number != number]
        return len(self._compiling) < before

    def ready(self, wait: bool) -> list[tuple[Compiling, GrammarError | None]]:
        """Requests that may be scheduled, and those whose grammar failed, with the reason.

        `wait`: there is nothing else to do; the first of them is waited for.
        """
        if wait and self._compiling:
            self._compiling[0].ticket.wait()
        found, rest = [], []
        for each in self._compiling:
            outcome = each.ticket.outcome()
            if outcome is None:
                rest.append(each)
            elif isinstance(outcome, GrammarError):
                found.append((each, outcome))
            else:
                each.work.state = grammar.start(outcome)
                found.append((each, None))
        self._compiling = rest
        return found

    def masks(self, works: Sequence[Work | None], drafts: np.ndarray) -> StepMasks:
        """Masks of those `works`, one of every slot, that have a grammar, along drafts [B, N]."""
        assert self._compiler is not None, "no request has a grammar"
        found = [
            self._masks(work, work.state, row) if work and work.state else None
            for work, row in zip(works, drafts.tolist(), strict=True)
        ]
        packed = grammar.stack(found, drafts.shape[1] + 1, self._compiler.vocabulary)
        legal = [one.legal if one else drafts.shape[1] for one in found]
        return StepMasks(packed, np.array(legal, np.int32), tuple(found))

    def _masks(self, work: Work, state: State, drafts: list[int]) -> Masks:
        """Of one request; failed where its edits leave nothing of what the grammar allows next.

        A draft behind which they leave nothing is not legal: the request fails when it is said.
        """
        found, cfg, options = grammar.masks(state, drafts), self._model.cfg, work.request.options
        if found.failure is not None or not options.edits:
            return found
        may = editing.sayable(cfg.vocab_size, options.allowed_token_ids, options.banned_token_ids)
        sayable, count = grammar.pack(may), len(work.transcript.tokens)
        may[list(options.ends(cfg.eos_token_id))] = False
        before = grammar.pack(may)
        left = [
            (row & (before if count + place < options.min_tokens else sayable)).any()
            for place, row in enumerate(found.rows[: found.legal + 1])
        ]
        if all(left):
            return found
        if left[0]:
            return found._replace(legal=left.index(False) - 1)
        return found._replace(failure=GrammarError(
            "unsatisfiable",
            f"request {work.request.id!r}: allowed_token_ids, banned_token_ids or "
            f"min_tokens={options.min_tokens} leave none of the tokens that the grammar allows "
            f"after {count} tokens; loosen them or the grammar",
        ))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StepMasks:
    """Masks of all slots for one call: packed [B, N + 1, W] uint32, legal [B]: leading drafts that
    may be verified.
    """

    packed: np.ndarray
    legal: np.ndarray
    each: tuple[Masks | None, ...]

    def failures(self) -> Iterator[tuple[int, GrammarError]]:
        """Slots whose reply cannot go on, and why."""
        for slot, one in enumerate(self.each):
            if one is not None and one.failure is not None:
                yield slot, one.failure
