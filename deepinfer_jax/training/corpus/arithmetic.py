"""Addition and subtraction, digit by digit from the right, with carries and borrows spelled out."""

import functools
import re

from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.example import (
    Example,
    Task,
    effort_of,
    final_part,
    user,
)

_WIDTHS = ((1, 1), (2, 1), (1, 2), (2, 2), (2, 2), (2, 2), (2, 2), (2, 2), (3, 2), (3, 3), (3, 3))
_ADD = ("What is {a} + {b}?",) * 4 + (
    "{a} + {b} = ?",
    "Calculate {a} + {b}.",
    "Add {a} and {b}.",
    "What is {a}+{b}?",
)
_SUBTRACT = ("What is {a} - {b}?",) * 4 + (
    "{a} - {b} = ?",
    "Calculate {a} - {b}.",
    "Subtract {b} from {a}.",
    "What is {a}-{b}?",
)


def ends_with_number(expected: int, completion: str) -> bool:
    """Check: the reply ends with this whole number, a full stop allowed."""
    found = re.search(r"(?<![\d-])-?[0-9]+(?=\.?$)", final_part(completion))
    return found is not None and int(found[0]) == expected


def addition_steps(a: int, b: int, brief: bool = False) -> str:
    """The column addition of two non-negative integers, one digit a line."""
    width = max(len(str(a)), len(str(b)))
    carry, lines = 0, []
    for place, digits in enumerate(_columns(a, b, width), start=1):
        terms = [*digits, "1"] if carry else digits
        total = sum(map(int, terms))
        carry = total // 10
        step = f"{'+'.join(terms)}={total}"
        note = f", write {total % 10}, carry 1" if carry else f", write {total}"
        if place == width:
            note = f", write {total}"
        lines.append(step if brief else step + note)
    return _joined(lines, brief)


def subtraction_steps(a: int, b: int, brief: bool = False) -> str:
    """The column subtraction a - b of integers with a >= b >= 0, one digit a line."""
    borrow, lines = False, []
    for digit, taken in _columns(a, b, len(str(a))):
        less = int(taken) + borrow
        short = int(digit) < less
        value = int(digit) + 10 * short
        terms = [str(value), taken, "1"] if borrow else [str(value), taken]
        step = f"{'-'.join(terms)}={value - less}"
        lines.append(f"borrow 1, {step}" if short else step)
        borrow = short
    return _joined(lines, brief)


def _columns(a: int, b: int, width: int) -> list[list[str]]:
    """Pairs of digits from the right, short numbers filled with zeros."""
    return [list(pair) for pair in zip(f"{a:0{width}}"[::-1], f"{b:0{width}}"[::-1], strict=True)]


def _joined(lines: list[str], brief: bool) -> str:
    return "; ".join(lines) + "." if brief else "\n".join(f"{line}." for line in lines)


def _draw_numbers(draw: Draw) -> tuple[int, int]:
    left, right = draw.pick(_WIDTHS)
    low = {1: 0, 2: 10, 3: 100}
    return (
        draw.between(low[left], 10**left - 1),
        draw.between(low[right], 10**right - 1),
    )


def _draw_addition(draw: Draw) -> tuple:
    return tuple(sorted(_draw_numbers(draw)))  # a + b and b + a are one combination


def _draw_subtraction(draw: Draw) -> tuple:
    return tuple(sorted(_draw_numbers(draw)))[::-1]


def _build(draw: Draw, sign: str, a: int, b: int) -> Example:
    """An example of `a sign b`; three in four think, the rest answer at once."""
    add = sign == "+"
    value = a + b if add else a - b
    question = draw.pick(_ADD if add else _SUBTRACT).format(a=a, b=b)
    reasoning, effort = None, effort_of(draw)
    if draw.chance(0.75):
        steps = (addition_steps if add else subtraction_steps)(a, b, brief=effort == 50)
        reasoning = steps + ("" if effort == 50 else f"\nSo {a}{sign}{b}={value}.")
        if effort == 100:
            back = f"{value}-{b}={a}" if add else f"{value}+{b}={a}"
            reasoning += f"\nCheck: {back}."
    return Example(
        task="addition" if add else "subtraction",
        prompt_messages=user(question),
        answer=f"{a} {sign} {b} = {value}",
        check=functools.partial(ends_with_number, value),
        reasoning=reasoning,
        effort=effort,
    )


def _build_addition(draw: Draw, numbers: tuple) -> Example:
    a, b = draw.some(numbers, 2)
    return _build(draw, "+", a, b)


def _build_subtraction(draw: Draw, numbers: tuple) -> Example:
    return _build(draw, "-", *numbers)


ADDITION = Task("addition", 18, _draw_addition, _build_addition)
SUBTRACTION = Task("subtraction", 14, _draw_subtraction, _build_subtraction)
