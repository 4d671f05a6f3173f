"""JSON values compared, and checked against the part of JSON Schema that tasks need.

Small on purpose: no references, no formats, and no expressions, which a reply could keep busy for
hours. A schema with another keyword is refused, never half applied.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_SHOWN = ("title", "description", "default", "examples", "$schema", "$comment")  # checked nowhere
_DEEPEST = 64  # schemas within schemas


def difference(found: Any, expected: Any, place: str = "$") -> str | None:
    """The first place where two JSON values differ, in words; None where there is none."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in expected:
            if key not in found:
                return f"{place} lacks {reprlib.repr(key)}"
        for key in found:
            if key not in expected:
                return f"{place} has {reprlib.repr(key)} besides"
        pairs = ((found[key], expected[key], f"{place}.{key}") for key in expected)
        return next(filter(None, (difference(*pair) for pair in pairs)), None)
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return f"{place} must have {len(expected)} items, has {len(found)}"
        rows = enumerate(zip(found, expected, strict=True))
        return next(filter(None, (difference(*row, f"{place}[{i}]") for i, row in rows)), None)
    if _kind(found) == _kind(expected) and found == expected:
        return None
    return f"{place}: expected {reprlib.repr(expected)}, got {reprlib.repr(found)}"


def _kind(value: Any) -> str:
    """The JSON type; a bool is an int in Python."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names = ((str, "string"), (list, "array"), (Mapping, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def _is(value: Any, name: str) -> bool:
    if name == "integer":
        return _kind(value) == "number" and (isinstance(value, int) or value.is_integer())
    return _kind(value) == name


# -- keywords: what one may hold, and what is wrong with a value under it --------------------------

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def _type(value: Any, names: Any) -> str | None:
    names = [names] if isinstance(names, str) else names
    if any(_is(value, name) for name in names):
        return None
    return f"must be {' or '.join(names)}, got {reprlib.repr(value)}"


def _enum(value: Any, allowed: Any) -> str | None:
    if any(difference(value, one) is None for one in allowed):
        return None
    return f"must be one of {reprlib.repr(allowed)}, got {reprlib.repr(value)}"


def _required(value: Any, names: Any) -> str | None:
    lacking = [name for name in names if isinstance(value, Mapping) and name not in value]
    return f"lacks {reprlib.repr(lacking[0])}" if lacking else None


def _sized(kind: type, least: bool) -> Callable[[Any, Any], str | None]:
    def check(value: Any, bound: Any) -> str | None:
        if not isinstance(value, kind) or (len(value) >= bound if least else len(value) <= bound):
            return None
        return f"must have {'at least' if least else 'at most'} {bound}, has {len(value)}"

    return check


def _bounded(word: str, fits: Callable[[Any, Any], bool]) -> Callable[[Any, Any], str | None]:
    def check(value: Any, bound: Any) -> str | None:
        if _kind(value) != "number" or fits(value, bound):
            return None
        return f"must be {word} {bound}, got {reprlib.repr(value)}"

    return check


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_types(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return _is_names(names) and bool(names) and all(name in _TYPES for name in names)


def _is_number(value: Any) -> bool:
    return _kind(value) == "number"


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_SIMPLE: Mapping[str, tuple[Callable[[Any], bool], Callable[[Any, Any], str | None]]] = {
    "type": (_is_types, _type),
    "enum": (_is_list, _enum),
    "const": (lambda value: True, lambda value, one: difference(value, one, "the value")),
    "required": (_is_names, _required),
    "minItems": (_is_count, _sized(list, True)),
    "maxItems": (_is_count, _sized(list, False)),
    "minLength": (_is_count, _sized(str, True)),
    "maxLength": (_is_count, _sized(str, False)),
    "minimum": (_is_number, _bounded("at least", lambda value, bound: value >= bound)),
    "maximum": (_is_number, _bounded("at most", lambda value, bound: value <= bound)),
    "exclusiveMinimum": (_is_number, _bounded("above", lambda value, bound: value > bound)),
    "exclusiveMaximum": (_is_number, _bounded("below", lambda value, bound: value < bound)),
}
_NESTED = ("properties", "additionalProperties", "items", "anyOf", "allOf")
KEYWORDS = (*_SIMPLE, *_NESTED)


def check_schema(schema: Any, place: str = "schema", depth: int = 0) -> None:
    """Raise ValueError unless `schema` is a schema of `KEYWORDS`; the message has the place."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"{place} must be an object, true or false, got {reprlib.repr(schema)}")
    if depth > _DEEPEST:
        raise ValueError(f"{place} is nested deeper than {_DEEPEST} schemas; flatten it")
    for key, value in schema.items():
        if key in _SHOWN:
            continue
        if key not in KEYWORDS:
            raise ValueError(
                f"{place} has the keyword {reprlib.repr(key)}; known are {', '.join(KEYWORDS)}"
            )
        if key in _SIMPLE and not _SIMPLE[key][0](value):
            raise ValueError(f"{place}.{key} cannot be {reprlib.repr(value)}")
    for inner, where in _inner(schema, place):
        check_schema(inner, where, depth + 1)


def _inner(schema: Mapping[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """The schemas within, each with its place."""
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ValueError(f"{place}.properties must be an object, got {reprlib.repr(properties)}")
    yield from ((inner, f"{place}.properties.{name}") for name, inner in properties.items())
    for key in ("additionalProperties", "items"):
        if key in schema:
            yield schema[key], f"{place}.{key}"
    for key in ("anyOf", "allOf"):
        if key in schema:
            if not _is_list(schema[key]):
                raise ValueError(f"{place}.{key} must be a list, got {reprlib.repr(schema[key])}")
            yield from ((inner, f"{place}.{key}[{i}]") for i, inner in enumerate(schema[key]))


def violation(value: Any, schema: Any, place: str = "$") -> str | None:
    """What is wrong with a JSON value under a checked schema, the first of it; None if valid."""
    if isinstance(schema, bool):
        return None if schema else f"{place} may not be there"
    for key, (_, check) in _SIMPLE.items():
        said = check(value, schema[key]) if key in schema else None
        if said is not None:
            return f"{place} {said}"
    return next(filter(None, _within(value, schema, place)), None)


def _within(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str | None]:
    if isinstance(value, Mapping):
        named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, inner in value.items():
            yield violation(inner, named.get(key, others), f"{place}[{reprlib.repr(key)}]")
    if isinstance(value, list):
        for i, inner in enumerate(value):
            yield violation(inner, schema.get("items", True), f"{place}[{i}]")
    for one in schema.get("allOf", ()):
        yield violation(value, one, place)
    if "anyOf" in schema:
        said = [violation(value, one, place) for one in schema["anyOf"]]
        yield None if None in said else f"{place} fits none of anyOf: {said[0]}"
