"""Verifiable questions: what spark-tiny can do, asked for in words that it was not taught.

It adds, subtracts, sorts and extracts nearly without fault where a question is worded as in its
corpus. Worded otherwise, a part of its replies is right and the others do something else: there is
something to learn, and right replies to learn it from.

A question is a function of (seed, name): nothing is drawn from a stream, so a run that begins in
the middle asks what the whole run asked. Replies are judged by the verifiers of
`deepinfer_jax.evaluation`; what is not right gets a part of `CREDIT` for the part that is.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from deepinfer_jax.evaluation.lists import SortedList
from deepinfer_jax.evaluation.numbers import Number
from deepinfer_jax.evaluation.values import Json
from deepinfer_jax.evaluation.verifiers import Verifier
from deepinfer_jax.training.corpus import words as lists

CREDIT = 0.5  # most that a wrong reply is worth

# Chosen by the share of replies at temperature 1 that are right: neither nearly none nor most.
ARITHMETIC = (
    ("Compute {a} - {b}", "-"),
    ("What is {a} minus {b}?", "-"),
    ("Calculate {a} plus {b}.", "+"),
    ("{a} plus {b}", "+"),
)
SORTING = (
    "Sort the list {items}.", "Order these: {items}", "Order the numbers {items}.", "Sort {items}",
)  # fmt: skip
EXTRACTION = (
    "{sentence} {fields} as JSON, please.",
    "{sentence} Find {fields}.",
    "Read {fields}: {sentence}",
    "{sentence} {fields} as JSON.",
)

_ITEMS = ("apples", "balls", "books", "boxes", "cups", "hats", "kites", "lamps", "pens", "rings")
_SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name} is a {job} in {city} and likes {food}.",
    "{name} bought {count} {color} {item} for {price} dollars.",
)


@dataclasses.dataclass(frozen=True)
class Question:
    """kind: one of `KINDS`; text: the user's message; verify: the verdict on a reply; credit: the
    share in [0, 1] of a wrong reply that is right.
    """

    kind: str
    text: str
    verify: Verifier
    credit: Callable[[str], float]

    def reward(self, reply: str) -> float:
        """1 for a right reply, up to `CREDIT` for another."""
        return 1.0 if self.verify(reply).right else CREDIT * self.credit(reply)


def question(seed: int, name: str, kind: str) -> Question:
    """The question called `name`; equal arguments give equal questions.

    Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS[kind](random.Random(f"{seed}:{name}:{kind}"))


def _arithmetic(draw: random.Random) -> Question:
    words, sign = draw.choice(ARITHMETIC)
    b, a = sorted(draw.sample(range(10, 100), 2))
    value = a + b if sign == "+" else a - b
    return Question("arithmetic", words.format(a=a, b=b), Number(value), lambda reply: 0.0)


def _sorting(draw: random.Random) -> Question:
    items = [draw.randrange(10, 100) for _ in range(draw.choice((4, 5, 6)))]
    wanted = sorted(items)

    def credit(reply: str) -> float:
        """The share of the list that the reply begins with."""
        right = 0
        for found, due in zip(reply.split(), wanted, strict=False):
            if found != str(due):
                break
            right += 1
        return right / len(wanted)

    text = draw.choice(SORTING).format(items=" ".join(map(str, items)))
    return Question("sorting", text, SortedList(wanted), credit)


def _extraction(draw: random.Random) -> Question:
    known = {
        "name": draw.choice(lists.NAMES),
        "age": draw.randrange(3, 91),
        "city": draw.choice(lists.CITIES),
        "job": draw.choice(lists.JOBS),
        "food": draw.choice(lists.FOODS),
        "count": draw.randrange(2, 21),
        "color": draw.choice(lists.COLORS),
        "item": draw.choice(_ITEMS),
        "price": draw.randrange(2, 100),
    }
    sentence = draw.choice(_SENTENCES)
    there = [name for name in known if f"{{{name}}}" in sentence]
    fields = draw.sample(there, 2)
    wanted = {field: known[field] for field in fields}

    def credit(reply: str) -> float:
        """How much of the object is wanted, and the other way round (F1 of its members)."""
        found = _members(reply)
        hits = (Counter(found) & Counter(map(_member, wanted.items()))).total()
        return 2 * hits / (len(found) + len(wanted)) if found else 0.0

    words = draw.choice(EXTRACTION)
    text = words.format(sentence=sentence.format_map(known), fields=" and ".join(fields))
    return Question("extraction", text, Json(wanted), credit)


def _members(reply: str) -> list[str]:
    """The members of the object that a reply is, repeated keys too; none where it is no object."""
    try:
        found = json.loads(reply, object_pairs_hook=lambda pairs: list(map(_member, pairs)))
    except (ValueError, RecursionError):
        return []
    is_object = isinstance(found, list) and reply.lstrip().startswith("{")
    return [str(member) for member in found] if is_object else []


def _member(pair: tuple[str, Any]) -> str:
    return json.dumps(pair)


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "arithmetic": _arithmetic,
    "sorting": _sorting,
    "extraction": _extraction,
}
