"""The tokens of a model as llguidance needs them: the bytes of each, and which a reply may hold."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from deepinfer_jax.grammar import bits
from deepinfer_jax.text import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """Make it with `make_vocabulary` or `from_bytes`; equal fingerprints are equal vocabularies.

    Attributes:
      fingerprint: of everything else.
      size: V, ids of the model; there may be more of them than the tokenizer has.
      eos: the id that ends a reply.
      text: [W] uint32, packed: the ids that stand for text. Control tokens, the end token and ids
        beyond the tokenizer are not among them, whatever a grammar says.
      handle: llguidance's tokenizer.
    """

    fingerprint: str
    size: int
    eos: int
    text: np.ndarray = dataclasses.field(compare=False, repr=False)
    handle: Any = dataclasses.field(compare=False, repr=False)


def require_llguidance() -> ModuleType:
    """The llguidance module. Raises ImportError that says how to install it."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise ImportError(
            "structured output needs llguidance: pip install deepinfer-jax[structured]"
        ) from None


def make_vocabulary(
    tokenizer: Tokenizer, size: int | None = None, eos: int | None = None
) -> Vocabulary:
    """The vocabulary of a model with `size` ids (default: the tokenizer's).

    `eos` is the id that ends a reply, default the tokenizer's. No grammar can produce another
    control token. Takes about a second for 129280 ids.
    """
    table = tokenizer.token_bytes
    spelled = [None if i in tokenizer.control_ids else word for i, word in enumerate(table)]
    return from_bytes(spelled, size=size, eos=tokenizer.eos if eos is None else eos)


def from_bytes(table: Sequence[bytes | None], *, eos: int, size: int | None = None) -> Vocabulary:
    """The vocabulary in which id x stands for `table[x]`; None or b"" is never produced.

    Raises ValueError for an `eos` outside the table and a `size` below its length, and ImportError
    without llguidance.
    """
    size = len(table) if size is None else size
    if size < len(table):
        raise ValueError(
            f"size must be at least the tokenizer's {len(table)} ids, got {size}; is this the "
            "model's tokenizer?"
        )
    if not 0 <= eos < len(table):
        raise ValueError(f"eos must lie in 0..{len(table) - 1}, got {eos}")
    words = [word or b"" for word in table] + [b""] * (size - len(table))
    words[eos] = b""
    digest = hashlib.sha256(f"{size} {eos}".encode())
    for word in words:
        digest.update(len(word).to_bytes(4, "little") + word)
    packed = bits.pack(np.array([bool(word) for word in words]))
    packed.flags.writeable = False
    return Vocabulary(digest.hexdigest(), size, eos, packed, _handle(words, eos))


def _handle(words: Sequence[bytes], eos: int) -> Any:
    library = require_llguidance()
    # The end token needs a spelling of its own that no text has; the byte 0xFF is in no UTF-8.
    spelled = [*words]
    spelled[eos] = b"\xffeos"
    return library.LLTokenizer(library.TokenizerWrapper(_Words(spelled, eos)))


class _Words:
    """What llguidance asks of a tokenizer.

    It would ask for a tokenization only to force one upon the model, which our grammars switch off;
    the wrapper tries a call and takes an exception for an answer.
    """

    bos_token_id = None

    def __init__(self, words: list[bytes], eos: int):
        self.tokens = words
        self.eos_token_id = eos
        self.special_token_ids = [eos]

    def __call__(self, text: object) -> list[int]:
        raise NotImplementedError("no tokenization is forced")
