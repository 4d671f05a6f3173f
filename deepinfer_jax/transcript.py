"""The reply of one request as it grows: text, stop strings, and why it ended."""

from __future__ import annotations

from deepinfer_jax.requests import FinishReason, Request
from deepinfer_jax.text import Tokenizer

_UNKNOWN = "\ufffd"  # text of an id that the model has and the tokenizer has not


class Transcript:
    """Takes the tokens of one reply, one by one; where it ends depends on them alone.

    `finished` is None until the reply has ended. `text` is then final; before, `push` returns only
    what no stop string can take back. A stop string that is complete before the reply has
    `min_tokens` is passed over and stays in the text.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, eos: int):
        options = request.options
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.text = ""
        self.finished: FinishReason | None = None
        self._released = 0
        self._left = options.max_tokens
        self._least = options.min_tokens
        self._ends = set(options.ends(eos))
        self._stop = options.stop
        self._vocab_size = tokenizer.vocab_size
        self._stream = tokenizer.stream()

    def push(self, token: int) -> str:
        """Append a token; the text that is certain now and was not before."""
        assert self.finished is None, "the reply has ended"
        self.tokens.append(token)
        self._left -= 1
        if token in self._ends:
            self.finished = "stop"
            piece = self._stream.finish()
        else:
            known = token < self._vocab_size
            piece = self._stream.push([token]) if known else self._stream.finish() + _UNKNOWN
        before = len(self.text)
        self.text += piece
        cut = self._first_stop(before) if len(self.tokens) >= self._least else None
        if cut is not None:
            self.text, self.finished = self.text[:cut], "stop"
        elif self.finished is None and self._left == 0:
            self.finished = "length"
            rest = self._stream.finish()
            piece, self.text = piece + rest, self.text + rest
        self.pieces.append(piece)
        end = len(self.text) - (0 if self.finished else self._held_back())
        fresh, self._released = self.text[self._released : end], max(self._released, end)
        return fresh

    def _first_stop(self, before: int) -> int | None:
        """Where the first stop string begins that the text after `before` completes."""
        found = [
            place
            for stop in self._stop
            if (place := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        return min(found, default=None)

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
