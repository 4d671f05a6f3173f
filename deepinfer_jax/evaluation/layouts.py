"""Published benchmarks as task files: which columns they come with, and what becomes of a row.

Nothing is downloaded: a row comes from a CSV or JSON Lines file that the user has.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import hashlib
import reprlib
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.evaluation.texts import lettered
from deepinfer_jax.prompts import read_prompt_lines

Fields = Mapping[
    str, str
]  # role of a column -> its text in a row; without the optional ones left out


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A benchmark.

    Attributes:
      head: the first line of its task file.
      columns: role -> names that its column goes by, case ignored. optional: roles that may lack.
      item: what becomes of (fields, id, seed); a text instead says why the row is left out.
    """

    head: Mapping[str, Any]
    columns: Mapping[str, Sequence[str]]
    optional: frozenset[str]
    item: Callable[[Fields, str, int], dict[str, Any] | str]


@dataclasses.dataclass(frozen=True, slots=True)
class Converted:
    """A task file to be: its first line, its items, where each came from.

    left_out: reason -> rows; unused: columns that no role has.
    """

    head: Mapping[str, Any]
    items: list[dict[str, Any]]
    places: list[str]
    left_out: Mapping[str, int]
    unused: Sequence[str]


# -- what becomes of a row -------------------------------------------------------------------------

_WHOLE = "{question}\n\nEnd your reply with the answer, a whole number from 0 to 999."
_LETTER = (
    "{question}\n\n{choices}\n\nEnd your reply with a line of the form `Answer: X`, where X is the "
    "letter of the right choice."
)
_LETTER_THERE = (
    "{question}\n\nEnd your reply with a line of the form `Answer: X`, where X is the letter of "
    "the right choice."
)
_SHORT = (
    "{question}\n\nEnd your reply with a line of the form `Answer: ...` that holds the answer and "
    "nothing else."
)
_WRONG = ("wrong 1", "wrong 2", "wrong 3")


def _aime(fields: Fields, name: str, seed: int) -> dict[str, Any]:
    answer = fields["answer"].strip()
    if not answer.isascii() or not answer.isdecimal() or len(answer.lstrip("0")) > 3:
        raise ValueError(f"answer must be a whole number from 0 to 999, got {reprlib.repr(answer)}")
    return {"id": name, "prompt": _WHOLE.format_map(fields), "answer": int(answer)}


def _gpqa(fields: Fields, name: str, seed: int) -> dict[str, Any]:
    texts = [fields[role].strip() for role in ("right", *_WRONG)]
    choices = shuffled(texts, name, seed)
    return {
        "id": name,
        "prompt": _LETTER.format(question=fields["question"].strip(), choices=lettered(choices)),
        "answer": string.ascii_uppercase[choices.index(texts[0])],
        "settings": {"choices": choices},
    }


def _hle(fields: Fields, name: str, seed: int) -> dict[str, Any] | str:
    if fields.get("image"):
        return "with an image"
    kind, answer = fields["kind"], fields["answer"].strip()
    if kind == "multipleChoice":
        prompt = _LETTER_THERE.format_map(fields)
        return {"id": name, "prompt": prompt, "answer": answer, "verifier": "choice"}
    if kind != "exactMatch":
        raise ValueError(
            f"answer_type must be exactMatch or multipleChoice, got {reprlib.repr(kind)}"
        )
    return {"id": name, "prompt": _SHORT.format_map(fields), "answer": answer}


def shuffled(texts: Sequence[str], name: str, seed: int) -> list[str]:
    """`texts` in an order that `seed` and the item's name fix, whatever other items there are."""

    def key(place: int) -> bytes:
        return hashlib.sha256(f"{seed}:{name}:{place}".encode()).digest()

    return [texts[place] for place in sorted(range(len(texts)), key=key)]


