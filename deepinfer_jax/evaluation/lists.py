"""The verifier of sorted lists."""

from __future__ import annotations

import collections
import dataclasses
import re
import reprlib
from collections.abc import Sequence

from deepinfer_jax.evaluation.verdicts import RIGHT, Verdict, wrong

_BETWEEN = re.compile(r"[\s,;]+")


@dataclasses.dataclass(frozen=True, slots=True)
class SortedList:
    """The last line of the reply is this list, in this order.

    Only what follows a colon on that line counts; items stand between white space, commas or
    semicolons, brackets and quotes are ignored.

    answer: whole numbers or words without white space, sorted; descending: the other way round.
    """

    answer: Sequence[int] | Sequence[str]
    descending: bool = False

    def __post_init__(self) -> None:
        items = self.answer
        if isinstance(items, str) or not isinstance(items, Sequence) or not items:
            raise ValueError(f"answer must be a list that is not empty, got {items!r}")
        numbers = all(isinstance(item, int) and not isinstance(item, bool) for item in items)
        if not numbers and not all(
            isinstance(item, str) and _items(item) == [item] for item in items
        ):
            raise ValueError(
                f"answer must be whole numbers, or words without white space, got {items!r}"
            )
        if not isinstance(self.descending, bool):
            raise ValueError(f"descending must be true or false, got {self.descending!r}")
        if list(items) != sorted(items, reverse=self.descending):
            raise ValueError(f"answer must be sorted, got {items!r}")

    def __call__(self, reply: str) -> Verdict:
        """The verdict on a reply."""
        lines = reply.strip().splitlines()
        found = _items(lines[-1].rpartition(":")[2]) if lines else []
        expected = [str(item) for item in self.answer]
        if found == expected:
            return RIGHT
        if not found:
            return wrong("no list in the last line of the reply")
        there, due = collections.Counter(found), collections.Counter(expected)
        for item in (due - there).elements():
            return wrong(f"lacks {reprlib.repr(item)}")
        for item in (there - due).elements():
            return wrong(f"has {reprlib.repr(item)} too often")
        return wrong("the right items in the wrong order")


def _items(text: str) -> list[str]:
    bare = (item.strip("[](){}\"'`*").removesuffix(".") for item in _BETWEEN.split(text))
    return [item for item in (part.strip("[](){}\"'`*") for part in bare) if item]
