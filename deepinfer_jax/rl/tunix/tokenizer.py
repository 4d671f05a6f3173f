"""Our tokenizer under the names that tunix calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_jax.text import Tokenizer


class ChatTokenizer:
    """For `RLCluster(tokenizer=...)`: text in and out, and the chat format of the model.

    Prompts reach the engine as text that `apply_chat_template` made, control tokens spelled out, so
    `encode` reads spellings as control tokens: give text of users to `apply_chat_template`, whose
    messages stay text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a rendered prompt."""
        return self._tokenizer.encode_markup(text)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Text of `ids`, control tokens by their spelling."""
        return self._tokenizer.decode([int(token) for token in ids])

    def apply_chat_template(
        self, messages: Sequence[Any], *, add_generation_prompt: bool = True,
        tokenize: bool = False, enable_thinking: bool = False, **_: Any,
    ) -> str | list[int]:  # fmt: skip
        """The prompt for the next reply, as text, or as ids where `tokenize`."""
        if not add_generation_prompt:
            raise ValueError("add_generation_prompt must be True: this format has no other prompt")
        ids = self._tokenizer.render_chat(messages, thinking=enable_thinking)
        return ids if tokenize else self._tokenizer.decode(ids)

    def bos_id(self) -> int:
        """The token that a prompt begins with."""
        return self._tokenizer.bos

    def eos_id(self) -> int:
        """The token that ends a reply."""
        return self._tokenizer.eos

    def pad_id(self) -> int:
        """The token that trainers pad with."""
        return self._tokenizer.pad
