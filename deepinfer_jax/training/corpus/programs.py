"""Small Python functions from a one-line wish."""

import ast
import functools

from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.example import Example, Task, effort_of, final_part, user

_NUMBER = ("x", "n", "value", "number")
_LIST = ("items", "numbers", "values", "data")
_TEXT = ("text", "word", "s", "line")

_KINDS = (
    # name, wish, body; {v} the parameter, {k} a constant
    ("add_{k}", "returns {v} plus {k}", "return {v} + {k}", _NUMBER),
    ("subtract_{k}", "returns {v} minus {k}", "return {v} - {k}", _NUMBER),
    ("times_{k}", "returns {v} times {k}", "return {v} * {k}", _NUMBER),
    ("divide_by_{k}", "returns {v} divided by {k}", "return {v} / {k}", _NUMBER),
    ("square", "returns the square of {v}", "return {v} * {v}", _NUMBER),
    ("is_even", "tells whether {v} is even", "return {v} % 2 == 0", _NUMBER),
    ("is_odd", "tells whether {v} is odd", "return {v} % 2 == 1", _NUMBER),
    ("is_over_{k}", "tells whether {v} is greater than {k}", "return {v} > {k}", _NUMBER),
    ("at_most_{k}", "returns the smaller of {v} and {k}", "return min({v}, {k})", _NUMBER),
    ("at_least_{k}", "returns the larger of {v} and {k}", "return max({v}, {k})", _NUMBER),
    (
        "absolute",
        "returns the absolute value of {v}",
        "if {v} < 0:\n        return -{v}\n    return {v}",
        _NUMBER,
    ),
    ("count_to", "returns the numbers from 1 to {v}", "return list(range(1, {v} + 1))", _NUMBER),
    (
        "sum_to",
        "returns the sum of 1 to {v}",
        "total = 0\n    for i in range(1, {v} + 1):\n        total += i\n    return total",
        _NUMBER,
    ),
    (
        "factorial",
        "returns the factorial of {v}",
        "result = 1\n    for i in range(2, {v} + 1):\n        result *= i\n    return result",
        _NUMBER,
    ),
    ("total", "returns the sum of {v}", "return sum({v})", _LIST),
    ("largest", "returns the largest of {v}", "return max({v})", _LIST),
    ("smallest", "returns the smallest of {v}", "return min({v})", _LIST),
    ("size", "returns the length of {v}", "return len({v})", _LIST),
    ("first_{k}", "returns the first {k} of {v}", "return {v}[:{k}]", _LIST),
    ("last_{k}", "returns the last {k} of {v}", "return {v}[-{k}:]", _LIST),
    ("in_order", "returns {v} sorted", "return sorted({v})", _LIST),
    ("backwards", "returns {v} in reverse order", "return {v}[::-1]", _LIST),
    ("mean", "returns the mean of {v}", "return sum({v}) / len({v})", _LIST),
    (
        "add_{k}_to_all",
        "adds {k} to each of {v}",
        "return [x + {k} for x in {v}]",
        _LIST,
    ),
    (
        "times_{k}_all",
        "multiplies each of {v} by {k}",
        "return [x * {k} for x in {v}]",
        _LIST,
    ),
    (
        "keep_over_{k}",
        "keeps those of {v} that are greater than {k}",
        "return [x for x in {v} if x > {k}]",
        _LIST,
    ),
    (
        "count_over_{k}",
        "counts those of {v} that are greater than {k}",
        "count = 0\n    for x in {v}:\n        if x > {k}:\n            count += 1\n"
        "    return count",
        _LIST,
    ),
    ("upper", "returns {v} in upper case", "return {v}.upper()", _TEXT),
    ("repeat_{k}", "repeats {v} {k} times", "return {v} * {k}", _TEXT),
    ("first_letter", "returns the first letter of {v}", "return {v}[0]", _TEXT),
    ("words_of", "splits {v} into words", "return {v}.split()", _TEXT),
    (
        "count_words",
        "counts the words of {v}",
        "return len({v}.split())",
        _TEXT,
    ),
    ("is_empty", "tells whether {v} is empty", "return len({v}) == 0", _TEXT),
    (
        "is_longer_{k}",
        "tells whether {v} has more than {k} letters",
        "return len({v}) > {k}",
        _TEXT,
    ),
)
_PROMPTS = (
    "Write a Python function {name}({v}) that {wish}.",
    "Write a Python function {name}({v}) that {wish}.",
    "Write a function {name}({v}) in Python that {wish}.",
)


def says_program(expected: str, completion: str) -> bool:
    """Check: the reply parses as Python and has the expected syntax tree."""
    try:
        tree = ast.parse(final_part(completion))
    except (SyntaxError, ValueError):
        return False
    return ast.dump(tree) == ast.dump(ast.parse(expected))


def _draw_program(draw: Draw) -> tuple:
    index = draw.below(len(_KINDS))
    name, *_, parameters = _KINDS[index]
    constant = draw.between(2, 30) if "{k}" in name else 0
    return (index, constant, draw.pick(parameters))


def _build_program(draw: Draw, combination: tuple) -> Example:
    index, constant, parameter = combination
    name, wish, body, _ = _KINDS[index]
    fields = {"v": parameter, "k": constant}
    name, wish, body = (text.format_map(fields) for text in (name, wish, body))
    code = f"def {name}({parameter}):\n    {body}"
    effort = effort_of(draw)
    return Example(
        task="python",
        prompt_messages=user(draw.pick(_PROMPTS).format(name=name, v=parameter, wish=wish)),
        answer=code,
        check=functools.partial(says_program, code),
        reasoning=f"The function {wish}." if draw.chance(0.3) else None,
        effort=effort,
    )


PROGRAM = Task("python", 5, _draw_program, _build_program)
