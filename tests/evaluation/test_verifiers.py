"""Verifiers: what they take for right, what for wrong, and that no text upsets them."""

from __future__ import annotations

import json
import re
import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.evaluation import verifiers
from deepinfer_jax.evaluation.numbers import last_number

ONE_OF_EACH = [
    ("exact", "a red kite", {}),
    ("exact", ["yes", "Yes, it is."], {"strict": True}),
    ("exact", "42", {"after": "Answer:"}),
    ("number", 72, {}),
    ("number", "2.5", {"tolerance": 0.25, "relative": 1e-3}),
    ("sorted", [3, 5, 11], {}),
    ("sorted", ["pig", "owl", "ant"], {"descending": True}),
    ("json", {"name": "Mia", "ages": [3, 5.5, None, True]}, {}),
    ("json-schema", {"type": "object", "properties": {"age": {"minimum": 3}}, "items": False}, {}),
    ("choice", "C", {"choices": ["red", "green", "blue"]}),
    ("choice", "F", {}),
]
# Pieces that the verifiers look for, put together at random beside free text.
_PIECES = st.sampled_from(
    ["Answer:", "answer is ", "\\boxed{", "```json\n", "```", "{", "}", "[", '"a":', "(B)", "-",
     "−", "1e5", "1,234", ".5", "NaN", "\n", " ",
     "</think>", "C", ":", "e999999", "²", "\ud800", "\0"]
)  # fmt: skip
TEXTS = st.one_of(
    st.text(), st.lists(_PIECES | st.text(max_size=3) | st.integers().map(str)).map("".join)
)


def right(name, answer, reply, **settings):
    verdict = verifiers.make(name, answer, settings)(reply)
    assert verdict.right == (not verdict.reason)
    return verdict.right


@pytest.mark.parametrize(("name", "answer", "settings"), ONE_OF_EACH)
@given(reply=TEXTS)
def test_any_text_has_a_verdict(name, answer, settings, reply):
    verdict = verifiers.make(name, answer, settings)(reply)
    assert verdict.right == (verdict.reason == "")
    assert "\n" not in verdict.reason
    assert len(verdict.reason) < 300


@pytest.mark.parametrize(("name", "answer", "settings"), ONE_OF_EACH)
@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1,111",
        "-",
        "(",
        " ",
        "\n",
        "answer ",
        "\\boxed{",
        "```",
        "[",
        '{"a":',
        "e1",
        "B ",
        ".",
    ],
)
def test_long_texts_take_no_long_time(name, answer, settings, piece):
    verify = verifiers.make(name, answer, settings)
    start = time.process_time()
    verify(piece * (60_000 // len(piece)))
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("reply", "taken"),
    [
        ("A red kite", True),
        ("  a  red\n kite. ", True),
        ("**a red kite**", True),
        ('"a red kite"', True),
        ("a red kite!", False),
        ("It is a red kite", False),
        ("", False),
    ],
)
def test_exact(reply, taken):
    assert right("exact", "a red kite", reply) == taken


def test_exact_to_the_letter():
    assert right("exact", "The kite.", " The  kite.\n", strict=True)
    assert not right("exact", "The kite.", "The kite", strict=True)
    assert not right("exact", "The kite.", "the kite.", strict=True)
    assert right("exact", "caf\u00e9", "cafe\u0301", strict=True)
    assert right("exact", ["a", "b"], "b", strict=True)
    assert not right("exact", "5", ".5")


def test_exact_behind_a_mark():
    def taken(reply):
        return right("exact", "x^2", reply, after="Answer:")

    assert taken("Answer: no.\nOn second thought, **Answer:** x^2\nSure.")
    assert taken("ANSWER:\n\nx^2")
    assert taken("Answer: $x^2$.")
    assert not taken("x^2")
    assert not taken("Answer: x^2 or so")
    assert not taken("Answer:")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("27 + 45 = 72", "72"),
        ("It is 72.", "72"),
        ("first 3, then 1,234,567.5 at last", "1234567.5"),
        ("5-3", "3"),
        ("= -3", "-3"),
        ("= −3", "-3"),
        ("x^{2}-3", "3"),
        ("\\boxed{204}", "204"),
        ("1.5e-3", "0.0015"),
        ("1e99999999999", "99999999999"),
        (".5", "0.5"),
        ("Step.5", "5"),
        ("1,23", "23"),
        ("٣", None),
        ("none", None),
    ],
)
def test_the_last_number(text, number):
    found = last_number(text)
    assert (None if found is None else found) == (None if number is None else last_number(number))
    assert (found is None) == (number is None)


