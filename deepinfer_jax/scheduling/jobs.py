"""What the scheduler is told: the sizes it works within, and the jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Literal, get_args

Keep = Literal["shared", "ends"]
MOST_URGENT = 9


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the device's state and of a step. They decide the time and never a result.

    Attributes:
      slots: sequences that run at once.
      pages, page_tokens: pages of global KV, and tokens of each. `page_tokens` must be a multiple
        of every pooling ratio of the model, so that no pooled entry lies across a boundary.
      rows: most prompt rows of a step; those of slots that decode come beside them. No span of a
        prompt can be longer.
      longest: most tokens of a sequence, prompt and reply.
      snapshots: copies of a slot's state that the prefix cache may hold; 0 turns it off. With fewer
        than slots, beginnings can be forgotten before those that wait for them get a slot.
      keep: boundaries to keep a snapshot of: those where a waiting job will begin ("shared"), or
        beside them the last one of every prompt ("ends"), for jobs that are not there yet. Each
        boundary cuts a prompt in two, which costs one more step.
      mixed: whether running slots decode one token in a step that has prompt chunks, or wait.
    """

    slots: int
    pages: int
    page_tokens: int
    rows: int
    longest: int
    snapshots: int = 0
    keep: Keep = "ends"
    mixed: bool = True

    def __post_init__(self) -> None:
        for name in ("slots", "pages", "page_tokens", "rows"):
            check_integer(name, getattr(self, name), 1)
        check_integer("longest", self.longest, 2)
        check_integer("snapshots", self.snapshots, 0)
        if self.keep not in get_args(Keep):
            raise ValueError(f"keep must be one of {', '.join(get_args(Keep))}, got {self.keep!r}")
        if not isinstance(self.mixed, bool):
            raise TypeError(f"mixed must be true or false, got {self.mixed!r}")

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def check(self, job: Job) -> None:
        """Raise ValueError, with the arithmetic, for a job that can never fit."""
        total = len(job.tokens) + job.max_tokens
        needs = (
            f"job {job.id!r} needs {len(job.tokens)} prompt tokens + max_tokens {job.max_tokens} "
            f"= {total} tokens"
        )
        if total > self.longest:
            raise ValueError(
                f"{needs}, the longest sequence is {self.longest}; shorten the prompt, lower "
                "max_tokens or raise Limits.longest"
            )
        if self.pages_for(total) > self.pages:
            raise ValueError(
                f"{needs} = {self.pages_for(total)} pages of {self.page_tokens}, there are "
                f"{self.pages}; shorten the prompt, lower max_tokens or raise Limits.pages"
            )
        for span in job.spans:
            if span.length > self.rows:
                raise ValueError(
                    f"job {job.id!r} has an image of {span.length} tokens at {span.start}, which "
                    f"are computed at once; a step has {self.rows} prompt rows: show a smaller "
                    "image or raise Limits.rows"
                )


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a prompt that must be computed at once: an image.

    Attributes:
      start, length: the places that it takes.
      key: names what stands there, beside the token ids: equal keys, equal contents.
    """

    start: int
    length: int
    key: bytes

    @property
    def end(self) -> int:
        """The place behind it."""
        return self.start + self.length


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A request as the scheduler sees it.

    Attributes:
      id: names it; unique among unfinished jobs.
      tokens: prompt token ids.
      max_tokens: most tokens of the reply.
      priority: 0 to MOST_URGENT; only `orders.Priority` looks at it.
      reuse: whether it may begin from what another job computed, and others from what it computes.
        False where every prompt row has to run, as for log-probabilities of the prompt.
      spans: parts of the prompt that no chunk may split, in order.
    """

    id: Hashable
    tokens: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    reuse: bool = True
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"the prompt of job {self.id!r} has no tokens; give at least one")
        check_integer("max_tokens", self.max_tokens, 1)
        check_integer("priority", self.priority, 0)
        if self.priority > MOST_URGENT:
            raise ValueError(f"priority must be at most {MOST_URGENT}, got {self.priority}")
        self._check_spans()

    def whole(self, end: int) -> int:
        """`end`, or the start of the span that a chunk up to `end` would split."""
        return next((s.start for s in self.spans if s.start < end < s.end), end)

    def _check_spans(self) -> None:
        before = 0
        for span in self.spans:
            check_integer("start of a span", span.start, 0)
            check_integer("length of a span", span.length, 1)
            if not before <= span.start <= len(self.tokens) - span.length:
                raise ValueError(
                    f"spans of job {self.id!r} must stand in order inside its {len(self.tokens)} "
                    f"prompt tokens, got one of {span.length} tokens at {span.start} behind one "
                    f"that ends at {before}"
                )
            before = span.end


def check_integer(name: str, value: object, least: int) -> None:
    """Raise TypeError or ValueError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
