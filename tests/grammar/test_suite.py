"""The JSON Schema Test Suite, draft 2020-12, token by token; and random schemas."""

import functools
import json
import random

import jsonschema
import pytest

from deepinfer_jax import grammar
from deepinfer_jax.grammar import GrammarError
from tests.grammar import keywords, walks
from tests.grammar.random_schemas import random_schema, untidy_schema

COMPACT = {"whitespace_flexible": False}

# Invalid instances that are taken: formats are checked by expressions, which do not count days of a
# month or know when a leap second was; \S is Unicode's, for which U+FEFF is no white space.
WIDE = {
    "optional/format/date-time": 2,
    "optional/format/date": 2,
    "optional/format/time": 10,
    "optional/ecmascript-regex": 1,
}
# Valid instances that are not taken, beside other orders of keys: an integer is written without a
# fraction and a constant as the schema writes it; a known format is a constraint, never a mere
# annotation; control characters without an escape letter of their own are not written; quoted
# e-mail addresses and IPv6 with an IPv4 tail are no part of the formats.
NARROW = {
    "const": 4,
    "enum": 4,
    "format": 10,
    "type": 1,
    "optional/ecmascript-regex": 3,
    "optional/float-overflow": 1,
    "optional/format/email": 4,
    "optional/format/ipv6": 4,
}
# What must stay supported, whatever else changes.
SUPPORTED = (
    "additionalProperties allOf anyOf const enum exclusiveMaximum exclusiveMinimum items maxItems "
    "maxLength maximum minItems minLength minimum multipleOf pattern prefixItems properties ref "
    "required type"
).split()


@functools.cache
def rows():
    return {row.file: row for row in keywords.run()}


def test_no_invalid_instance_is_taken():
    assert {file: len(row.wide) for file, row in rows().items() if row.wide} == WIDE


def test_every_valid_instance_is_taken():
    assert {file: len(row.narrow) for file, row in rows().items() if row.narrow} == NARROW


@pytest.mark.parametrize("keyword", SUPPORTED)
def test_a_supported_keyword(keyword):
    row = rows()[keyword]
    assert row.compiled >= 1
    assert row.valid > len(row.narrow)
    assert not row.wide


def test_the_page_is_up_to_date():
    page = keywords.PAGE.read_text("utf-8")
    current = keywords.page_with(keywords.section(list(rows().values())), page)
    assert page == current, "run python -m tests.grammar.keywords"


def test_random_replies_to_the_schemas_of_the_suite_validate():
    made = 0
    for file, groups in keywords.suite().items():
        for number, group in enumerate(groups):
            if isinstance(group["schema"], bool):
                continue
            try:
                compact = {**group["schema"], "x-guidance": COMPACT}
                state = grammar.start(walks.compiled("json", compact))
            except GrammarError:
                continue
            tokens = walks.ending_walk(state, number)
            if tokens is None:
                continue
            value = json.loads(walks.reply(tokens))
            if file != "optional/ecmascript-regex":  # the validator's expressions are Python's
                jsonschema.Draft202012Validator(group["schema"]).validate(value)
            made += 1
    assert made > 180


def generate_from_random_schemas(seeds: range) -> int:
    made = 0
    for seed in seeds:
        schema = random_schema(random.Random(seed))
        compact = {**schema, "x-guidance": COMPACT}
        try:
            state = grammar.start(walks.compiled("json", compact))
        except GrammarError as error:
            if error.reason != "unsatisfiable":
                raise
            continue
        text = walks.reply(walks.random_walk(state, seed, most=2000))
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        assert walks.takes(state, walks.tokenizer().encode_user(text))
        made += 1
    return made


def generate_from_untidy_schemas(seeds: range) -> int:
    made = 0
    for seed in seeds:
        schema = untidy_schema(random.Random(seed))
        try:
            state = grammar.start(walks.compiled("json", {**schema, "x-guidance": COMPACT}))
        except GrammarError as error:
            if error.reason == "invalid":
                raise
            continue
        for walk in range(3):
            tokens = walks.ending_walk(state, 3 * seed + walk, most=60)
            if tokens is not None:
                value = json.loads(walks.reply(tokens))
                jsonschema.Draft202012Validator(schema).validate(value)
                made += 1
    return made


def test_replies_to_untidy_schemas_validate():
    assert generate_from_untidy_schemas(range(150)) > 300


@pytest.mark.exhaustive
def test_thousands_of_replies_to_untidy_schemas_validate():
    assert generate_from_untidy_schemas(range(1000, 3000)) > 4000


def test_replies_to_random_schemas_validate():
    assert generate_from_random_schemas(range(150)) > 140


@pytest.mark.exhaustive
def test_a_thousand_replies_to_random_schemas_validate():
    assert generate_from_random_schemas(range(1000, 2050)) >= 1000
