"""Compiling off the critical path: shared work, kept results, time-outs, poison."""

import subprocess
import sys
import threading

import pytest

from deepinfer_jax.grammar import Compiled, Compiler, Grammar, GrammarError, GrammarSettings
from deepinfer_jax.grammar import compiler as compiling
from tests.grammar import walks


class Clock:
    """Time that passes when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Gate:
    """Replaces `build`: grammars whose text has a door wait until it is opened."""

    def __init__(self, *doors):
        self.doors = {name: threading.Event() for name in doors}
        self.built = []
        self._build = compiling.build

    def __call__(self, grammar, vocabulary, limits):
        self.built.append(grammar.text)
        if grammar.text in self.doors:
            assert self.doors[grammar.text].wait(10)
        return self._build(grammar, vocabulary, limits)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate("slow", "slow2")
    monkeypatch.setattr(compiling, "build", gate)
    yield gate
    for door in gate.doors.values():
        door.set()


def test_one_text_is_compiled_once(gate):
    compiler = Compiler(walks.vocabulary())
    first = compiler.submit(Grammar("regex", "slow"))
    second = compiler.submit(Grammar("regex", "slow", (7,), 8))
    assert first.outcome() is None
    gate.doors["slow"].set()
    made, shared = first.wait(), second.wait()
    assert isinstance(made, Compiled)
    assert isinstance(shared, Compiled)
    assert shared.prototype is made.prototype
    assert shared.grammar.trigger_token_ids == (7,)
    third = compiler.submit(Grammar("regex", "slow")).outcome()
    assert third == made
    assert gate.built == ["slow"]
    assert compiler.compile(Grammar("ebnf", 'start: "slow"')) != made


def test_the_least_recently_used_goes_first(gate):
    compiler = Compiler(walks.vocabulary(), GrammarSettings(cache_entries=2))
    for text in "abacb":
        compiler.compile(Grammar("regex", text))
    assert gate.built == ["a", "b", "c", "b"]
    none = Compiler(walks.vocabulary(), GrammarSettings(cache_entries=0))
    for text in "aa":
        none.compile(Grammar("regex", text))
    assert gate.built[4:] == ["a", "a"]


def test_time_out_counts_from_submission_and_frees_the_worker(gate):
    clock = Clock()
    compiler = Compiler(walks.vocabulary(), GrammarSettings(workers=1, timeout_s=20), clock)
    slow = compiler.submit(Grammar("regex", "slow"))
    clock.now += 15
    queued = compiler.submit(Grammar("regex", "quick"))
    clock.now += 4.9
    assert slow.outcome() is None
    assert queued.outcome() is None
    assert gate.built == ["slow"]
    clock.now += 0.1
    timed_out = slow.outcome()
    assert isinstance(timed_out, GrammarError)
    assert timed_out.reason == "timeout"
    assert "not compiled 20 s after its submission" in str(timed_out)
    assert isinstance(queued.wait(), Compiled)
    gate.doors["slow"].set()
    # What comes too late is no longer this request's, but the next one's.
    assert isinstance(compiler.submit(Grammar("regex", "slow")).wait(), Compiled)
    assert slow.outcome() is timed_out
    assert gate.built == ["slow", "quick"]


def test_what_nobody_waits_for_any_more_is_not_begun(gate):
    clock = Clock()
    compiler = Compiler(walks.vocabulary(), GrammarSettings(workers=1, timeout_s=20), clock)
    compiler.submit(Grammar("regex", "slow"))
    stale = compiler.submit(Grammar("regex", "stale"))
    clock.now += 30
    outcome = stale.outcome()
    assert isinstance(outcome, GrammarError)
    assert outcome.reason == "timeout"
    compiler.compile(Grammar("regex", "fresh"))
    assert gate.built == ["slow", "fresh"]


def test_waiting_ends_with_the_time_out(gate):
    compiler = Compiler(walks.vocabulary(), GrammarSettings(timeout_s=0.05))
    outcome = compiler.submit(Grammar("regex", "slow")).wait()
    assert isinstance(outcome, GrammarError)
    assert outcome.reason == "timeout"


def test_a_poisoned_grammar_fails_alone(monkeypatch):
    build = compiling.build

    class Panic(BaseException):
        pass

    def breaking(grammar, vocabulary, limits):
        if grammar.text == "poison":
            raise Panic("index out of bounds")
        return build(grammar, vocabulary, limits)

    monkeypatch.setattr(compiling, "build", breaking)
    compiler = Compiler(walks.vocabulary(), GrammarSettings(workers=1))
    texts = ["a", "poison", "(", "b"]
    outcomes = [compiler.submit(Grammar("regex", text)) for text in texts]
    kinds = [type(ticket.wait()) for ticket in outcomes]
    assert kinds == [Compiled, GrammarError, GrammarError, Compiled]
    assert "index out of bounds" in str(outcomes[1].outcome())


def test_a_process_may_end_while_it_compiles():
    code = """
