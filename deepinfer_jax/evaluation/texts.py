"""Verifiers of text: equal after normalisation, and the letter of a multiple choice."""

from __future__ import annotations

import dataclasses
import re
import string
import unicodedata
from collections.abc import Sequence

from deepinfer_jax.evaluation.verdicts import RIGHT, Verdict, differs, wrong

_AROUND = " *_`\"'$"  # what people put around an answer and do not mean


def normalised(text: str, strict: bool = False) -> str:
    """`text` as it is compared: composed (NFC), every stretch of white space one space.

    Unless `strict`, case does not count either, nor quotes and emphasis around the text or a full
    stop at its end.
    """
    text = " ".join(unicodedata.normalize("NFC", text).split())
    if strict:
        return text
    return text.casefold().lstrip(_AROUND).rstrip(_AROUND + ".")


@dataclasses.dataclass(frozen=True, slots=True)
class Exact:
    """The reply is this text, or one of these texts.

    strict: see `normalised`. after: only what follows the last such text on its line counts (or
    the next line that is not empty), as of `Answer: 42`; its case is ignored.
    """

    answer: str | Sequence[str]
    strict: bool = False
    after: str | None = None

    def __post_init__(self) -> None:
        texts = [self.answer] if isinstance(self.answer, str) else self.answer
        if not isinstance(texts, Sequence) or not texts:
            raise ValueError(f"answer must be a text or a list of texts, got {self.answer!r}")
        if not isinstance(self.strict, bool):
            raise ValueError(f"strict must be true or false, got {self.strict!r}")
        for text in texts:
            if not isinstance(text, str) or not normalised(text, self.strict):
                raise ValueError(f"answer must be a text that is not empty, got {text!r}")
        if self.after is not None and (not isinstance(self.after, str) or not self.after.strip()):
            raise ValueError(f"after must be a text that is not empty, got {self.after!r}")

    def __call__(self, reply: str) -> Verdict:
        """The verdict on a reply."""
        if self.after is not None:
            marks = list(re.finditer(re.escape(self.after), reply, re.IGNORECASE))
            if not marks:
                return wrong(f"no {self.after!r} in the reply")
            reply = reply[marks[-1].end() :].lstrip(string.whitespace + _AROUND).partition("\n")[0]
        texts = [self.answer] if isinstance(self.answer, str) else self.answer
        found = normalised(reply, self.strict)
        if any(found == normalised(text, self.strict) for text in texts):
            return RIGHT
        return differs(texts[0], reply.strip())


def lettered(choices: Sequence[str]) -> str:
    """Lines "A. ..." of the choices, as a question lists them."""
    pairs = zip(string.ascii_uppercase, choices, strict=False)
    return "\n".join(f"{letter}. {text}" for letter, text in pairs)


_WRAP = r"(?:\\(?:text|textbf|mathbf|mathrm)\{){0,2}"
_END = r"(?![A-Za-z0-9'])"
# "Answer: B", "the answer is (B)", "\boxed{\text{B}}". Repetitions are bounded: linear in a reply.
_SAID = re.compile(
    rf"(?:(?i:answer)(?i:\s{{1,5}}is)?[\s:*_`$]{{0,20}}(?:\\boxed\{{)?|\\boxed\{{)"
    rf"{_WRAP}[(\[]?([A-Z]){_END}"
)
# The reply begins with the letter: "B", "(B)", "**B**", "B. Cold".
_FIRST = re.compile(r"[(\[*_`]{0,4}([A-Z])(?:[)\]*_`]{0,4}$|[)\]*_`]{1,4}\s|[)\]*_`]{0,4}[.:)])")


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The reply chooses this letter.

    It is found, in this order: behind the last "answer" or in the last \\boxed{}; at the beginning
    of the reply; as the text of one of `choices` (A is the first), where these are given.
    """

    answer: str
    choices: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.choices, str) or not isinstance(self.choices, Sequence):
            raise ValueError(f"choices must be a list of texts, got {self.choices!r}")
        if any(not isinstance(text, str) or not normalised(text) for text in self.choices):
            raise ValueError(f"choices must be texts that are not empty, got {self.choices!r}")
        if len({normalised(text, True) for text in self.choices}) != len(self.choices):
            raise ValueError(f"choices must all be different, got {self.choices!r}")
        if self.choices and not 2 <= len(self.choices) <= 26:
            raise ValueError(f"choices must be 2 to 26, got {len(self.choices)}")
        if not isinstance(self.answer, str) or self.answer not in self._letters():
            raise ValueError(f"answer must be one of {self._span()}, got {self.answer!r}")

    def _letters(self) -> list[str]:
        return list(string.ascii_uppercase[: len(self.choices) or 26])

    def _span(self) -> str:
        letters = self._letters()
        return f"{letters[0]} to {letters[-1]}"

    def __call__(self, reply: str) -> Verdict:
        """The verdict on a reply."""
        letter = self._chosen(reply.strip())
        if letter is None:
            return wrong("no letter in the reply")
        if letter not in self._letters():
            return wrong(f"{letter} is none of {self._span()}")
        return RIGHT if letter == self.answer else wrong(f"expected {self.answer}, got {letter}")

    def _chosen(self, reply: str) -> str | None:
        said = _SAID.findall(reply)
        if said:
            return said[-1]
        first = _FIRST.match(reply)
        if first is not None:
            return first[1]
        for strict in (True, False):
            whole = normalised(reply, strict)
            same = [i for i, text in enumerate(self.choices) if normalised(text, strict) == whole]
            if len(same) == 1:
                return self._letters()[same[0]]
        return None
