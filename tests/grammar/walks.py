"""Walks through grammars: what the tests of this folder share."""

import functools
import random

import numpy as np

from deepinfer_jax import grammar, resources, text
from deepinfer_jax.grammar import Compiled, Compiler, Grammar, State

EXTRA = 7  # ids that the model has and the tokenizer lacks


@functools.cache
def tokenizer() -> text.Tokenizer:
    return text.load_tokenizer(resources.model_folder("spark-tiny"))


@functools.cache
def vocabulary() -> grammar.Vocabulary:
    return grammar.make_vocabulary(tokenizer(), size=tokenizer().vocab_size + EXTRA)


@functools.cache
def compiler() -> Compiler:
    return Compiler(vocabulary())


def compiled(kind: str, schema: object, **start: object) -> Compiled:
    return compiler().compile(Grammar(kind, schema, **start))  # type: ignore[arg-type]


def allowed(state: State) -> list[int]:
    """Ids that may come next, ascending."""
    return ids(row(state))


def row(state: State) -> np.ndarray:
    looked = grammar.masks(state)
    assert looked.failure is None, looked.failure
    return looked.rows[0]


def ids(packed: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(packed.view(np.uint8), bitorder="little")).tolist()


def step(state: State, *tokens: int) -> State:
    after = grammar.advance(state, tokens)
    assert after.failure is None, after.failure
    return after


def random_walk(state: State, seed: int, most: int = 400) -> list[int]:
    """Tokens of a random reply, with its end token."""
    draw = random.Random(seed)
    tokens = []
    while not state.phase.finished:
        assert len(tokens) < most, tokenizer().decode(tokens)
        tokens.append(draw.choice(allowed(state)))
        state = step(state, tokens[-1])
    return tokens


def ending_walk(state: State, seed: int, most: int = 300) -> list[int] | None:
    """A random reply to a grammar that need not end, drawn towards what closes and ends.

    Mostly of single characters of a few kinds, so that names are hit and numbers come near bounds.
    None where it does not get there: a string that has to hold a certain word somewhere.
    """
    draw = random.Random(seed)
    closing = {by_bytes()[word] for word in (b'"', b"}", b"]")}
    small = {by_bytes()[bytes([byte])] for byte in b'ab"\\u061:,{}[]0123456789-.eEtrufalsn+'}
    tokens = []
    while not state.phase.finished:
        if len(tokens) == most:
            return None
        may = allowed(state)
        near = [token for token in may if token in closing]
        single = [token for token in may if token in small]
        if vocabulary().eos in may and draw.random() < 0.3:
            may = [vocabulary().eos]
        elif near and draw.random() < 0.3:
            may = near
        elif single and draw.random() < 0.7:
            may = single
        tokens.append(draw.choice(may))
        state = step(state, tokens[-1])
    return tokens


def reply(tokens: list[int]) -> str:
    """The text of a finished reply; its bytes must be UTF-8."""
    table = tokenizer().token_bytes
    assert tokens[-1] == tokenizer().eos
    return b"".join(table[token] for token in tokens[:-1]).decode("utf-8")


def random_tokens(data: bytes, seed: int) -> list[int]:
    """Some tokenization of `data`, seldom the canonical one."""
    draw = random.Random(seed)
    tokens = []
    while data:
        size = draw.choice([n for n in range(1, 13) if data[:n] in by_bytes()])
        tokens.append(by_bytes()[data[:size]])
        data = data[size:]
    return tokens


@functools.cache
def by_bytes() -> dict[bytes, int]:
    known = tokenizer()
    table = enumerate(known.token_bytes)
    return {word: token for token, word in table if token not in known.control_ids}


def takes(state: State, tokens: list[int]) -> bool:
    """Whether masks let `tokens` through one by one, and the reply end after them."""
    looked = grammar.masks(state, [*tokens, vocabulary().eos])
    assert looked.failure is None, looked.failure
    return looked.legal == len(tokens) + 1
