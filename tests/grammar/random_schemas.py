"""Random JSON schemas, for walks without a model and with one."""

import random
from typing import Any

_NAMES = ("a", "b", "name", "größe", "日", 'quo"te', "x y")
_FEW = ("a", "b", "ab", "aa")  # names that meet, and meet patterns
_PATTERNS = ("^[a-c]{1,4}$", "^(ab|cd)+$", "^[0-9]{2}-[A-Z]$", "é{1,3}")


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of finite replies, with at most `depth` levels of arrays and objects."""
    makers = [_string, _integer, _number, _choice, _plain]
    if depth:
        makers += [_object, _object, _array, _tuple, _any_of]
    maker = draw.choice(makers)
    return maker(draw, depth - 1)


def _string(draw: random.Random, _: int) -> dict[str, Any]:
    if draw.random() < 0.4:
        return {"type": "string", "pattern": draw.choice(_PATTERNS), "maxLength": 8}
    least = draw.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(6)}


def _integer(draw: random.Random, _: int) -> dict[str, Any]:
    low = draw.randrange(-1000, 1000)
    schema = {"type": "integer", "minimum": low, "exclusiveMaximum": low + draw.randrange(10, 300)}
    return {**schema, "multipleOf": draw.choice([2, 3, 5])} if draw.random() < 0.3 else schema


def _number(draw: random.Random, _: int) -> dict[str, Any]:
    low = draw.randrange(-50, 50) / 4
    return {"type": "number", "minimum": low, "maximum": low + draw.randrange(1, 40) / 4}


def _choice(draw: random.Random, _: int) -> dict[str, Any]:
    values = ["x", "日本", 0, -2.5, True, None, {"k": [1, {}]}, ["é"], ""]
    return {"enum": draw.sample(values, draw.randint(1, 4))}


def _plain(draw: random.Random, _: int) -> dict[str, Any]:
    return {"type": draw.choice(["boolean", "null", ["null", "boolean"]])}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.5],
        "additionalProperties": False,
    }
    if draw.random() < 0.2:
        schema["additionalProperties"] = {"type": "boolean"}
        schema |= {"required": names, "maxProperties": len(names) + 2}
    return schema


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randrange(3)
    inner = random_schema(draw, depth)
    return {"type": "array", "items": inner, "minItems": least, "maxItems": least + 2}


def _tuple(draw: random.Random, depth: int) -> dict[str, Any]:
    inner = [random_schema(draw, depth) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)}


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(draw, depth) for _ in range(draw.randint(2, 3))]}


def untidy_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema as nobody would write it: types left out, constraints that cross each other.

    Many cannot be compiled, and most have replies without end.
    """
    makers = [_few_strings, _bounded, _choice_of_few, _one_type, _typeless]
    if depth:
        makers += [_untidy_object, _untidy_object, _untidy_array, _combined]
    return draw.choice(makers)(draw, depth - 1)


def _maybe(draw: random.Random, chance: float, **values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if draw.random() < chance}


def _few_strings(draw: random.Random, _: int) -> dict[str, Any]:
    patterns = ["a", "^a", "b$", "^[^a]*$", "(ab)+", "^.{2}$", "a|b", r"^\S+$"]
    rest = _maybe(
        draw,
        0.5,
        minLength=draw.randrange(3),
        maxLength=draw.randrange(3, 5),
        pattern=draw.choice(patterns),
    )
    return {"type": "string", **rest}


def _bounded(draw: random.Random, _: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw.choice(["integer", "number"])}
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        bounds = [draw.randrange(-30, 30), draw.randrange(-300, 300) / 8, draw.randrange(2000)]
        schema |= _maybe(draw, 0.35, **{name: draw.choice(bounds)})
    return schema | _maybe(draw, 0.3, multipleOf=draw.choice([2, 3, 5, 0.5, 0.25]))


def _choice_of_few(draw: random.Random, _: int) -> dict[str, Any]:
    values = ["a", "b", 1, 0, -1, 1.5, None, True, {"a": 1}, [], ["a"], {}, {"a": "b"}]
    return {"enum": draw.sample(values, draw.randint(1, 4))}


def _one_type(draw: random.Random, _: int) -> dict[str, Any]:
    types = ["null", "boolean", ["string", "null"], ["integer", "string"]]
    return {"type": draw.choice(types), "minimum": 3, "maxLength": 2}


def _typeless(draw: random.Random, _: int) -> dict[str, Any]:
    names = ["minimum", "maxLength", "maxItems", "minItems", "minProperties", "maxProperties"]
    return draw.choice([{}, {"required": ["a"]}, *({name: 1} for name in names)])


def _untidy_object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_FEW, draw.randrange(4))
    schema = _maybe(
        draw,
        0.7,
        type="object",
        properties={name: untidy_schema(draw, depth) for name in names},
        additionalProperties=draw.choice([False, untidy_schema(draw, depth)]),
    )
    return schema | _maybe(
        draw,
        0.3,
        required=draw.sample(_FEW, draw.randrange(3)),
        patternProperties={draw.choice(["^a", "b$", "^[^a]*$"]): untidy_schema(draw, depth)},
        minProperties=draw.randrange(4),
        maxProperties=draw.randrange(1, 4),
    )


def _untidy_array(draw: random.Random, depth: int) -> dict[str, Any]:
    inner = [untidy_schema(draw, depth) for _ in range(draw.randint(1, 2))]
    schema = _maybe(
        draw,
        0.6,
        type="array",
        prefixItems=inner,
        items=draw.choice([False, True, untidy_schema(draw, depth)]),
    )
    return schema | _maybe(draw, 0.4, minItems=draw.randrange(3), maxItems=draw.randrange(1, 4))


def _combined(draw: random.Random, depth: int) -> dict[str, Any]:
    word = draw.choice(["anyOf", "allOf", "oneOf"])
    schema = {word: [untidy_schema(draw, depth) for _ in range(2)]}
    return schema | untidy_schema(draw, 0) if draw.random() < 0.3 else schema