@given(
    number=st.integers(-(10**9), 10**9).map(Decimal) | st.decimals(-(10**9), 10**9, places=3),
    before=st.text("ab =:(", max_size=9).filter(lambda text: not text.endswith(("a", "b"))),
    after=st.sampled_from(["", ".", " dollars", ")", "}$", "\n"]),
)
def test_a_number_is_found_wherever_it_stands(number, before, after):
    assert right("number", str(number), f"{before}{number:f}{after}")
    assert not right("number", str(number), f"{before}{number + 1:f}{after}")


def test_numbers_are_equal_or_near_as_asked():
    assert right("number", 0.1, "0.10")
    assert not right("number", 0.1, "0.1000000000000000055511151231257827")
    assert not right("number", 1, "1." + "0" * 5000 + "1")
    assert right("number", 1, "1." + "0" * 5000 + "1", tolerance=1e-9)
    assert right("number", 200, "199", relative=0.005)
    assert not right("number", 200, "198.9", relative=0.005)
    assert right("number", 10, "9.5", tolerance=0.5)
    assert right("number", "025", "25")
    assert not right("number", 5, "1e999999", tolerance=1)


@given(items=st.lists(st.integers(), min_size=1) | st.lists(st.sampled_from("abcdefg"), min_size=1))
def test_lists_in_every_spelling(items):
    ordered = sorted(items)
    texts = [str(item) for item in ordered]
    for reply in (" ".join(texts), ", ".join(texts) + ".", f"Sorted: [{', '.join(texts)}]",
                  json.dumps(texts), "3 1 2\n" + "; ".join(texts) + "\n"):  # fmt: skip
        assert right("sorted", ordered, reply)
    assert right("sorted", ordered, " ".join(map(str, items))) == (items == ordered)
    assert not right("sorted", ordered, " ".join(texts[1:]))
    assert not right("sorted", ordered, " ".join([*texts, texts[-1]]))


def test_what_is_wrong_with_a_list():
    verify = verifiers.make("sorted", [1, 2, 2], {})
    assert verify("2 1 2").reason == "the right items in the wrong order"
    assert verify("1 2").reason == "lacks '2'"
    assert verify("1 2 2 2").reason == "has '2' too often"
    assert verify("").reason == "no list in the last line of the reply"


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)


@given(value=_VALUES, indent=st.sampled_from([None, 1]))
def test_json_is_equal_to_itself(value, indent):
    text = json.dumps(value, indent=indent, sort_keys=True)
    assert right("json", value, text)
    assert right("json", value, f"Here it is:\n```json\n{text}\n```\nDone.")
    assert not right("json", [value], text)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ('{"b": [true, 2.0], "a": 1}', ""),
        ('{"a": 1, "b": [1, 2]}', "$.b[0]: expected True, got 1"),
        ('{"a": 1, "b": [true]}', "$.b must have 2 items, has 1"),
        ('{"a": 1}', "$ lacks 'b'"),
        ('{"a": 1, "b": [true, 2], "c": 0}', "$ has 'c' besides"),
        ('{"a": 2, "a": 1, "b": [true, 2]}', "key 'a' appears twice"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ("[" * 100_000, "nested too deep"),
        ("", "not JSON: Expecting value at character 0"),
    ],
)
def test_what_is_wrong_with_json(reply, reason):
    assert verifiers.make("json", {"a": 1, "b": [True, 2]}, {})(reply).reason == reason


