"""Verifiers of JSON: equal to a value, or valid under a schema."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from typing import Any

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
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {reprlib.repr(key)} comes twice")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _last_block(text: str) -> str | None:
    parts = text.split("```")
    if len(parts) < 3:
        return None
    block = parts[-2] if len(parts) % 2 else parts[-3]
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip().lower() in ("", "json") else block


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
        try:
            found = read(reply)
        except ValueError as error:
            return wrong(str(error))
        difference = schemas.difference(found, self.answer)
        return RIGHT if difference is None else wrong(difference)


@dataclasses.dataclass(frozen=True, slots=True)
class JsonSchema:
    """The reply is JSON that is valid under this schema (`schemas` has the keywords)."""

    answer: Any

    def __post_init__(self) -> None:
        schemas.check_schema(self.answer)

    def __call__(self, reply: str) -> Verdict:
        """The verdict on a reply."""
        try:
            found = read(reply)
        except ValueError as error:
            return wrong(str(error))
        violation = schemas.violation(found, self.answer)
        return RIGHT if violation is None else wrong(violation)
