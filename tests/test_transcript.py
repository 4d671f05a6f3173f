"""Text, stop strings and ends of one growing reply."""

import hypothesis.strategies as st
from hypothesis import given

from deepinfer_jax.requests import Options, Request
from deepinfer_jax.transcript import Transcript
from tests import tiny_model

EOS = 1


def request(**options):
    return Request("r", "p", (0,), 0, Options(**options))


def feed(tokens, **options):
    """The transcript after these tokens (or its end) and the pieces it released."""
    transcript = Transcript(request(**options), tiny_model.tokenizer(), EOS)
    released = []
    for token in tokens:
        released.append(transcript.push(token))
        if transcript.finished:
            break
    return transcript, released


replies = st.lists(st.sampled_from(range(2048)).filter(lambda t: t != EOS), max_size=12)
words = st.text("abe nt\n", min_size=1, max_size=4)


@given(reply=replies)
def test_an_ended_reply_reads_as_its_tokens(reply):
    transcript, released = feed([*reply, EOS])
    text = tiny_model.tokenizer().decode(reply)
    assert transcript.text == text == "".join(released) == "".join(transcript.pieces)
    assert transcript.tokens == [*reply, EOS]
    assert transcript.finished == "stop"


@given(text=words, more=words, stop=st.lists(words, min_size=1, max_size=3))
def test_a_stop_string_ends_the_text_before_it(text, more, stop):
    """Whatever tokens the text is made of; nothing released is ever taken back."""
    ids = tiny_model.tokenizer().encode_user(text) + tiny_model.tokenizer().encode_user(more)
    transcript, released = feed(ids, stop=stop)
    assert "".join(released) == transcript.text[: len("".join(released))]
    seen = tiny_model.tokenizer().decode(transcript.tokens)
    found = [seen.find(s) for s in stop if s in seen]
    if found:
        assert transcript.finished == "stop"
        assert transcript.text == seen[: min(found)] == "".join(released)
        before = tiny_model.tokenizer().decode(transcript.tokens[:-1])
        assert not any(s in before for s in stop)
    else:
        assert transcript.finished is None
        held = transcript.text[len("".join(released)) :]
        assert held == "" or any(s.startswith(held) for s in stop)


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_certain():
    tokenizer = tiny_model.tokenizer()
    ids = [tokenizer.encode_user(character)[0] for character in "xEN"]
    _, released = feed(ids, stop=["END"])
    assert released == ["x", "", ""]
    _, released = feed([*ids, EOS], stop=["END"])
    assert released == ["x", "", "", "EN"]


@given(reply=st.lists(st.integers(100, 2047), min_size=1, max_size=6))
def test_max_tokens_ends_with_length(reply):
    transcript, released = feed(reply, max_tokens=len(reply))
    assert transcript.finished == "length"
    assert "".join(released) == transcript.text == tiny_model.tokenizer().decode(reply)


def test_an_end_token_in_the_last_place_is_a_stop():
    transcript, _ = feed([500, EOS], max_tokens=2)
    assert transcript.finished == "stop"


def test_stop_token_ids_end_like_the_end_token():
    transcript, _ = feed([500, 600, 700], stop_token_ids=[600])
    assert (transcript.finished, transcript.tokens) == ("stop", [500, 600])
    assert transcript.text == tiny_model.tokenizer().decode([500])


def test_an_end_token_that_is_ignored_is_a_token_like_others():
    transcript, _ = feed([500, EOS, 600], ignore_eos=True, stop_token_ids=[600])
    assert (transcript.finished, transcript.tokens) == ("stop", [500, EOS, 600])
    assert transcript.text == tiny_model.tokenizer().decode([500, EOS])


@given(text=words, more=words, least=st.integers(0, 8))
def test_a_stop_string_ends_nothing_before_there_are_min_tokens(text, more, least):
    """The first token, from number `least` on, that completes one ends the reply before it."""
    ids = [tiny_model.tokenizer().encode_user(c)[0] for c in text + more + text]
    transcript, released = feed(ids, stop=[text], min_tokens=least)
    seen = [(text + more + text)[: n + 1] for n in range(len(ids))]
    ending = [n for n, part in enumerate(seen, 1) if n >= least and part.endswith(text)]
    assert len(transcript.tokens) == (ending[0] if ending else len(ids))
    assert (transcript.finished == "stop") == bool(ending)
    if ending:
        assert transcript.text == seen[ending[0] - 1][: -len(text)] == "".join(released)


def test_an_unfinished_character_at_the_end_reads_as_a_replacement():
    first = tiny_model.tokenizer().encode_user("€")[0]
    transcript, released = feed([first], max_tokens=1)
    assert transcript.text == "\ufffd" == "".join(released)


def test_an_id_that_the_tokenizer_does_not_know_reads_as_a_replacement():
    transcript, _ = feed([500, 5000, EOS])
    assert transcript.text == tiny_model.tokenizer().decode([500]) + "\ufffd"
