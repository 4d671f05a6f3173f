"""What one training document is: a prompt, the answer, and the exact check of an answer."""

import dataclasses
import json
import zlib
from collections.abc import Callable
from typing import Any

from deepinfer_jax.training.corpus.draw import Draw

Message = dict[str, Any]

THINK_END = "</think>"
EOS = "<｜end▁of▁sentence｜>"

HELD_OUT_ONE_IN = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One document of the corpus.

    `prompt_messages` are role/content dictionaries; `answer` is the visible reply (a DSML block
    where it calls a tool); `reasoning` is the text of the think pair, None where thinking is off.
    `check(completion)` says whether any completion, with or without its reasoning, is right.
    """

    task: str
    prompt_messages: tuple[Message, ...]
    answer: str
    check: Callable[[str], bool]
    reasoning: str | None = None
    effort: int = 75
    tools: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None

    @property
    def completion(self) -> str:
        """The text that follows the prompt, without the end token."""
        if self.reasoning is None:
            return self.answer
        return self.reasoning + THINK_END + self.answer


@dataclasses.dataclass(frozen=True)
class Task:
    """A family of examples.

    `draw` picks the combination that a held-out split keeps whole; `build` makes an example of it,
    free in everything the combination does not name. `weight` is the share of documents. A task of
    facts to know by heart is `memorised`: nothing of it is held out.
    """

    name: str
    weight: float
    draw: Callable[[Draw], tuple]
    build: Callable[[Draw, tuple], Example]
    memorised: bool = False


def is_held_out(task: str, combination: tuple) -> bool:
    """Whether this whole combination is kept out of training; a function of its text alone."""
    key = f"{task}:{combination!r}".encode()
    return zlib.crc32(key) % HELD_OUT_ONE_IN == 0


def final_part(completion: str) -> str:
    """The visible reply in a completion: what follows the think pair, up to the end token."""
    return completion.rpartition(THINK_END)[2].partition(EOS)[0].strip()


def says_exactly(expected: str, completion: str) -> bool:
    """Check: the reply is this text."""
    return final_part(completion) == expected


def says_json(expected: Any, completion: str) -> bool:
    """Check: the reply is JSON of this value, member order and spaces free."""
    try:
        value = json.loads(final_part(completion))
    except ValueError:
        return False
    return _same_json(value, expected)


def _same_json(value: Any, expected: Any) -> bool:
    """Equality that keeps true and 1, and 1 and 1.0, apart."""
    return json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True)


def user(text: str) -> tuple[Message, ...]:
    """A conversation of one user message."""
    return ({"role": "user", "content": text},)


def effort_of(draw: Draw) -> int:
    """A reasoning effort: mostly the default."""
    return draw.pick((50, 75, 75, 100))
