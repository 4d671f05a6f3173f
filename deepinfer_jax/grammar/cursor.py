"""A llguidance matcher as a place in a text that can be moved about.

The matcher is the only thing here that changes. Whoever asks says which tokens it should have
taken, so its place is a cache: what it answers depends on those tokens alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_jax.grammar import bits
from deepinfer_jax.grammar.errors import GrammarError, explain
from deepinfer_jax.grammar.vocabulary import Vocabulary


def allows(row: np.ndarray, token: int) -> bool:
    """Whether the packed `row` [W] has the bit of `token`."""
    word, bit = divmod(token, bits.WORD)
    return bool(int(row[word]) >> bit & 1)


class Cursor:
    """One matcher, at the start of its grammar.

    `prototype` is a matcher at the start, of a grammar of this `kind`; it is copied, never moved.
    """

    def __init__(self, kind: str, vocabulary: Vocabulary, prototype: Any):
        self._kind = kind
        self._vocabulary = vocabulary
        self._prototype = prototype
        self._restart()

    def _restart(self) -> None:
        self._matcher = self._prototype.deep_copy()
        self._base: tuple[int, ...] = ()
        self._ahead: tuple[int, ...] = ()

    def go(self, base: tuple[int, ...], ahead: tuple[int, ...] = ()) -> None:
        """Stand after the tokens base + ahead, of which each must be allowed where it stands.

        Cheap where `base` is the very tuple of last time. Raises GrammarError at a limit.
        """
        if self._matcher.is_error():
            self._restart()
        keep = self._shared(base, ahead)
        drop = len(self._base) + len(self._ahead) - keep
        if drop and not self._matcher.rollback(drop):
            self._restart()
            keep = 0
        past = keep - len(base)
        feed = ahead[past:] if past >= 0 else base[keep:] + ahead
        if not self._feed(feed):
            self._restart()  # a limit that all the detours had worn down, perhaps
            if not self._feed(base + ahead):
                raise self._failure()
        self._base, self._ahead = base, ahead

    def settle(self) -> tuple[int, ...]:
        """All tokens up to this place, as one tuple that `go` will know again."""
        if self._ahead:
            self._base, self._ahead = self._base + self._ahead, ()
        return self._base

    def row(self) -> np.ndarray:
        """Mask [W] uint32 of what may come next; the end token where the grammar may end.

        Raises GrammarError where nothing may, or at a limit.
        """
        packed = self._mask()
        if self._matcher.is_error():
            base, ahead = self._base, self._ahead
            self.go(base, ahead)  # afresh
            packed = self._mask()
            if self._matcher.is_error():
                raise self._failure()
        if self._matcher.is_accepting():
            word, bit = divmod(self._vocabulary.eos, bits.WORD)
            packed[word] |= np.uint32(1 << bit)
        if not packed.any():
            raise GrammarError(
                "unsatisfiable",
                f"no token can follow the {len(self._base) + len(self._ahead)} tokens that the "
                "grammar has taken: it asks for a control token or for bytes that the vocabulary "
                "lacks; take that out of it",
            )
        return packed

    def accepts(self, tokens: tuple[int, ...]) -> int:
        """How many of `tokens`, of text, may come next one after the other."""
        row = self._vocabulary.text
        for place, token in enumerate(tokens):
            if not 0 <= token < self._vocabulary.size or not allows(row, token):
                return self._matcher.validate_tokens(list(tokens[:place]))
        return self._matcher.validate_tokens(list(tokens))

    def may_end(self) -> bool:
        """Whether the text so far is one of the grammar's."""
        return self._matcher.is_accepting()

    def _mask(self) -> np.ndarray:
        text = self._vocabulary.text
        # The library has a bit more than there are ids, and with it a word where V fills its words.
        packed = np.frombuffer(self._matcher.compute_bitmask(), "<u4")[: len(text)]
        return packed.astype(np.uint32) & text

    def _feed(self, tokens: tuple[int, ...]) -> bool:
        return not tokens or self._matcher.consume_tokens(list(tokens))

    def _shared(self, base: tuple[int, ...], ahead: tuple[int, ...]) -> int:
        """How many tokens the place asked for and the present one begin with together."""
        if base is self._base:
            return len(base) + _same(self._ahead, ahead)
        return _same(self._base + self._ahead, base + ahead)

    def _failure(self) -> GrammarError:
        return explain(self._kind, self._matcher.get_error())


def _same(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(place for place in range(size) if a[place] != b[place])
