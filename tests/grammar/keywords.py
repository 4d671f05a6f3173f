"""What of JSON Schema is supported, found by running the JSON Schema Test Suite through masks.

`python -m tests.grammar.keywords` writes the table into docs/structured-output.md.
"""

import dataclasses
import itertools
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepinfer_jax import grammar
from deepinfer_jax.grammar import Compiled, GrammarError
from tests.grammar import walks

DATA = Path(__file__).parent / "data" / "draft2020-12.json.xz"
PAGE = Path(__file__).parents[2] / "docs" / "structured-output.md"
BEGIN, END = "<!-- keywords: begin -->", "<!-- keywords: end -->"
ORDERS = 150  # orders of the keys of one instance that are tried

# Reasons for refusing a schema, in the table's words.
_REASONS = (
    (r"not present in a registry", "references to other documents"),
    (r"Unsatisfiable|no text satisfies", "nothing is valid"),
    (r"Unknown format", "unknown format"),
    (r"oneOf constraints", "branches that may overlap"),
    (r"not disjoint", "patterns that may overlap"),
    (r"Expected positive integer", "counts written as 2.0"),
    (r"float range|too many digits", "numbers beyond 64 bits"),
    (r"unrecognized escape", "escapes that only ECMAScript has"),
)


@dataclasses.dataclass(frozen=True)
class Deviation:
    """An instance that is judged otherwise than the suite says."""

    file: str
    group: str
    test: str
    instance: str


@dataclasses.dataclass
class Row:
    """One file of the suite. `narrow`: valid but not taken; `wide`: invalid and taken."""

    file: str
    schemas: int = 0
    compiled: int = 0
    valid: int = 0
    invalid: int = 0
    refused: list[str] = dataclasses.field(default_factory=list)
    narrow: list[Deviation] = dataclasses.field(default_factory=list)
    wide: list[Deviation] = dataclasses.field(default_factory=list)


def suite() -> dict[str, list[dict[str, Any]]]:
    """File name without ending -> groups of tests."""
    with lzma.open(DATA) as file:
        return json.load(file)


def run() -> list[Row]:
    """Every test of the suite, one row a file."""
    return [_run(file, groups) for file, groups in suite().items()]


def _run(file: str, groups: list[dict[str, Any]]) -> Row:
    row = Row(file)
    for group in groups:
        row.schemas += 1
        made = None
        try:
            made = walks.compiled("json", group["schema"])
            row.compiled += 1
        except GrammarError as error:
            row.refused.append(_reason(str(error)))
            if error.reason != "unsatisfiable":
                continue
        for test in group["tests"]:
            taken = made is not None and takes_in_some_order(made, test["data"])
            row.valid += test["valid"]
            row.invalid += not test["valid"]
            if taken != test["valid"]:
                case = Deviation(
                    file, group["description"], test["description"], json.dumps(test["data"])
                )
                (row.wide if taken else row.narrow).append(case)
    return row


def takes_in_some_order(made: Compiled, instance: Any) -> bool:
    """Whether the instance can be written token by token, with its keys in some order."""
    begin = grammar.start(made)
    for ordered in itertools.islice(_orders(instance), ORDERS):
        text = json.dumps(ordered, ensure_ascii=False)
        if walks.takes(begin, walks.tokenizer().encode_user(text)):
            return True
    return False


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for inner in itertools.product(*(list(_orders(value[key])) for key in keys)):
                yield dict(zip(keys, inner, strict=True))
    elif isinstance(value, list):
        for inner in itertools.product(*map(list, map(_orders, value))):
            yield list(inner)
    else:
        yield value


def _reason(said: str) -> str:
    names = re.search(r"keywords? (.*?) (is|are) not supported", said)
    if names is not None:
        return names[1].replace("'", "`")
    for cue, words in _REASONS:
        if re.search(cue, said):
            return words
    raise AssertionError(f"give this refusal a name in _REASONS: {said}")


def section(rows: list[Row]) -> str:
    """The generated part of the page, in Markdown."""
    lines = [
        "| file of the suite | schemas compiled | valid taken | invalid refused | not compiled |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [_line(row) for row in rows]
    lines += ["", "Valid by the suite, yet not taken:", ""]
    lines += [_item(case) for row in rows for case in row.narrow if row.file != "format"]
    lines += ["", "Invalid by the suite, yet taken:", ""]
    lines += [_item(case) for row in rows for case in row.wide]
    return "\n".join(lines)


def _line(row: Row) -> str:
    taken, refused = row.valid - len(row.narrow), row.invalid - len(row.wide)
    reasons = ", ".join(sorted({name for why in row.refused for name in why.split(", ")}))
    cells = [
        row.file.removeprefix("optional/"),
        f"{row.compiled} of {row.schemas}",
        f"{taken} of {row.valid}" if row.valid else "",
        f"{refused} of {row.invalid}" if row.invalid else "",
        reasons,
    ]
    return "| " + " | ".join(cells) + " |"


def _item(case: Deviation) -> str:
    return f"- {case.file.removeprefix('optional/')}: `{case.instance}` ({case.test})"


def page_with(generated: str, page: str) -> str:
    """`page` with its generated part replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(section(run()), PAGE.read_text("utf-8")), "utf-8")
