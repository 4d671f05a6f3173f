"""The second stage: verdicts and estimates from the lines that the first one wrote.

Reads only. A line that does not belong, or one that is not there, is named and never guessed at.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from deepinfer_jax.evaluation import estimates, tasks
from deepinfer_jax.evaluation.estimates import Estimate
from deepinfer_jax.evaluation.tasks import Item, Task
from deepinfer_jax.evaluation.verdicts import Verdict, wrong

_THINK_END = "</think>"
_MOST_MISSING = 1_000_000
Kind = Literal["missing", "duplicate", "foreign", "unreadable", "mixed"]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Why the report is not one of a whole run: a line, or the id of a reply without one."""

    kind: Kind
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One reply: its number among the item's, the verdict, how many tokens, cut by max_tokens?"""

    number: int
    verdict: Verdict
    tokens: int
    cut: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """The replies to one item, in the order of their numbers."""

    id: str
    samples: tuple[Sample, ...]

    @property
    def right(self) -> int:
        """How many of them are right."""
        return sum(sample.verdict.right for sample in self.samples)


@dataclasses.dataclass(frozen=True)
class Report:
    """What `score` found.

    Attributes:
      task, samples: what was asked, and how many replies to each item are due.
      scores: of the items that have a reply, in the task's order.
      asked: `model`, `numerics` and the options that all lines share.
      problems: in the order of the lines; missing ones last.
    """

    task: Task
    samples: int
    scores: tuple[Score, ...]
    asked: Mapping[str, Any]
    problems: tuple[Problem, ...]

    @property
    def replies(self) -> list[Sample]:
        """Every reply that counts."""
        return [sample for score in self.scores for sample in score.samples]

    def pass_at(self, k: int) -> Estimate | None:
        """Over the items with at least k replies; `pass_at(1)` is the mean share of right ones."""
        return estimates.over_items(
            estimates.pass_at(len(score.samples), score.right, k)
            for score in self.scores
            if len(score.samples) >= k
        )

    @property
    def mean_tokens(self) -> float:
        """Mean length of a reply in tokens, its end token included."""
        return math.fsum(sample.tokens for sample in self.replies) / len(self.replies)

    @property
    def cut(self) -> float:
        """Share of the replies that `max_tokens` cut off."""
        return sum(sample.cut for sample in self.replies) / len(self.replies)


def score(
    task: Task, lines: Iterable[tuple[str, Mapping[str, Any] | None]], samples: int | None = None
) -> Report:
    """The report on lines of `deepinfer-jax generate`, each with its place; None: not such a line.

    `samples`: replies due to each item; default: as many as the largest number among the ids says.

    Raises ValueError where no line is a reply to an item of the task, and where more are missing
    than could be named.
    """
    reading = _Reading(task, samples)
    for place, line in lines:
        reading.take(place, line)
    return reading.report()


class _Reading:
    """What the lines so far have come to."""

    def __init__(self, task: Task, samples: int | None):
        self._task = task
        self._due = samples
        self._items = {item.id: item for item in task.items}
        self._found: dict[str, dict[int, Sample]] = {item.id: {} for item in task.items}
        self._places: dict[str, str] = {}
        self._asked: dict[str, Any] = {}
        self._mixed: set[str] = set()
        self._problems: list[Problem] = []

    def take(self, place: str, line: Mapping[str, Any] | None) -> None:
        """One more line."""
        if line is None:
            self._say("unreadable", f"{place} is not a line of `deepinfer-jax generate`")
            return
        name, split = str(line["id"]), tasks.split_id(line["id"])
        if split is None or split[0] not in self._items:
            self._say("foreign", f"{place}: id {reprlib.repr(name)} is of no item of the task")
            return
        item, number = self._items[split[0]], split[1]
        if self._due is not None and number >= self._due:
            self._say("foreign", f"{place}: id {reprlib.repr(name)} is beyond {self._due} samples")
        elif line["prompt"] != item.prompt:
            self._say(
                "foreign",
                f"{place}: id {reprlib.repr(name)} was asked "
                f"{reprlib.repr(line['prompt'])}, the task asks {reprlib.repr(item.prompt)}",
            )
        elif name in self._places:
            self._say(
                "duplicate",
                f"{place}: id {reprlib.repr(name)} is also that of {self._places[name]}, which "
                "counts",
            )
        else:
            self._places[name] = place
            self._compare(place, line, item)
            self._found[item.id][number] = _sample(number, line, item)

    def _say(self, kind: Kind, text: str) -> None:
        self._problems.append(Problem(kind, text))

    def _compare(self, place: str, line: Mapping[str, Any], item: Item) -> None:
        """Replies of two models, or of other options, have no common mean."""
        asked = {"model": line["model"], "numerics": line["numerics"], **line["options"]}
        for key, value in asked.items():
            if key in item.options:
                continue
            if self._asked.setdefault(key, value) != value and key not in self._mixed:
                self._mixed.add(key)
                self._say(
                    "mixed",
                    f"{place}: {key} is {reprlib.repr(value)}, in lines before "
                    f"{reprlib.repr(self._asked[key])}",
                )

    def report(self) -> Report:
        """Of all lines taken."""
        numbers = [number for found in self._found.values() for number in found]
        if not numbers:
            said = f": {self._problems[0].text}" if self._problems else ""
            raise ValueError(f"there is no reply to an item of task {self._task.name!r}{said}")
        due = max(numbers) + 1 if self._due is None else self._due
        lacking = due * len(self._items) - len(numbers)
        if lacking > _MOST_MISSING:
            said = (
                f"samples={due}" if self._due is not None else f"the largest id says {due} samples"
            )
            raise ValueError(
                f"{said} of {len(self._items)} items: {lacking:,} replies are missing, at most "
                f"{_MOST_MISSING:,} are named; say by `samples` (--samples) how many are due"
            )
        missing = (
            Problem("missing", tasks.request_id(item, number))
            for item, found in self._found.items()
            for number in range(due)
            if number not in found
        )
        scores = (
            Score(item, tuple(found[number] for number in sorted(found)))
            for item, found in self._found.items()
            if found
        )
        asked = {key: value for key, value in self._asked.items() if key not in self._mixed}
        return Report(self._task, due, tuple(scores), asked, (*self._problems, *missing))


def _sample(number: int, line: Mapping[str, Any], item: Item) -> Sample:
    text, cut = line["text"], line["finish_reason"] == "length"
    if line["options"].get("thinking") is True:
        _, end, text = text.partition(_THINK_END)
        verdict = item.verify(text) if end else wrong("the reasoning did not come to an end")
    else:
        verdict = item.verify(text)
    return Sample(number, verdict, len(line["tokens"]), cut)
