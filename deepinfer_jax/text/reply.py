"""Takes a reply apart as its tokens come: reasoning, content, tool calls."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from deepinfer_jax.text.tokenizer import Tokenizer

ReplyEnd = Literal["stop", "length", "tool_calls"]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a reply: of its reasoning, its content, or of the tool call number `call`.

    A tool call begins with a `tool_name` piece; its `tool_arguments` pieces join to a JSON object.
    """

    kind: Literal["reasoning", "content", "tool_name", "tool_arguments"]
    text: str
    call: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A reply so far; `tool_calls` have the form that `render_chat` takes back in messages."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[dict[str, str], ...] = ()
    finish_reason: ReplyEnd | None = None


class ReplyParser:
    """Feeds tokens to deepseek-recipe's stream parser and collects what it says.

    The end token, and everything after it, is no text. With `stop`, the reply ends before the first
    of these strings. `finished` says that no further token matters.
    """

    def __init__(self, tokenizer: "Tokenizer", *, thinking: bool = True, stop: Sequence[str] = ()):
        self._eos = tokenizer.eos
        self._vocab_size = tokenizer.vocab_size
        self._processor = _processor(tokenizer, thinking, stop)
        self._pieces: list[Piece] = []
        self._finish_reason: ReplyEnd | None = None
        self._ended = False
        self._parsed(_chunk().ready())

    @property
    def finished(self) -> bool:
        """Whether an end token or a stop string has ended the reply."""
        return self._ended or self._processor.finished

    @property
    def reply(self) -> Reply:
        """Everything so far."""
        calls: dict[int, dict[str, str]] = {}
        for piece in self._pieces:
            if piece.call is not None:
                call = calls.setdefault(piece.call, {"name": "", "arguments": ""})
                call[piece.kind.removeprefix("tool_")] += piece.text
        return Reply(
            reasoning=self._joined("reasoning"),
            content=self._joined("content"),
            tool_calls=tuple(calls.values()),
            finish_reason=self._finish_reason,
        )

    def push(self, ids: Sequence[int]) -> list[Piece]:
        """The pieces that these tokens complete. Raises ValueError for an unknown id."""
        pieces: list[Piece] = []
        for token in ids:
            if self.finished:
                break
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"ids must lie in 0..{self._vocab_size - 1}, got {token}")
            if token == self._eos:
                self._ended = True
                break
            pieces += self._parsed(_chunk().tokens([token]))
        return pieces

    def finish(self, reason: Literal["stop", "length"] = "stop") -> list[Piece]:
        """Close the reply and return the pieces that were still held back."""
        import deepseek_recipe

        if self._processor.finished:
            return []
        reasons = deepseek_recipe.InferenceFinishReason
        pieces = self._parsed(_chunk().finish(reasons.Stop if reason == "stop" else reasons.Length))
        if not self._processor.finished:
            pieces += self._read(self._processor.finish())
        return pieces

    def _joined(self, kind: str) -> str:
        return "".join([piece.text for piece in self._pieces if piece.kind == kind])

    def _parsed(self, chunk: Any) -> list[Piece]:
        return self._read(self._processor.push(chunk))

    def _read(self, chunks: Sequence[Any]) -> list[Piece]:
        """The pieces inside the recipe's chat-completion chunks."""
        pieces: list[Piece] = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                pieces += _pieces_of(choice["delta"])
                self._finish_reason = choice["finish_reason"] or self._finish_reason
        self._pieces += pieces
        return pieces


def _pieces_of(delta: dict[str, Any]) -> list[Piece]:
    pieces: list[Piece] = []
    if delta.get("reasoning_content"):
        pieces.append(Piece("reasoning", delta["reasoning_content"]))
    if delta.get("content"):
        pieces.append(Piece("content", delta["content"]))
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        if function.get("name"):
            pieces.append(Piece("tool_name", function["name"], call["index"]))
        if function.get("arguments"):
            pieces.append(Piece("tool_arguments", function["arguments"], call["index"]))
    return pieces


def _chunk() -> Any:
    import deepseek_recipe

    return deepseek_recipe.InferenceChunk


def _processor(tokenizer: "Tokenizer", thinking: bool, stop: Sequence[str]) -> Any:
    """The recipe's stream processor, speaking chat-completion chunks."""
    import deepseek_recipe

    request = deepseek_recipe.ConversationRequest(
        deepseek_recipe.Conversation([deepseek_recipe.UserMessage("")], thinking_mode=thinking),
        deepseek_recipe.ModelVersion.DeepseekV41Flash,
    )
    generator = deepseek_recipe.ChatCompletionRequest.chunk_generator(request, "", "")
    stage = deepseek_recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    options = deepseek_recipe.ParsingOptions(
        thinking_initial_stage=stage, stop_sequences=list(stop)
    )
    return deepseek_recipe.StreamProcessor(generator, options, tokenizer.recipe)
