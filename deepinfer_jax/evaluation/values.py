"""Verifiers of JSON: equal to a value, or valid under a schema."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Callable
from typing import Any

from deepinfer_jax import strict_json
from deepinfer_jax.evaluation import schemas
from deepinfer_jax.evaluation.verdicts import RIGHT, Verdict, wrong


def read(reply: str) -> Any:
    """The JSON value that a reply is, or that its last fenced block (```) holds.

    Raises ValueError with the reason: not JSON, a key that comes twice, NaN, nested too deep.
    """
    try:
        return _parse(reply)
    except ValueError:
        block = _last_block(reply)
        if block is None:
            raise
        return _parse(block)


def _parse(text: str) -> Any:
    try:
        return json.loads(
            text, object_pairs_hook=strict_json.once, parse_constant=strict_json.no_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _last_block(text: str) -> str | None:
    parts = text.split("```")
    if len(parts) < 3:
        return None
    block = parts[-2] if len(parts) % 2 else parts[-3]
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip().lower() in ("", "json") else block


def _judged(reply: str, fault: Callable[[Any, Any], str | None], answer: Any) -> Verdict:
    """Wrong where the reply is no JSON, or has a fault beside the answer."""
    try:
        found = read(reply)
    except ValueError as error:
        return wrong(str(error))
    said = fault(found, answer)
    return RIGHT if said is None else wrong(said)


@dataclasses.dataclass(frozen=True, slots=True)
class Json:
    """The reply is JSON of this value: order of keys and white space are free.

    1 and 1.0 are one number, true and 1 are not.
    """

    answer: Any

    def __post_init__(self) -> None:
        try:
            json.dumps(self.answer, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                f"answer must be a value of JSON, got {reprlib.repr(self.answer)}"
            ) from None

    def __call__(self, reply: str) -> Verdict:
        """The verdict on a reply."""
        return _judged(reply, schemas.difference, self.answer)


@dataclasses.dataclass(frozen=True, slots=True)
class JsonSchema:
    """The reply is JSON that is valid under this schema (`schemas` has the keywords)."""

    answer: Any

    def __post_init__(self) -> None:
        schemas.check_schema(self.answer)

    def __call__(self, reply: str) -> Verdict:
        """The verdict on a reply."""
        return _judged(reply, schemas.violation, self.answer)
