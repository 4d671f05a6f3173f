"""What llguidance would let through although it is invalid, and what is done about it."""

import json

import jsonschema
import pytest

from deepinfer_jax import grammar
from deepinfer_jax.grammar import GrammarError
from tests.grammar import walks


def takes(schema, text):
    state = grammar.start(walks.compiled("json", schema))
    return walks.takes(state, walks.tokenizer().encode_user(text))


@pytest.mark.parametrize("name", ["a", 'q"', "é"])
def test_a_key_in_another_spelling_is_not_a_new_key(name):
    schema = {"properties": {name: {"type": "integer"}}, "additionalProperties": True}
    spelled = "".join(f"\\u{ord(character):04x}" for character in name)
    plain = json.dumps(name, ensure_ascii=False)
    assert takes(schema, f"{{{plain}:1}}")
    assert takes(schema, f'{{{plain}:1,"other":"x"}}')
    for text in (f'{{"{spelled}":"x"}}', f'{{{plain}:1,"{spelled}":"x"}}'):
        assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert not takes(schema, text)


def test_control_characters_come_where_the_schema_has_them():
    value = {"k\u0001": "\u0000\n"}
    assert takes({"const": value}, json.dumps(value))
    assert takes({"type": "string"}, json.dumps("\b\f\n\r\t"))
    assert not takes({"type": "string"}, json.dumps("\u0001"))


def test_escapes_are_the_schema_author_s_to_choose():
    options = {"json_allowed_escapes": "nu"}
    assert takes({"type": "string", "x-guidance": options}, json.dumps("\u0001"))
    assert not takes({"type": "string", "x-guidance": options}, json.dumps("\t"))


def test_a_minimum_of_properties_cannot_be_met_by_one_key_twice():
    with pytest.raises(GrammarError, match="minProperties is 2 at #/items and the required") as no:
        walks.compiled("json", {"items": {"minProperties": 2}})
    assert no.value.reason == "unsupported"
    named = {"properties": {"a": {}, "minProperties": {"type": "integer"}}, "required": ["a"]}
    schema = {**named, "minProperties": 2, "const": {"a": 1, "minProperties": 7}}
    assert takes(schema, '{"a":1,"minProperties":7}')
    least = {"required": ["a"], "minProperties": 2}
    assert takes(least, '{"a":1,"x":2}')
    assert not takes(least, '{"a":1,"a":2}')


def test_white_space_is_the_schema_author_s_to_choose():
    spaced = "[ null ,\n null ]"
    schema = {"type": "array", "items": {"type": "null"}}
    assert takes(schema, spaced)
    assert not takes({**schema, "x-guidance": {"whitespace_flexible": False}}, spaced)
    bounded = {**schema, "x-guidance": {"whitespace_pattern": "[ \\n]{0,2}"}}
    assert takes(bounded, spaced)
    assert not takes(bounded, "[   null]")