LAYOUTS: Mapping[str, Layout] = {
    "aime": Layout(
        {"task": "aime", "about": "American Invitational Mathematics Examination",
         "verifier": "number"},
        {"id": ("id", "problem_idx"), "question": ("problem", "question"), "answer": ("answer",)},
        frozenset({"id"}),
        _aime,
    ),
    "gpqa": Layout(
        {"task": "gpqa", "about": "Graduate-level questions with four choices",
         "verifier": "choice"},
        {"id": ("record id",), "question": ("question",), "right": ("correct answer",),
         **{role: (f"incorrect answer {role[-1]}",) for role in _WRONG}},
        frozenset({"id"}),
        _gpqa,
    ),
    "hle": Layout(
        {"task": "hle", "about": "Humanity's Last Exam, questions without images",
         "verifier": "exact", "settings": {"after": "Answer:"}},
        {"id": ("id",), "question": ("question",), "answer": ("answer",), "kind": ("answer_type",),
         "image": ("image",)},
        frozenset({"image"}),
        _hle,
    ),
}  # fmt: skip


# -- files -----------------------------------------------------------------------------------------


def convert(name: str, path: Path, seed: int = 0) -> Converted:
    """The task in a file of the layout called `name`; `seed` orders the choices of each item.

    Raises ValueError with the row or column and what is wrong there; OSError where the file cannot
    be read.
    """
    layout = LAYOUTS[name]
    rows, places = _rows(path)
    names = _columns(layout, rows[0], str(path))
    items, kept = [], []
    left_out: collections.Counter[str] = collections.Counter()
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        try:
            fields = {role: _text(row, column) for role, column in names.items()}
            made = layout.item(fields, f"{name}-{fields.get('id') or number}", seed)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if isinstance(made, str):
            left_out[made] += 1
        else:
            items.append(made)
            kept.append(place)
    if not items:
        raise ValueError(f"{path} has no row to keep: {dict(left_out)} left out")
    unused = [column for column in rows[0] if column not in names.values()]
    return Converted(layout.head, items, kept, left_out, unused)


def _rows(path: Path) -> tuple[Sequence[Mapping[str, Any]], list[str]]:
    """Rows and their places, by the end of the file's name."""
    read = {".csv": _csv_rows, ".jsonl": read_prompt_lines}.get(path.suffix.lower())
    if read is None:
        raise ValueError(f"{path} must end in .csv or .jsonl, so that it is known how to read it")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows, places = read(str(path), file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    return rows, places


def _csv_rows(name: str, file: Any) -> tuple[list[Mapping[str, Any]], list[str]]:
    limit = csv.field_size_limit(sys.maxsize)  # images stand in fields of some
    rows, places = [], []
    try:
        reader = csv.DictReader(file, strict=True)
        for row in reader:
            rows.append(row)
            places.append(f"{name}:{reader.line_num}")
            if None in row or None in row.values():
                raise ValueError(f"{places[-1]}: this row has not as many fields as the first line")
    except csv.Error as error:
        raise ValueError(f"{name}:{len(rows) + 2} or later: broken CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)
    if not rows:
        raise ValueError(f"{name} has no rows below its first line, the names of its columns")
    return rows, places


def _columns(layout: Layout, row: Mapping[str, Any], place: str) -> dict[str, str]:
    """Role -> the column that has it."""
    found = {}
    for role, names in layout.columns.items():
        columns = [column for column in row if column.strip().lower() in names]
        if len(columns) > 1:
            raise ValueError(
                f"{place} has the columns {' and '.join(map(repr, columns))} for the {role}; "
                "remove all but one"
            )
        if columns:
            found[role] = columns[0]
        elif role not in layout.optional:
            raise ValueError(
                f"{place} lacks a column {' or '.join(map(repr, names))}; it has "
                f"{', '.join(map(repr, row))}"
            )
    return found


def _text(row: Mapping[str, Any], column: str) -> str:
    """A field as text; an empty one is "" and left to who needs it."""
    value = row.get(column)
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{column} must be a text or a whole number, got {reprlib.repr(value)}")
