"""Our part of JSON Schema against the `jsonschema` package."""

from __future__ import annotations

import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.evaluation import schemas

_NAMES = st.sampled_from("abc")
_NUMBERS = st.integers(-3, 3) | st.sampled_from([-1.5, 0.0, 0.5, 1.0, 2.0])
VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.text("xyé", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=6,
)
_TYPE = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
_COUNT = st.integers(0, 3)


def _keywords(inner):
    return st.fixed_dictionaries(
        {},
        optional={
            "type": _TYPE | st.lists(_TYPE, min_size=1, max_size=3, unique=True),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "const": VALUES,
            "required": st.lists(_NAMES, unique=True, max_size=2),
            **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _COUNT),
            **dict.fromkeys(
                ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBERS
            ),
            "properties": st.dictionaries(_NAMES, inner, max_size=3),
            "additionalProperties": inner,
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=3),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "title": st.text(max_size=2),
        },
    )


SCHEMAS = st.recursive(st.booleans() | _keywords(st.booleans()), _keywords, max_leaves=4)


@given(schema=SCHEMAS, value=VALUES)
def test_the_verdict_is_that_of_jsonschema(schema, value):
    schemas.check_schema(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert (schemas.violation(value, schema) is None) == valid


def test_every_keyword_is_tried():
    tried = {"title"} | set(schemas.KEYWORDS)
    assert tried == {
        "type", "enum", "const", "required", "minItems", "maxItems", "minLength", "maxLength",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "properties",
        "additionalProperties", "items", "anyOf", "allOf", "title",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        ({"a": [1, "x"]}, {"properties": {"a": {"items": {"type": "integer"}}}},
         "$['a'][1] must be integer, got 'x'"),
        ({"\x1b[2J": 1}, {"additionalProperties": False}, "$['\\x1b[2J'] may not be there"),
        ({}, {"required": ["a"]}, "$ lacks 'a'"),
        ([1, 2], {"maxItems": 1}, "$ must have at most 1, has 2"),
        (3, {"exclusiveMaximum": 3}, "$ must be below 3, got 3"),
        (3, {"anyOf": [{"type": "string"}, False]},
         "$ fits none of anyOf: $ must be string, got 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(value, schema, said):
    assert schemas.violation(value, schema) == said


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "schema must be an object, true or false, got []"),
        ({"items": {"$ref": "#"}}, "schema.items has the keyword '$ref'"),
        ({"properties": [1]}, "schema.properties must be an object, got [1]"),
        ({"properties": {"a": 3}}, "schema.properties.a must be an object"),
        ({"anyOf": []}, "schema.anyOf must be a list, got []"),
        ({"type": "float"}, "schema.type cannot be 'float'"),
        ({"type": []}, "schema.type cannot be []"),
        ({"minItems": True}, "schema.minItems cannot be True"),
        ({"minimum": "3"}, "schema.minimum cannot be '3'"),
        ({"required": "a"}, "schema.required cannot be 'a'"),
        ({"enum": 3}, "schema.enum cannot be 3"),
    ],
)
def test_schemas_that_are_none(schema, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        schemas.check_schema(schema)


def test_schemas_nested_too_deep_are_refused():
    schema = True
    for _ in range(80):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested deeper than 64 schemas"):
        schemas.check_schema(schema)
