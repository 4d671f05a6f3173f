"""Task files: questions with their answers and the verifier that judges replies.

A task file is JSON Lines (docs/evaluation.md "Task files"). The first line describes the task,
every other line is an item:

    {"task": "sums", "about": "...", "verifier": "number", "settings": {}, "options": {}}
    {"id": "sums-00", "prompt": "What is 27 + 45?", "answer": 72}
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax import resources
from deepinfer_jax.evaluation import verifiers
from deepinfer_jax.evaluation.verifiers import Verifier
from deepinfer_jax.prompts import read_prompt_lines

_HEAD = ("task", "about", "verifier", "settings", "options")
_ITEM = ("id", "prompt", "messages", "answer", "verifier", "settings", "options")
MOST_REQUESTS = 2**22  # of one run: all of them are made before the first is answered
# An option of every sample alike would make n samples one.
_NO_OPTIONS = ("id", "prompt", "messages", "tokens", "seed")


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
      id: names it; sample k of it is the request `id#k`.
      prompt: text of a user message, or a list of messages.
      verify: the verdict on a reply to it.
      options: of this item alone, as in a prompt file: `max_tokens`, `tools`, ...
      place: FILE:LINE, for errors.
    """

    id: str
    prompt: Any
    verify: Verifier
    options: Mapping[str, Any]
    place: str


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Items with what they have in common; `options` hold where the caller asks for no other."""

    name: str
    about: str
    items: tuple[Item, ...]
    options: Mapping[str, Any]
    path: Path

    def first(self, limit: int | None) -> Task:
        """The task of the first `limit` items; of all of them for None."""
        return dataclasses.replace(self, items=self.items[:limit])


def find_task(name: str) -> Path:
    """The file of a shipped task, or the path itself.

    Raises ValueError where there is neither.
    """
    if name in resources.task_names():
        return resources.task_file(name)
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"unknown task {name!r}: give one of {', '.join(resources.task_names())}, or the path "
            "of a task file"
        )
    return path


def read_task(path: Path) -> Task:
    """The task in a file.

    Raises ValueError with the line and what is wrong there; OSError where it cannot be read.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            values, places = read_prompt_lines(str(path), file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    return make_task(values, places, path)


def make_task(values: Sequence[Mapping[str, Any]], places: Sequence[str], path: Path) -> Task:
    """The task of a head and items, as `read_task` finds them in the file `path`.

    Raises ValueError with the place and what is wrong there.
    """
    head = _head(values[0], places[0])
    items = tuple(
        _item(value, place, head) for value, place in zip(values[1:], places[1:], strict=True)
    )
    if not items:
        raise ValueError(f'{path} has no items: write {{"id": ..., "prompt": ..., "answer": ...}}')
    seen: dict[str, str] = {}
    for item in items:
        if item.id in seen:
            raise ValueError(
                f"{item.place}: id {reprlib.repr(item.id)} is also that of {seen[item.id]}; ids "
                "are names"
            )
        seen[item.id] = item.place
    return Task(head["task"], head.get("about", ""), items, head.get("options", {}), path)


def _head(value: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    if "task" not in value:
        raise ValueError(
            f'{place}: the first line must describe the task, such as {{"task": "sums", '
            '"verifier": "number"}'
        )
    _check_keys(value, _HEAD, place)
    for key in ("task", "about"):
        if not isinstance(value.get(key, "-"), str) or not value.get(key, "-"):
            raise ValueError(f"{place}: {key} must be a text, got {reprlib.repr(value[key])}")
    _check_mappings(value, place)
    return value


def _item(value: Mapping[str, Any], place: str, head: Mapping[str, Any]) -> Item:
    _check_keys(value, _ITEM, place)
    _check_mappings(value, place)
    name = value.get("id")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{place}: id must be a text that is not empty, got {reprlib.repr(name)}")
    if ("prompt" in value) == ("messages" in value):
        raise ValueError(f"{place}: give 'prompt' or 'messages', one of the two")
    if "answer" not in value:
        raise ValueError(f"{place}: 'answer' is missing: what would be right?")
    prompt = value.get("prompt", value.get("messages"))
    if not isinstance(prompt, str if "prompt" in value else list) or not prompt:
        raise ValueError(
            f"{place}: prompt must be a text and messages a list, neither of them empty; got "
            f"{reprlib.repr(prompt)}"
        )
    verifier = value.get("verifier", head.get("verifier"))
    # The task's settings are of the task's verifier.
    common = head.get("settings", {}) if verifier == head.get("verifier") else {}
    try:
        verify = verifiers.make(verifier, value["answer"], {**common, **value.get("settings", {})})
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return Item(name, prompt, verify, value.get("options", {}), place)


def _check_keys(value: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key in value:
        if key not in known:
            raise ValueError(
                f"{place}: unknown key {reprlib.repr(key)}; known are {', '.join(known)}"
            )


def _check_mappings(value: Mapping[str, Any], place: str) -> None:
    for key in ("settings", "options"):
        if not isinstance(value.get(key, {}), Mapping):
            raise ValueError(f"{place}: {key} must be an object, got {reprlib.repr(value[key])}")
    for key in _NO_OPTIONS:
        if key in value.get("options", {}):
            raise ValueError(
                f"{place}: options cannot have {key!r}: every sample has an id of its own and "
                "its seed from that"
            )


def task_text(head: Mapping[str, Any], items: Iterable[Mapping[str, Any]]) -> str:
    """The text of a task file."""
    lines = (json.dumps(one, ensure_ascii=False) for one in itertools.chain([head], items))
    return "".join(f"{line}\n" for line in lines)


# -- requests --------------------------------------------------------------------------------------


def request_id(item: str, sample: int) -> str:
    """The id of a sample's request: it names the sample's seed as well."""
    return f"{item}#{sample}"


def split_id(name: Any) -> tuple[str, int] | None:
    """Item and number of a sample's id; None for what is no such id."""
    item, mark, number = str(name).rpartition("#")
    if not mark or not number.isascii() or not number.isdecimal() or len(number) > 9:
        return None
    return (item, int(number)) if request_id(item, int(number)) == str(name) else None


def prompts(
    task: Task, samples: int, given: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """What `prompts.make_requests` takes: `samples` requests of every item, and their places.

    All samples of an item stand together. An item's own options hold always, the task's where the
    option is not among those `given` by the caller.

    Raises ValueError for more than `MOST_REQUESTS`.
    """
    if samples * len(task.items) > MOST_REQUESTS:
        raise ValueError(
            f"samples={samples} of {len(task.items)} items are {samples * len(task.items):,} "
            f"requests, at most {MOST_REQUESTS:,} are made: lower the samples or take fewer items"
        )
    common = {key: value for key, value in task.options.items() if key not in given}
    found, places = [], []
    for item in task.items:
        form = "prompt" if isinstance(item.prompt, str) else "messages"
        for sample in range(samples):
            name = request_id(item.id, sample)
            found.append({"id": name, form: item.prompt, **common, **item.options})
            places.append(item.place)
    return found, places


def shipped_task_of(names: Iterable[Any]) -> str | None:
    """The shipped task that has an item of one of these request ids."""
    wanted = {split[0] for split in map(split_id, names) if split is not None}
    for task in resources.task_names():
        if any(item.id in wanted for item in read_task(resources.task_file(task)).items):
            return task
    return None
