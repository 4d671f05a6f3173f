"""The tokenizer of a model folder."""

import functools
import json
import pathlib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from deepinfer_jax.text import chat, decoding, parts
from deepinfer_jax.text.engram_map import TOKENIZER_FILE
from deepinfer_jax.text.reply import Reply, ReplyParser

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"


def load_tokenizer(folder: str | pathlib.Path) -> "Tokenizer":
    """The tokenizer in `folder`.

    Raises FileNotFoundError without a tokenizer.json there, ValueError for one that cannot be read.
    """
    path = pathlib.Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no {TOKENIZER_FILE} in {folder}; give the model's folder")
    try:
        return Tokenizer(path.read_text("utf-8"))
    except OSError:
        raise
    except Exception as error:  # the library knows no other
        raise ValueError(f"{path} is no tokenizer: {error}; get it again") from None


class Tokenizer:
    """Ids of text, text of ids, prompts of chats, for one tokenizer.json (given as text).

    There are two encoders over one vocabulary. `encode_user` knows no control tokens at all, so
    that no text of a user can name one; `encode_markup` knows them, for text the program wrote.
    """

    def __init__(self, source: str):
        self._source = source
        self._full = tokenizers.Tokenizer.from_str(source)
        self._plain = tokenizers.Tokenizer.from_str(
            json.dumps({**json.loads(source), "added_tokens": []})
        )
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        self.bos, self.eos, self.pad = map(self.control_id, (BOS, EOS, PAD))
        self.control_ids = frozenset(self._full.get_added_tokens_decoder())

    def control_id(self, spelling: str) -> int:
        """Id of the control token with this spelling. Raises ValueError where there is none."""
        token = self._full.token_to_id(spelling)
        if token is None:
            raise ValueError(f"the tokenizer has no control token {spelling!r}")
        return token

    def encode_user(self, text: str) -> list[int]:
        """Ids of text from outside; control spellings in it stay plain text.

        Raises UnicodeEncodeError, a ValueError, for half of a surrogate pair.
        """
        return self._plain.encode(whole(text), add_special_tokens=False).ids

    def encode_markup(self, text: str) -> list[int]:
        """Ids of text in which control spellings mean control tokens. Never for text of a user."""
        return self._full.encode(whole(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], control: bool = True) -> str:
        """Text of `ids`, with or without the spellings of control tokens.

        Raises ValueError for an id outside the vocabulary.
        """
        kept = ids if control else [token for token in ids if token not in self.control_ids]
        return decoding.join_bytes(self.token_bytes, kept).decode("utf-8", "replace")

    def stream(self) -> decoding.StreamDecoder:
        """A decoder for ids that come one by one."""
        return decoding.StreamDecoder(self.token_bytes)

    def render_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        thinking: bool = True,
        effort: chat.Effort | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        tool_choice: chat.ToolChoice = "auto",
        schema: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the prompt for the next reply, rendered by deepseek-recipe's V4.1 format.

        messages: dictionaries with `role` (system, user, assistant, tool, latest_reminder) and
        `content`, a text or a list of parts (`text.parts`) without images; an assistant's may carry
        `reasoning_content` and `tool_calls`. A tool is its `name`, `description` and `parameters`,
        bare or under `function`. `effort` is low, high, xhigh or max (default high); `schema` is a
        JSON schema the reply is told to follow.
        Text in messages, tools and schema stays text; only the grounding marks (ref, box, point,
        polygon) of an assistant's earlier replies are read as the tokens that the model wrote.
        Raises ValueError for a message or tool that is not of this form.
        """
        flat = parts.flatten(messages)
        if flat.images:
            place, _ = flat.images[0]
            raise ValueError(
                f"{place} is an image, render_chat renders text: use render_with_images, or "
                "`generate`, which does"
            )
        conversation = chat.conversation(
            flat.messages,
            thinking=thinking,
            effort=effort,
            tools=tools,
            tool_choice=tool_choice,
            schema=schema,
        )
        self._check_controls()
        return chat.encoding(self.recipe).encode(conversation)

    def render_with_images(
        self,
        flat: parts.Flat,
        image_token_id: int,
        *,
        thinking: bool = True,
        effort: chat.Effort | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        tool_choice: chat.ToolChoice = "auto",
        schema: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[int]]:
        """(ids of the prompt, numbers of its images in their order there), as `render_chat`.

        Every image of `flat` is one `image_token_id` in the ids. The order is another than in the
        messages where the format sorts results of tools. Raises ValueError as `render_chat`.
        """
        conversation = chat.conversation(
            flat.messages,
            thinking=thinking,
            effort=effort,
            tools=tools,
            tool_choice=tool_choice,
            schema=schema,
            mark=flat.mark,
        )
        self._check_controls()
        rendered = chat.encoding(self.recipe).render_conversation(conversation)
        ids, end = [], 0
        for start, stop in rendered.special_ranges:
            ids += self.encode_user(rendered.prompt[end:start])
            spelling, end = rendered.prompt[start:stop], stop
            ids.append(image_token_id if spelling == flat.mark else self.control_id(spelling))
        ids += self.encode_user(rendered.prompt[end:])
        return ids, [int(source.path) for source in rendered.image_sources]

    def _check_controls(self) -> None:
        for spelling in chat.REQUIRED:
            self.control_id(spelling)

    def parse_reply(self, ids: Sequence[int], *, thinking: bool = True) -> Reply:
        """Reasoning, content and tool calls of a whole reply."""
        parser = ReplyParser(self, thinking=thinking)
        parser.push(ids)
        parser.finish("stop" if self.eos in ids else "length")
        return parser.reply

    @functools.cached_property
    def recipe(self) -> Any:
        """deepseek-recipe's own tokenizer over the same file; loaded at first use."""
        import deepseek_recipe

        return deepseek_recipe.Tokenizer.from_str(self._source)

    @functools.cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of every id; those of a control token are its spelling."""
        return decoding.token_bytes(self._full)


def whole(text: str) -> str:
    """`text`. Raises TypeError for no string, UnicodeEncodeError for half of a surrogate pair."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {reprlib.repr(text)}")
    text.encode("utf-8")
    return text
