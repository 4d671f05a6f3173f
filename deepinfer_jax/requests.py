"""What to generate and what came out: options, requests, results. Values without arrays."""

from __future__ import annotations

import dataclasses
import html
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from deepinfer_jax import sampling
from deepinfer_jax.grammar import Grammar
from deepinfer_jax.text.chat import Effort

FinishReason = Literal["stop", "length"]
_EFFORTS = (None, "low", "high", "xhigh", "max")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How one reply is made.

    Attributes:
      max_tokens: most tokens of the reply, at least 1.
      temperature: finite and >= 0; below 1e-5 the most probable token is taken, lowest id on ties.
      top_p, top_k, min_p: truncation; 1.0, -1 and 0.0 keep everything.
      seed: in [0, 2**64).
      stop: strings that end the reply; the text ends before the first of them.
      stop_token_ids: token ids that end it, beside the model's end token.
      thinking, effort: how a chat prompt is rendered (`Tokenizer.render_chat`).
      grammar: what the reply must follow, or a mapping of its fields, or of the published engine's
        `so_args` (`schema_type`, `schema`, ...). Needs the extra `structured`.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    thinking: bool = False
    effort: Effort | None = None
    grammar: Grammar | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, 2**31)
        _integer("seed", self.seed, 0, 2**64)
        for name in ("temperature", "top_p", "top_k", "min_p"):
            _number(name, getattr(self, name))
        try:
            sampling.make_sampling(
                1, self.temperature, self.top_p, self.top_k, self.min_p, seeds=[self.seed]
            )
        except ValueError as error:  # the only row is row 0: say no more than the name
            raise ValueError(str(error).removesuffix(" in row 0")) from None
        self._settle_stops()
        if not isinstance(self.thinking, bool):
            raise TypeError(f"thinking must be true or false, got {self.thinking!r}")
        if self.effort not in _EFFORTS:
            raise ValueError(f"effort must be one of {_EFFORTS}, got {self.effort!r}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            object.__setattr__(self, "grammar", Grammar.from_mapping(self.grammar))

    @property
    def rule(self) -> Grammar | None:
        """`grammar` as it is kept."""
        assert self.grammar is None or isinstance(self.grammar, Grammar)
        return self.grammar

    def _settle_stops(self) -> None:
        """Check `stop` and `stop_token_ids` and make tuples of them."""
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Sequence):
                raise TypeError(f"{name} must be a list, got {getattr(self, name)!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must be non-empty strings, got {text!r}")
        object.__setattr__(self, "stop", stop)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


def _number(name: str, value: object) -> None:
    """One number, of Python or NumPy: `make_sampling` would take a list of them as well."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")


def _integer(name: str, value: object, low: int, end: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not low <= value < end:
        raise ValueError(f"{name} must be in [{low}, {end}), got {value}")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, with the options of its reply and its own noise seed.

    `id` names it in results; `prompt` is what the caller gave, token ids as a tuple; `chat` holds
    the `tools` and `schema` that were rendered with it.
    """

    id: str | int
    prompt: Any
    tokens: tuple[int, ...]
    seed: int
    options: Options
    chat: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """When and how a reply was made.

    Attributes:
      admitted_s, first_token_s, finished_s: seconds from the start of the call until the request
        got a slot, its first and its last token.
      rounds: passes of the model that made its tokens after the first.
      verified: drafts that those verified beside the newest token.
      accepted: of them, how many are in the reply.
    """

    admitted_s: float
    first_token_s: float
    finished_s: float
    rounds: int = 0
    verified: int = 0
    accepted: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One reply. Everything but `timing` is a function of the request and the model alone.

    Attributes:
      id, prompt: of the request.
      text: the reply without its end token and without a stop string; control tokens that the
        model wrote inside it appear by their spelling.
      tokens: the reply's ids, with the token that ended it.
      logprobs: log-probability of each token at temperature 1 without truncation (float32 values).
      logprobs_processed: the same in the distribution the token was drawn from.
      kept_mass: probability of what truncation had left to draw each token from; 1.0 without.
      pieces: the text that each token completed.
      finish_reason: "stop" (end token, stop token or stop string) or "length" (max_tokens).
      prompt_tokens: number of prompt tokens.
      seed: the request's noise seed; the same prompt with it as explicit seed gives this result.
      numerics: fingerprint of the `Numerics` that fixed the bits; results of two runs can be
        compared bit by bit where it is equal, on one chip and jaxlib.
      timing: not compared.
    """

    id: str | int
    prompt: Any
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprobs_processed: tuple[float, ...]
    kept_mass: tuple[float, ...]
    pieces: tuple[str, ...] = dataclasses.field(repr=False)
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    numerics: str
    timing: Timing = dataclasses.field(compare=False)

    def _repr_html_(self) -> str:
        """Tokens on a background that darkens as their probability falls, for notebooks."""
        spans = []
        for piece, logprob in zip(self.pieces, self.logprobs, strict=True):
            shade = min(1.0, -logprob / 8)
            shown = html.escape(piece).replace("\n", "↵\n")
            spans.append(
                f'<span title="{logprob:.3f}" style="background:rgba(214,96,77,{shade:.2f})">'
                f"{shown}</span>"
            )
        return f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'
