"""A JSON schema as llguidance should see it, so that whatever it lets through is valid.

Two things it lets through are not, and are dealt with here. A key may be spelled with `\\u`
escapes, so that it is not recognised as one that the schema names: such escapes are off, unless
the schema holds control characters, which have no other spelling. And keys that the schema does not
name may come twice, which a minimum of properties would count twice: refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from deepinfer_jax.grammar.errors import GrammarError

_ESCAPES = 'nrbtf\\"'
_CONTROL = re.compile(r"\\u00[01]")
_DATA = ("const", "enum", "default", "examples", "x-guidance")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def source(text: str) -> str:
    """The schema for llguidance, of the `text` of a `Grammar`."""
    schema = json.loads(text)
    if isinstance(schema, bool):
        return "{}" if schema else text
    options = schema.get("x-guidance", {})
    if isinstance(options, Mapping) and not _CONTROL.search(text):
        schema = {**schema, "x-guidance": {"json_allowed_escapes": _ESCAPES, **options}}
    return json.dumps(schema, separators=(",", ":"))


def check_minima(text: str) -> None:
    """Raise GrammarError for a `minProperties` that could be satisfied by one key twice."""
    for place, least, required in _minima(json.loads(text), "#"):
        if least > len(required) + 1:
            raise GrammarError(
                "unsupported",
                f"schema (JSON schema): minProperties is {least} at {place} and the required keys "
                f"are {len(required)}: the others are not kept from coming twice; require "
                f"{least - 1} keys by name, or leave minProperties out and check it in the "
                "finished text instead",
            )


def _minima(schema: Any, place: str) -> Iterator[tuple[str, int, list[str]]]:
    """Place, minProperties and required keys of every schema within that has a minProperties."""
    if not isinstance(schema, Mapping):
        return
    least, required = schema.get("minProperties"), schema.get("required", [])
    if isinstance(least, int | float) and isinstance(required, list):
        yield place, int(least), required
    for key, value in schema.items():
        if key in _DATA:
            continue
        if isinstance(value, list):
            inner = {str(number): one for number, one in enumerate(value)}
        else:
            inner = value if key in _NAMED and isinstance(value, Mapping) else {"": value}
        for name, one in inner.items():
            yield from _minima(one, f"{place}/{key}/{name}".removesuffix("/"))
