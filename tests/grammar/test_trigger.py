"""The free phase: recorded vectors, and KMP against searching the whole reply."""

import hypothesis
import hypothesis.strategies as st

from deepinfer_jax import grammar
from deepinfer_jax.grammar import Compiler, Grammar, Phase, Trigger, trigger, vocabulary
from tests.grammar import walks

EOS = 1


def test_recorded_phases(recorded):
    for case in recorded("engine_misc/grammar_trigger.json")["cases"]:
        rule = Trigger(tuple(case["trigger_token_ids"]), case["bound_token_id"])
        phase = Phase()
        for wanted in case["states"]:
            if wanted["token"] is not None:
                after = trigger.advance(rule, phase, wanted["token"], case["eos_id"])
                assert (after is not None) == wanted["accepted"], case["name"]
                phase = after or phase
            assert described(rule, phase) == wanted_of(wanted), case["name"]


def described(rule, phase):
    forced = trigger.forced_next(rule, phase)
    return trigger.constrained(rule, phase), forced, phase.matched, phase.finished


def wanted_of(wanted):
    names = "constrained forced_next trigger_progress finished"
    return tuple(wanted[name] for name in names.split())


def test_recorded_states(recorded):
    """The same vectors through a whole matcher, whose grammar takes every text."""
    table = [bytes([0x40 + token]) for token in range(40)]
    words = vocabulary.from_bytes(table, eos=EOS)
    compiler = Compiler(words)
    for case in recorded("engine_misc/grammar_trigger.json")["cases"]:
        assert case["eos_id"] == EOS
        ids = case["trigger_token_ids"]
        asked = Grammar("regex", "(?s:.*)", ids, case["bound_token_id"])
        state = grammar.start(compiler.compile(asked))
        for wanted in case["states"]:
            if wanted["token"] is not None:
                legal = grammar.masks(state, [wanted["token"]]).legal
                assert legal == wanted["accepted"], case["name"]
                after = grammar.advance(state, [wanted["token"]])
                assert (after.failure is None) == wanted["accepted"], case["name"]
                state = after if wanted["accepted"] else state
            assert described(state.trigger, state.phase) == wanted_of(wanted), case["name"]
            if wanted["forced_next"] is not None:
                assert walks.allowed(state) == [wanted["forced_next"]]
            if not wanted["constrained"]:
                assert (walks.row(state) == 0xFFFFFFFF).all()


SMALL = st.integers(2, 4)


@hypothesis.given(st.lists(SMALL, min_size=1, max_size=5), st.lists(SMALL, max_size=30))
def test_progress_is_the_longest_end_that_begins_the_trigger(pattern, tokens):
    rule, phase = Trigger(tuple(pattern)), Phase()
    for count, token in enumerate(tokens, 1):
        phase = trigger.advance(rule, phase, token, EOS)
        heard = tokens[:count]
        sizes = range(min(len(pattern), count), -1, -1)
        longest = next(n for n in sizes if heard[count - n :] == pattern[:n])
        assert phase.matched == longest
        if longest == len(pattern):
            break


@hypothesis.given(
    st.lists(SMALL, min_size=1, max_size=5), st.integers(2, 5), st.lists(SMALL, max_size=20)
)
def test_after_the_bound_token_the_trigger_comes_at_once(pattern, bound, tokens):
    rule, phase = Trigger(tuple(pattern), bound), Phase()
    for token in [*tokens, bound]:
        phase = trigger.advance(rule, phase, token, EOS)
        if trigger.constrained(rule, phase):
            break
    forced = []
    while (token := trigger.forced_next(rule, phase)) is not None:
        forced.append(token)
        phase = trigger.advance(rule, phase, token, EOS)
    assert trigger.running(rule, phase)
    assert forced == pattern[len(pattern) - len(forced) :]


def test_an_end_token_in_the_free_phase_ends_the_reply():
    rule = Trigger((5, 6))
    phase = trigger.advance(rule, Phase(), EOS, EOS)
    assert phase == Phase(finished=True)
    assert trigger.advance(rule, phase, 5, EOS) == phase