def test_the_last_block_that_was_closed():
    assert right("json", 2, "```\n1\n```\nor\n```json\n2\n```")
    assert right("json", 1, "```\n1\n```\nor\n```json\n2")
    assert not right("json", 1, "```\n1")


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("B) green", "B"),
        ("B: green", "B"),
        ("The answer is B.", "B"),
        ("Answer: A? No.\n\n**Answer:** (B)", "B"),
        ("ANSWER:\nB", "B"),
        ("so \\boxed{\\text{B}}", "B"),
        ("A good question. The answer is \\boxed{B}.", "B"),
        ("green", "B"),
        ("Green.", "B"),
        ("A green one", None),
        ("Answer: Apple", None),
        ("I think so", None),
        ("b", None),
        ("", None),
    ],
)
def test_the_letter_of_a_choice(reply, letter):
    choices = ["red", "green", "blue"]
    verdicts = {each: verifiers.make("choice", each, {"choices": choices})(reply) for each in "ABC"}
    assert [each for each in "ABC" if verdicts[each].right] == ([letter] if letter else [])


def test_choices_that_differ_by_case_only_are_told_apart():
    settings = {"choices": ["Hb", "HB"]}
    assert verifiers.make("choice", "B", settings)("HB").right
    assert verifiers.make("choice", "B", settings)("hb").reason == "no letter in the reply"
    assert verifiers.make("choice", "A", settings)("Answer: D").reason == "D is none of A to B"


@pytest.mark.parametrize(
    ("name", "answer", "settings", "message"),
    [
        ("eval", "1", {}, "must be one of exact, number, sorted, json, json-schema, choice"),
        (None, "1", {}, "got None"),
        (["exact"], "1", {}, "verifier must be one of"),
        ("json", [float("nan")], {}, "answer must be a value of JSON, got [nan]"),
        ("json", 1, {"case": True}, "verifier json has no setting 'case'; it has none"),
        ("exact", "a", {"case": True}, "no setting 'case'; known are strict, after"),
        ("exact", "", {}, "answer must be a text that is not empty, got ''"),
        ("exact", " . ", {}, "answer must be a text that is not empty"),
        ("exact", [], {}, "answer must be a text or a list of texts, got []"),
        ("exact", 7, {}, "got 7"),
        ("exact", ["a", 7], {}, "got 7"),
        ("exact", "a", {"strict": 1}, "strict must be true or false, got 1"),
        ("exact", "a", {"after": ""}, "after must be a text that is not empty"),
        ("number", "many", {}, "answer must be a finite number, got 'many'"),
        ("number", True, {}, "got True"),
        ("number", float("nan"), {}, "got nan"),
        ("number", 1, {"tolerance": -1}, "tolerance must not be negative, got -1"),
        ("number", 1, {"relative": "inf"}, "relative must be a finite number, got 'inf'"),
        ("sorted", [2, 1], {}, "answer must be sorted, got [2, 1]"),
        ("sorted", [1, 2], {"descending": True}, "answer must be sorted"),
        ("sorted", [1, "a"], {}, "whole numbers, or words without white space"),
        ("sorted", ["a b"], {}, "words without white space"),
        ("sorted", [], {}, "a list that is not empty"),
        ("sorted", "abc", {}, "a list that is not empty, got 'abc'"),
        ("sorted", [1], {"descending": 0}, "descending must be true or false"),
        ("json-schema", {"pattern": "a"}, {}, "schema has the keyword 'pattern'; known are type"),
        ("choice", "E", {"choices": ["a", "b", "c"]}, "answer must be one of A to C, got 'E'"),
        ("choice", "b", {}, "answer must be one of A to Z, got 'b'"),
        ("choice", ["A"], {}, "answer must be one of A to Z"),
        ("choice", "A", {"choices": ["a"]}, "choices must be 2 to 26, got 1"),
        ("choice", "A", {"choices": ["a", "a"]}, "choices must all be different"),
        ("choice", "A", {"choices": "ab"}, "choices must be a list of texts, got 'ab'"),
        ("choice", "A", {"choices": ["a", ""]}, "choices must be texts that are not empty"),
    ],
)  # fmt: skip
def test_what_no_verifier_can_have(name, answer, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        verifiers.make(name, answer, settings)
