"""Descriptions of grammars: equal ones are equal, wrong ones are refused with the way to mend."""

import pytest

from deepinfer_jax.grammar import Grammar, GrammarLimits, GrammarSettings


def test_a_schema_as_text_and_as_a_dictionary_is_one_grammar():
    given = {"type": "object", "properties": {"a": {"const": "é"}}}
    text = '{ "type": "object",\n "properties": {"a": {"const": "\u00e9"}}}'
    assert Grammar("json", given) == Grammar("json", text)
    assert hash(Grammar("json", given)) == hash(Grammar("json", text))
    assert Grammar("json", True).text == Grammar("json", "true").text == "true"


def test_the_order_of_properties_is_part_of_a_schema():
    one, other = '{"properties":{"a":{},"b":{}}}', '{"properties":{"b":{},"a":{}}}'
    assert Grammar("json", one) != Grammar("json", other)


def test_a_grammar_is_a_value():
    grammar = Grammar("regex", "a+", [5, 6], 7)
    assert grammar.trigger_token_ids == (5, 6)
    assert {grammar: 1}[Grammar("regex", "a+", (5, 6), 7)] == 1


def test_so_args():
    given = {"schema_type": "json", "schema": {"type": "null"}}
    assert Grammar.from_so_args(given) == Grammar("json", '{"type":"null"}')
    start = {"trigger_token_ids": [7], "bound_token_id": 0}
    expected = Grammar("regex", "x", (7,), 0)
    assert Grammar.from_so_args({"schema_type": "regex", "schema": "x", **start}) == expected
    nothing = {"trigger_token_ids": None, "bound_token_id": None}
    assert Grammar.from_so_args({**given, **nothing}) == Grammar("json", '{"type":"null"}')


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("xml", "x"), "kind must be one of"),
        (("json", "{"), "schema is not a JSON schema"),
        (("json", '{"a":1,"a":2}'), "key 'a' appears twice"),
        (("json", '{"const":NaN}'), "NaN is no JSON number"),
        (("json", {"const": float("inf")}), "schema is not a JSON schema"),
        (("json", {"const": {1, 2}}), "set is no JSON type"),
        (("json", "[1]"), "must be a JSON object or boolean"),
        (("json", 3), "as text, dictionary or boolean, got int"),
        (("json", "[" * 100_000), "nested too deep"),
        (("regex", {"a": 1}), "must be text for kind 'regex', got dict"),
        (("ebnf", " \n"), "schema is empty"),
        (("regex", "a\ud800"), "half of a surrogate pair"),
        (("regex", "a", "57"), "trigger_token_ids must be a list of token ids"),
        (("regex", "a", [True]), "token ids"),
        (("regex", "a", [-1]), r"in \[0, 2\*\*31\), got -1"),
        (("regex", "a", [1], [2]), "bound_token_id must hold token ids"),
        (("regex", "a", [], 2), "bound_token_id=2 needs trigger_token_ids"),
    ],
)
def test_a_wrong_grammar_is_refused(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Grammar(*arguments)


@pytest.mark.parametrize(
    ("so_args", "words"),
    [
        ("json", "so_args must be a mapping"),
        ({"schema_type": "json"}, "so_args needs 'schema'"),
        ({"schema_type": "json", "schema": "{}", "strict": 1}, "unknown key 'strict'; known are"),
        ({"schema_type": "gbnf", "schema": ""}, "so_args: schema_type must be one of"),
        ({"schema_type": "regex", "schema": "a", "bound_token_id": 3}, "so_args: bound_token_id=3"),
    ],
)
def test_wrong_so_args_are_refused(so_args, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Grammar.from_so_args(so_args)


def test_trigger_tokens_must_be_of_the_model():
    Grammar("regex", "a", [7, 8], 9).check_token_ids(10, 1)
    with pytest.raises(ValueError, match=r"bound_token_id must lie in 0\.\.8, got 9"):
        Grammar("regex", "a", [7, 8], 9).check_token_ids(9, 1)
    with pytest.raises(ValueError, match="trigger_token_ids holds 7, the end token"):
        Grammar("regex", "a", [7, 8]).check_token_ids(10, 7)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GrammarSettings(workers=0), "workers must be in"),
        (lambda: GrammarSettings(timeout_s=float("nan")), "timeout_s must be positive"),
        (lambda: GrammarSettings(timeout_s="20"), "timeout_s must be a number"),
        (lambda: GrammarSettings(cache_entries=1.5), "cache_entries must be an integer"),
        (lambda: GrammarSettings(limits=None), "limits must be a GrammarLimits"),
        (lambda: GrammarLimits(step_lexer_fuel=0), "step_lexer_fuel must be in"),
    ],
)
def test_wrong_settings_are_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()
