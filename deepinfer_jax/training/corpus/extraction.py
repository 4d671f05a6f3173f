"""From a sentence to a JSON object with the fields asked for."""

import functools
import json

from deepinfer_jax.training.corpus import words
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.example import Example, Task, effort_of, says_json, user

_SENTENCES = {
    "person": (
        "{name} is {age} years old and lives in {city}.",
        "{name} from {city} is {age} years old.",
        "{name} lives in {city} and is {age} years old.",
    ),
    "worker": (
        "{name} is a {job} in {city} and likes {food}.",
        "{name} works as a {job} in {city} and eats {food} every day.",
    ),
    "sale": (
        "{name} bought {count} {color} {item} for {price} dollars.",
        "{name} paid {price} dollars for {count} {color} {item}.",
    ),
    "event": (
        "The {event} in {city} is on {day} at {hour}.",
        "On {day} at {hour} there is a {event} in {city}.",
    ),
    "birthday": (
        "{name} was born in {month} and has {count} {pet}.",
        "The birthday of {name} is in {month}, and {name} has {count} {pet}.",
    ),
}
_KINDS = tuple(_SENTENCES)
_WHOLE_NUMBERS = ("age", "count", "price", "hour")
_PETS = ("cats", "dogs", "rabbits", "birds", "fish")
_ITEMS = ("hats", "cups", "books", "balls", "kites", "lamps", "rings", "boxes", "apples", "pens")
_PROMPTS = (
    "Extract {fields} as JSON: {sentence}",
    "Extract {fields} as JSON: {sentence}",
    "Give me JSON with {fields}: {sentence}",
    "{sentence} Write {fields} as JSON.",
)


def _value(draw: Draw, field: str) -> str | int:
    """A value for a field."""
    choices = {
        "name": words.NAMES, "city": words.CITIES, "job": words.JOBS, "food": words.FOODS,
        "color": words.COLORS, "item": _ITEMS, "event": words.EVENTS, "day": words.DAYS,
        "month": words.MONTHS, "pet": _PETS,
    }  # fmt: skip
    ranges = {"age": (3, 90), "count": (2, 20), "price": (2, 99), "hour": (1, 12)}
    if field in ranges:
        return draw.between(*ranges[field])
    return draw.pick(choices[field])


_FIELDS = {
    "person": ("name", "age", "city"),
    "worker": ("name", "job", "city", "food"),
    "sale": ("name", "count", "color", "item", "price"),
    "event": ("event", "city", "day", "hour"),
    "birthday": ("name", "month", "count", "pet"),
}


def _draw_extraction(draw: Draw) -> tuple:
    kind = draw.pick(_KINDS)
    return (kind, *((field, _value(draw, field)) for field in _FIELDS[kind]))


def json_schema(fields: list[str]) -> dict:
    """The schema of an object with these fields, whole numbers or strings."""
    kinds = {field: "integer" if field in _WHOLE_NUMBERS else "string" for field in fields}
    return {
        "type": "object",
        "properties": {field: {"type": kind} for field, kind in kinds.items()},
        "required": fields,
    }


def _listed(fields: list[str]) -> str:
    return ", ".join(fields[:-1]) + " and " + fields[-1]


def _build_extraction(draw: Draw, combination: tuple) -> Example:
    kind, *pairs = combination
    values = dict(pairs)
    sentence = draw.pick(_SENTENCES[kind]).format_map(values)
    fields = list(values)[:4]
    if draw.chance(0.5):
        fields = draw.some(list(values), draw.between(2, min(4, len(values))))
    expected = {field: values[field] for field in fields}
    by_schema = draw.chance(0.2)
    prompt = sentence if by_schema else draw.pick(_PROMPTS)
    effort = effort_of(draw)
    notes = [f"{field}: {value}" for field, value in expected.items()]
    reasoning = (", " if effort == 50 else "\n").join(notes)
    return Example(
        task="json",
        prompt_messages=user(prompt.format(fields=_listed(fields), sentence=sentence)),
        answer=json.dumps(expected),
        check=functools.partial(says_json, expected),
        reasoning=reasoning if draw.chance(0.35) else None,
        effort=effort,
        schema=json_schema(fields) if by_schema else None,
    )


EXTRACTION = Task("json", 12, _draw_extraction, _build_extraction)
