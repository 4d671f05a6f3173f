"""How the tasks under `deepinfer_jax/assets/tasks` were made: held-out examples of our own corpus.

`python -m deepinfer_jax.evaluation.shipped` writes them again, byte by byte.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepinfer_jax import resources
from deepinfer_jax.evaluation import tasks
from deepinfer_jax.evaluation.texts import lettered
from deepinfer_jax.training import corpus
from deepinfer_jax.training.corpus import Example
from deepinfer_jax.training.corpus.draw import Draw

SEED = 41_000  # not that of training/evaluate.py, so these are other questions
ITEMS = 20
_CHOICES = 4
_KINDS = ("What is the opposite", "What does", "Which day", "Which month")
_CHOOSE = "{question}\n\n{choices}\n\nReply with the letter of the right answer."


def _questions(name: str, seed: int, asked: set[str]) -> Iterator[tuple[str, Example]]:
    """Held-out examples of a corpus task with the text they ask, none of it twice.

    Only those that are a single message: no earlier turns, no schema in the prompt.
    """
    for example in corpus.examples(seed, "heldout", (name,)):
        text = example.prompt_messages[0]["content"]
        if len(example.prompt_messages) == 1 and example.schema is None and text not in asked:
            asked.add(text)
            yield text, example


def _take(name: str, count: int, seed: int, answer: Callable[[str], Any]) -> list[dict[str, Any]]:
    """`count` items of a corpus task, without ids; `answer` reads the right reply."""
    found = _questions(name, seed, set())
    return [
        {"prompt": text, "answer": answer(example.answer)}
        for text, example in (next(found) for _ in range(count))
    ]


def _result(answer: str) -> int:
    return int(answer.rpartition(" ")[2])  # "27 + 45 = 72"


def _listed(answer: str) -> list[int] | list[str]:
    items = answer.split()
    return [int(item) for item in items] if items[0].isdecimal() else items


def _choices(seed: int) -> list[dict[str, Any]]:
    """Facts to choose from: the wrong answers are right ones of questions that begin alike."""
    draw = Draw(seed)
    found = _questions("fact", seed, set())
    facts = {text: example.answer for text, example in (next(found) for _ in range(60))}
    items = []
    for question, right in facts.items():
        kind = next((kind for kind in _KINDS if question.startswith(kind)), None)
        if kind is None:
            continue
        others = sorted({a for q, a in facts.items() if q.startswith(kind)} - {right})
        choices = draw.some([right, *draw.some(others, _CHOICES - 1)], _CHOICES)
        items.append(
            {
                "prompt": _CHOOSE.format(question=question, choices=lettered(choices)),
                "answer": string.ascii_uppercase[choices.index(right)],
                "settings": {"choices": choices},
            }
        )
    return items[:ITEMS]


def _arithmetic() -> list[dict[str, Any]]:
    half = ITEMS // 2
    sums = _take("addition", half, SEED, _result)
    return sums + _take("subtraction", ITEMS - half, SEED + 1, _result)


# Name -> the first line of the file without its name, and its items without their ids.
_MADE: Mapping[str, tuple[Mapping[str, Any], Callable[[], list[dict[str, Any]]]]] = {
    "arithmetic": (
        {"about": "addition and subtraction, with steps", "verifier": "number",
         "options": {"thinking": True, "max_tokens": 160}},
        _arithmetic,
    ),
    "choice": (
        {"about": "facts, one right answer of four", "verifier": "choice",
         "options": {"max_tokens": 32}},
        lambda: _choices(SEED + 2),
    ),
    "copying": (
        {"about": "a text said again, to the letter", "verifier": "exact",
         "settings": {"strict": True}, "options": {"max_tokens": 64}},
        lambda: _take("copy", ITEMS, SEED + 3, str),
    ),
    "extraction": (
        {"about": "a sentence as JSON", "verifier": "json", "options": {"max_tokens": 96}},
        lambda: _take("json", ITEMS, SEED + 4, json.loads),
    ),
    "sorting": (
        {"about": "three to seven numbers or words in order", "verifier": "sorted",
         "options": {"max_tokens": 64}},
        lambda: _take("sort", ITEMS, SEED + 5, _listed),
    ),
}  # fmt: skip
NAMES = tuple(_MADE)


def task_text(name: str) -> str:
    """The text of a shipped task's file."""
    head, make = _MADE[name]
    items = ({"id": f"{name}-{i:02}", **item} for i, item in enumerate(make()))
    return tasks.task_text({"task": name, **head}, items)


def main() -> None:
    """Write the files."""
    folder = resources.PACKAGE / "assets" / "tasks"
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        path = folder / f"{name}.jsonl"
        path.write_text(task_text(name), encoding="utf-8", newline="\n")
        print(path)


if __name__ == "__main__":
    main()
