"""States and masks: exact, unchanged by looking, replayable; drafts cut; failures stay."""

import json
import random
import re

import hypothesis
import hypothesis.strategies as st
import jsonschema
import numpy as np
import pytest

from deepinfer_jax import grammar
from deepinfer_jax.grammar import Compiler, Grammar, GrammarLimits, GrammarSettings
from tests.grammar import walks

EOS = 1
COMPACT = {"whitespace_flexible": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["é", "日本", "x"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": {"a": [1, "b"]}}]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": -1.5}], "items": False},
    {"enum": ["a", 1, None, {"b": []}, "😀"]},
    {"$ref": "#/$defs/pair", "$defs": {"pair": {"type": "array", "items": {"type": "null"},
                                                "minItems": 2, "maxItems": 2}}},
    {"type": "string", "pattern": "^[a-f]{2,4}(-[0-9]{2})?$"},
    {"allOf": [{"type": "integer", "minimum": 17}, {"maximum": 23}, {"multipleOf": 3}]},
    {"type": "string", "format": "date"},
]  # fmt: skip
EXPRESSIONS = [
    "(ab|é日){2,3}x?",
    r"\d{3}-[A-F]{1,2}",
    "yes|no|perhaps( not)?",
    r"[^a-z\x00-\x1f]{2,5}",
    "",
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_random_replies_validate(schema):
    given = grammar.start(walks.compiled("json", {**schema, "x-guidance": COMPACT}))
    validator = jsonschema.Draft202012Validator(schema)
    for seed in range(8):
        text = walks.reply(walks.random_walk(given, seed))
        validator.validate(json.loads(text))


@pytest.mark.exhaustive
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_many_random_replies_validate(schema):
    given = grammar.start(walks.compiled("json", {**schema, "x-guidance": COMPACT}))
    validator = jsonschema.Draft202012Validator(schema)
    for seed in range(400):
        validator.validate(json.loads(walks.reply(walks.random_walk(given, seed))))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_random_replies_match(expression):
    given = grammar.start(walks.compiled("regex", expression))
    for seed in range(8):
        assert re.fullmatch(expression, walks.reply(walks.random_walk(given, seed)))


@pytest.mark.parametrize("seed", range(5))
def test_every_tokenization_of_a_valid_text_is_allowed(seed):
    value = {"name": "Zoë", "age": 41, "tags": ["日本", "é"], "more": {"a": [1, "b"]}}
    given = grammar.start(walks.compiled("json", PERSON))
    for layout in ({"indent": 2}, {"separators": (",", ":")}, {}):
        text = json.dumps(value, ensure_ascii=False, **layout)
        assert walks.takes(given, walks.tokenizer().encode_user(text))
        assert walks.takes(given, walks.random_tokens(text.encode(), seed))


def test_a_lark_grammar():
    text = 'start: greeting " " NAME "!"\ngreeting: "hi" | "ho"\nNAME: /[A-Z][a-z]{1,4}/'
    given = grammar.start(walks.compiled("ebnf", text))
    for seed in range(8):
        assert re.fullmatch("(hi|ho) [A-Z][a-z]{1,4}!", walks.reply(walks.random_walk(given, seed)))


LETTERS = st.text(alphabet='abé日😀 "{\\', max_size=5)


@hypothesis.given(st.lists(LETTERS, min_size=1, max_size=4), st.integers(0, 2**16))
@hypothesis.settings(max_examples=25)
def test_a_mask_is_what_the_bytes_say(texts, seed):
    """Against all texts of the language: what may come is what begins one of their rests."""
    language = {text.encode() for text in texts}
    pattern = "|".join(f"({_spelled(text)})" for text in texts)
    state, sofar = grammar.start(walks.compiled("regex", pattern)), b""
    draw = random.Random(seed)
    while not state.phase.finished:
        rests = [text[len(sofar) :] for text in language if text.startswith(sofar)]
        begun = {rest[:size] for rest in rests for size in range(1, len(rest) + 1)}
        wanted = {walks.by_bytes()[word] for word in begun if word in walks.by_bytes()}
        wanted |= {EOS} if b"" in rests else set()
        assert walks.allowed(state) == sorted(wanted)
        assert state.may_end == (EOS in wanted)
        token = draw.choice(sorted(wanted))
        sofar += b"" if token == EOS else walks.tokenizer().token_bytes[token]
        state = walks.step(state, token)


def _spelled(text):
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


def test_a_mask_and_the_judgement_of_single_tokens_agree():
    state = grammar.start(walks.compiled("json", PERSON))
    text = '{"name": "Zoë", "age": 41, "tags": ["日本"], "more": {"a":[1,"b"]}}'
    for token in walks.tokenizer().encode_user(text):
        state.cursor.go(state.taken)
        single = [t for t in range(walks.vocabulary().size) if state.cursor.accepts((t,)) == 1]
        assert [t for t in walks.allowed(state) if t != EOS] == single
        state = walks.step(state, token)


# -- states are values -----------------------------------------------------------------------------


def test_masks_leave_the_state_unchanged():
    state = grammar.start(walks.compiled("json", {**PERSON, "x-guidance": COMPACT}))
    draw = random.Random(5)
    for token in walks.random_walk(state, 5):
        before = walks.row(state)
        drafts = [draw.choice(walks.allowed(state)) for _ in range(5)]
        grammar.masks(state, drafts)
        np.testing.assert_array_equal(walks.row(state), before)
        state = walks.step(state, token)


def test_an_old_state_still_works():
    begin = grammar.start(walks.compiled("json", {**PERSON, "x-guidance": COMPACT}))
    tokens = walks.random_walk(begin, 2)
    states, rows = [begin], [walks.row(begin)]
    for token in tokens:
        states.append(walks.step(states[-1], token))
        rows.append(walks.row(states[-1]))
    draw = random.Random(2)
    for place in draw.sample(range(len(states)), len(states)):
        np.testing.assert_array_equal(walks.row(states[place]), rows[place])


def test_replay_gives_an_equal_state():
    made = walks.compiled("json", {**PERSON, "x-guidance": COMPACT}, trigger_token_ids=(7, 20))
    free = [25, 7, 7, 20]
    tail = walks.random_walk(walks.step(grammar.start(made), *free), 3)
    tokens, state, draw = free + tail, grammar.start(made), random.Random(3)
    for count, token in enumerate(tokens):
        fresh = walks.step(grammar.start(made), *tokens[:count])
        assert fresh == state
        np.testing.assert_array_equal(walks.row(fresh), walks.row(state))
        grammar.masks(state, [draw.randrange(2048), *tokens[count : count + 2]])
        state = walks.step(state, token)
    assert state == walks.step(grammar.start(made), *tokens)
    assert state.phase.finished
    assert state.status == 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("begin", [{}, {"trigger_token_ids": (7, 20, 7), "bound_token_id": 30}])
def test_drafts_are_cut_at_the_first_illegal_one(seed, begin):
    state = grammar.start(walks.compiled("json", {**PERSON, "x-guidance": COMPACT}, **begin))
    free = [25, 7, 20, 25, 30, 7, 20, 7] if begin else []
    right = free + walks.random_walk(walks.step(state, *free), seed)
    draw = random.Random(seed)
    for place in range(0, len(right), 3):
        drafts = right[place : place + 5]
        if draw.random() < 0.7:
            drafts[draw.randrange(len(drafts))] = draw.randrange(-1, walks.vocabulary().size + 3)
        looked, behind, legal = grammar.masks(state, drafts), state, 0
        for draft in drafts:
            np.testing.assert_array_equal(looked.rows[legal], walks.row(behind))
            if not behind.phase.finished and draft not in walks.allowed(behind):
                break
            behind, legal = walks.step(behind, draft), legal + 1
        assert looked.legal == legal
        assert (looked.rows[legal + 1 :] == 0xFFFFFFFF).all()
        state = walks.step(state, *right[place : place + 3])


def test_the_end():
    given = grammar.start(walks.compiled("regex", "ab*"))
    assert given.status == 1
    assert EOS not in walks.allowed(given)
    begun = walks.step(given, *walks.tokenizer().encode_user("ab"))
    assert EOS in walks.allowed(begun)
    over = walks.step(begun, EOS)
    assert over.may_end
    assert (walks.row(over) == 0xFFFFFFFF).all()  # nothing reads what follows
    assert walks.step(over, 25) == over
    looked = grammar.masks(begun, [EOS, 25])
    assert looked.legal == 2
    closed = grammar.start(walks.compiled("json", {"const": 1}))
    closed = walks.step(closed, *walks.tokenizer().encode_user("1"))
    assert walks.allowed(closed) == [EOS]


def test_the_published_status():
    made = walks.compiled("regex", "ab*", trigger_token_ids=(7, 20), bound_token_id=30)
    state = grammar.start(made)
    letter = walks.by_bytes()[b"a"]
    for token, status in ((25, 0), (7, 0), (20, 1), (letter, 2), (EOS, 2)):
        state = walks.step(state, token)
        assert state.status == status
    forced = walks.step(grammar.start(made), 30)
    assert forced.status == 1
    assert walks.allowed(forced) == [7]
    assert walks.step(forced, 7).status == 2
    assert grammar.advance(forced, [letter]).status == -1


def test_a_forbidden_token_fails_the_state_for_good():
    given = grammar.start(walks.compiled("regex", "ab*"))
    wrong = walks.tokenizer().encode_user("ba")
    failed = grammar.advance(given, wrong)
    assert failed.status == -1
    assert failed.failure is not None
    assert "tokens[0] is" in str(failed.failure)
    assert grammar.advance(failed, wrong) is failed
    assert grammar.masks(failed).failure is failed.failure
    late = [*walks.tokenizer().encode_user("ab"), EOS, 9, 25]
    assert walks.step(given, *late).phase.finished  # what comes after the end is not looked at
    wrong = [*late[:-3], 3, EOS, 9]
    assert f"tokens[{len(late) - 3}] is 3," in str(grammar.advance(given, wrong).failure)
    assert "tokens[0] is 1," in str(grammar.advance(given, [EOS]).failure)
    assert grammar.advance(given, [3]).failure is not None
    assert EOS not in walks.allowed(given)  # the state itself is as it was


def test_a_limit_at_a_step_fails_the_request_alone():
    limits = GrammarLimits(max_lexer_states=40)
    tight = Compiler(walks.vocabulary(), GrammarSettings(limits=limits))
    poisoned = grammar.start(tight.compile(Grammar("regex", "(a|b)*a(a|b){12}")))
    sound = grammar.start(tight.compile(Grammar("regex", "a*")))
    draw = random.Random(0)
    for _ in range(200):
        looked = grammar.masks(poisoned)
        if looked.failure is not None:
            break
        poisoned = grammar.advance(poisoned, [draw.choice(walks.ids(looked.rows[0]))])
        if poisoned.failure is not None:
            break
        assert walks.row(sound).any()
    failure = poisoned.failure or grammar.masks(poisoned).failure
    assert failure is not None
    assert failure.reason == "limit"
    assert "max_lexer_states" in str(failure)
    assert walks.row(sound).any()


def test_a_grammar_that_asks_for_a_control_token_later_comes_to_an_end_with_the_reason():
    state = grammar.start(walks.compiled("ebnf", 'start: "a" <[6]>'))
    token = walks.by_bytes()[b"a"]
    looked = grammar.masks(state, [token])
    assert looked.legal == 0  # behind it no mask could be made
    assert looked.failure is None
    failure = grammar.masks(walks.step(state, token)).failure
    assert failure is not None
    assert failure.reason == "unsatisfiable"


def test_a_batch_of_masks():
    words = walks.vocabulary()
    state = grammar.start(walks.compiled("regex", "a*"))
    looked = grammar.masks(state, [walks.by_bytes()[b"a"], 25])
    packed = grammar.stack([None, looked], 5, words)
    assert packed.shape == (2, 5, -(-words.size // 32))
    assert packed.dtype == np.uint32
    assert (packed[0] == 0xFFFFFFFF).all()
    np.testing.assert_array_equal(packed[1, :3], looked.rows)
    assert (packed[1, 3:] == 0xFFFFFFFF).all()
    mask = np.asarray(grammar.expand(packed, words.size))
    assert np.flatnonzero(mask[1, 0]).tolist() == walks.allowed(state)