import time
from deepinfer_jax.grammar import Compiler, Grammar, GrammarSettings, vocabulary
words = vocabulary.from_bytes([None, *(bytes([i]) for i in range(256))], eos=0)
compiler = Compiler(words, GrammarSettings(workers=1))
for name in "ab":
    schema = {"enum": [f"{name}{i}" * 20 for i in range(50_000)]}
    ticket = compiler.submit(Grammar("json", schema))
time.sleep(0.1)
assert ticket.outcome() is None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_trigger_tokens_that_the_model_lacks_are_refused_at_submission():
    with pytest.raises(ValueError, match=r"trigger_token_ids must lie in 0\.\.\d+, got 5000"):
        walks.compiler().submit(Grammar("regex", "a", (5000,)))


@pytest.mark.parametrize(
    ("kind", "schema", "reason", "words"),
    [
        ("json", {"not": {}}, "unsupported", "keyword 'not' is not supported; leave out what"),
        (
            "json",
            {"type": "array", "uniqueItems": True, "contains": {}},
            "unsupported",
            "keywords 'contains', 'uniqueItems' are not|keywords 'uniqueItems', 'contains' are not",
        ),
        (
            "json",
            {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": False}},
            "unsupported",
            "'uniqueItems'",
        ),
        ("json", False, "unsatisfiable", "schema is false; loosen"),
        (
            "json",
            {"type": "string", "minLength": 5, "maxLength": 3},
            "unsatisfiable",
            r"minLength \(5\) is greater than maxLength \(3\)",
        ),
        ("json", {"$ref": "#"}, "unsatisfiable", "no text satisfies it"),
        ("json", {"type": "strin"}, "invalid", "Invalid type: strin"),
        ("json", {"format": "foo", "type": "string"}, "unsupported", "format: foo; use a `patt"),
        ("json", {"$ref": "http://x/y"}, "unsupported", "put the schema under"),
        ("json", {"oneOf": [{"minimum": 1}, {"maximum": 9}]}, "unsupported", "use `anyOf`"),
        (
            "json",
            {"patternProperties": {"f.*": {"type": "null"}, ".*b": {}}},
            "unsupported",
            "are not disjoint; write it in another way",
        ),
        ("json", {"pattern": "(?=a)b", "type": "string"}, "unsupported", "without look-ahead"),
        ("regex", "(", "invalid", "unclosed group"),
        ("regex", "(?<!a)b", "unsupported", "without look-ahead"),
        ("regex", r"[^\x00-\x{10FFFF}]", "unsatisfiable", "no text satisfies it"),
        ("ebnf", "start: a", "invalid", 'unknown name: "a"'),
        ("ebnf", "start: <think>", "unsupported", "control tokens cannot be part"),
        ("ebnf", "start: <[6]>", "unsatisfiable", "it asks for a control token"),
    ],
)
def test_what_cannot_be_compiled_is_said_with_the_way_to_mend(kind, schema, reason, words):
    with pytest.raises(GrammarError, match=words) as caught:
        walks.compiled(kind, schema)
    assert caught.value.reason == reason
    assert "no_forcing" not in str(caught.value)
    assert "place_holder" not in str(caught.value)
