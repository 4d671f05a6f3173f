"""The bridge to llguidance: bytes, control tokens, ids beyond the tokenizer, laziness."""

import subprocess
import sys

import pytest

from deepinfer_jax import grammar
from deepinfer_jax.grammar import vocabulary
from tests.grammar import walks

ANY_TEXT = "(?s:.*)"


def test_only_text_and_the_end_token_are_ever_allowed():
    known, words = walks.tokenizer(), walks.vocabulary()
    assert words.size == known.vocab_size + walks.EXTRA
    row = walks.allowed(grammar.start(walks.compiled("regex", ANY_TEXT)))
    assert set(row) & known.control_ids == {known.eos}
    assert max(row) < known.vocab_size
    printable = [i for i, word in enumerate(known.token_bytes) if word.isascii()]
    assert set(printable) - known.control_ids <= set(row)


def test_the_spelling_of_a_control_token_is_text_like_any_other():
    state = grammar.start(walks.compiled("ebnf", 'start: "<think>"'))
    tokens = walks.tokenizer().encode_user("<think>")
    assert walks.takes(state, tokens)
    assert walks.tokenizer().control_id("<think>") not in walks.allowed(state)


@pytest.mark.parametrize("extra", [0, 1, 31, 32, 33])
def test_any_number_of_ids_beyond_the_tokenizer(extra):
    """2048 ids fill their words; 2079 leave one bit; none of the extra ones is ever allowed."""
    known = walks.tokenizer()
    words = grammar.make_vocabulary(known, size=known.vocab_size + extra)
    state = grammar.start(grammar.Compiler(words).compile(grammar.Grammar("regex", ANY_TEXT)))
    row = grammar.masks(state).rows[0]
    assert len(row) == -(-words.size // 32)
    assert walks.ids(row) == walks.allowed(grammar.start(walks.compiled("regex", ANY_TEXT)))


@pytest.mark.parametrize("text", ["é", "日本", "😀", "a😀é\u2028"])
def test_characters_come_byte_by_byte(text):
    state = grammar.start(walks.compiled("json", {"const": text}))
    table = walks.tokenizer().token_bytes
    for byte in f'"{text}"'.replace("\n", "\\n").encode():
        single = walks.by_bytes()[bytes([byte])]
        row = walks.allowed(state)
        assert single in row
        assert all(table[token][0] == byte or token == 1 for token in row)
        state = walks.step(state, single)
    assert walks.allowed(state) == [walks.tokenizer().eos]


def test_a_character_cannot_be_cut_short():
    state = grammar.start(walks.compiled("regex", "é|[a-z]"))
    state = walks.step(state, walks.by_bytes()["é".encode()[:1]])
    assert walks.allowed(state) == [walks.by_bytes()["é".encode()[1:]]]


def test_fingerprints_tell_vocabularies_apart():
    base = vocabulary.from_bytes([b"a", b"b", None], eos=2)
    assert base == vocabulary.from_bytes([b"a", b"b", b""], eos=2)
    others = [
        vocabulary.from_bytes([b"a", b"c", None], eos=2),
        vocabulary.from_bytes([b"ab", b"", None], eos=2),
        vocabulary.from_bytes([b"a", b"b", None], eos=2, size=5),
        vocabulary.from_bytes([b"a", b"b", None], eos=1),
    ]
    assert len({base, *others}) == 5


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="size must be at least the tokenizer's 2 ids, got 1"):
        vocabulary.from_bytes([b"a", b"b"], eos=0, size=1)
    with pytest.raises(ValueError, match=r"eos must lie in 0\.\.1, got 2"):
        vocabulary.from_bytes([b"a", b"b"], eos=2)


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install deepinfer-jax\[structured\]"):
        vocabulary.from_bytes([b"a", b"b"], eos=0)


def test_the_package_does_not_import_llguidance():
    code = "import sys, deepinfer_jax.grammar; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
