"""Sorting by repeated selection of the smallest item, and copying."""

import functools

from deepinfer_jax.training.corpus import words
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.example import Example, Task, effort_of, says_exactly, user

_SORT_NUMBERS = ("Sort these numbers: {items}",) * 3 + (
    "Sort the numbers {items}.",
    "Put these numbers in order: {items}",
)
_SORT_WORDS = ("Sort these words: {items}",) * 3 + (
    "Sort the words {items}.",
    "Put these words in order: {items}",
)
_COPY = ("Copy this: {text}", "Repeat this: {text}", "Repeat after me: {text}", "Say: {text}")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_TIMES = {2: "twice", 3: "3 times", 4: "4 times", 5: "5 times"}


def selection_steps(items: list, brief: bool = False) -> str:
    """Repeated selection: what is left, an arrow, its smallest item; one item a line."""
    rest, lines = list(items), []
    while rest:
        smallest = min(rest)
        lines.append((" ".join(map(str, rest)) + " -> " if not brief else "") + str(smallest))
        rest.remove(smallest)
    return ", ".join(lines) if brief else "\n".join(lines)


def _draw_sort(draw: Draw) -> tuple:
    count = draw.between(3, 7)
    if draw.chance(0.3):
        return tuple(sorted(draw.some(words.SORTABLE, min(count, 6))))
    limit = draw.pick((9, 99, 99))
    return tuple(sorted(draw.between(0, limit) for _ in range(count)))


def _build_sort(draw: Draw, ordered: tuple) -> Example:
    items = draw.some(ordered, len(ordered))
    numbers = isinstance(ordered[0], int)
    template = draw.pick(_SORT_NUMBERS if numbers else _SORT_WORDS)
    answer = " ".join(map(str, ordered))
    effort = effort_of(draw)
    reasoning = selection_steps(items, effort == 50) if draw.chance(0.6) else None
    if reasoning is not None and effort == 100:
        reasoning += f"\nCheck: {len(items)} items."
    return Example(
        task="sort",
        prompt_messages=user(template.format(items=" ".join(map(str, items)))),
        answer=answer,
        check=functools.partial(says_exactly, answer),
        reasoning=reasoning,
        effort=effort,
    )


def _draw_copy(draw: Draw) -> tuple:
    kind = draw.below(5)
    if kind == 0:
        letters = (draw.pick(_LETTERS) for _ in range(draw.between(3, 10)))
        return ("".join(letters), 1)
    if kind == 1:
        return ("".join(str(draw.below(10)) for _ in range(draw.between(3, 9))), 1)
    if kind == 2:
        return (draw.pick(words.SORTABLE), draw.between(2, 5))
    if kind == 3:
        mixed = (
            str(draw.below(100)) if draw.chance(0.4) else draw.pick(words.SORTABLE)
            for _ in range(draw.between(2, 7))
        )
        return (" ".join(mixed), 1)
    place, thing = draw.pick(words.PLACES), draw.pick(words.THINGS)
    return (f"The {draw.pick(words.COLORS)} {thing} is {place}.", 1)


def _build_copy(draw: Draw, combination: tuple) -> Example:
    text, times = combination
    question = draw.pick(_COPY).format(text=text)
    if times > 1:
        question = f"Say {text} {_TIMES[times]}."
    answer = " ".join([text] * times)
    effort = effort_of(draw)
    reasoning = f"I repeat the text{' ' + _TIMES[times] if times > 1 else ''}."
    return Example(
        task="copy",
        prompt_messages=user(question),
        answer=answer,
        check=functools.partial(says_exactly, answer),
        reasoning=reasoning if draw.chance(0.3) else None,
        effort=effort,
    )


SORT = Task("sort", 14, _draw_sort, _build_sort)
COPY = Task("copy", 12, _draw_copy, _build_copy)
