"""What to generate and what came out: options, requests, results. Values without arrays."""

from __future__ import annotations

import dataclasses
import html
import numbers
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from deepinfer_jax import sampling
from deepinfer_jax.grammar import Grammar
from deepinfer_jax.images.spans_in_prompt import ImageSpan
from deepinfer_jax.text.chat import Effort

FinishReason = Literal["stop", "length"]
Bias = Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
MOST = 1e9  # size of a bias or penalty: all sums of them stay finite in float32
FREE = -1  # in `golden_token_ids`: a token that is not forced
_EFFORTS = (None, "low", "high", "xhigh", "max")
_IDS_END = 2**31
_DIGITS = 10  # of a token id
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, as JSON can spell it


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
      logit_bias: {token id: number added to its logit}, kept as pairs in order of the ids; at most
        1e9 in size.
      allowed_token_ids: the only tokens that may be said; None: all.
      banned_token_ids: tokens that are never said.
      presence_penalty, frequency_penalty: taken off the logit of a token that the reply has, once
        and for each time; 0 is off.
      repetition_penalty: a positive logit of a token that prompt or reply has is divided by it, a
        negative one multiplied; 1 is off.
      min_tokens: tokens of the reply before anything but max_tokens may end it, an end token not
        counted: until then none can be drawn, and a stop string is passed over.
      ignore_eos: the model's end token is a token like others.
      golden_token_ids: what the tokens of the reply are, from its first, whatever else is asked;
        -1: free. Not together with a grammar.
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
    logit_bias: Bias = ()
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    golden_token_ids: Sequence[int] = ()

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
        for name in ("thinking", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"{name} must be true or false, got {reprlib.repr(getattr(self, name))}"
                )
        if not isinstance(self.effort, str | None) or self.effort not in _EFFORTS:
            raise ValueError(f"effort must be one of {_EFFORTS}, got {reprlib.repr(self.effort)}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            object.__setattr__(self, "grammar", Grammar.from_mapping(self.grammar))
        self._settle_penalties()
        self._settle_choice()
        self._settle_golden()

    @property
    def rule(self) -> Grammar | None:
        """`grammar` as it is kept."""
        assert self.grammar is None or isinstance(self.grammar, Grammar)
        return self.grammar

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept: (token id, bias), in order of the ids."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def edits(self) -> bool:
        """Whether a token depends on more than the model, the truncation and the grammar."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        limits = (self.logit_bias, self.banned_token_ids, self.min_tokens, self.golden_token_ids)
        return any(penalties) or any(limits) or self.allowed_token_ids is not None

    def ends(self, eos: int) -> tuple[int, ...]:
        """Token ids that end the reply; `eos` is the model's end token."""
        return tuple(self.stop_token_ids) if self.ignore_eos else (eos, *self.stop_token_ids)

    def _settle_stops(self) -> None:
        """Check `stop` and `stop_token_ids` and make tuples of them."""
        if isinstance(self.stop, bytes) or not isinstance(self.stop, Sequence):
            raise TypeError(f"stop must be a list of strings, got {reprlib.repr(self.stop)}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text or SURROGATE.search(text):
                raise ValueError(
                    f"stop must be non-empty strings of whole characters, got {reprlib.repr(text)}"
                )
        object.__setattr__(self, "stop", stop)
        ids = _token_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)

    def _settle_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _limited(name, getattr(self, name))
        _number("repetition_penalty", self.repetition_penalty)
        if not 1 / MOST <= self.repetition_penalty <= MOST:
            raise ValueError(
                f"repetition_penalty must be in [{1 / MOST:g}, {MOST:g}] (1 is off), got "
                f"{reprlib.repr(self.repetition_penalty)}"
            )
        _integer("min_tokens", self.min_tokens, 0, _IDS_END)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}: "
                "lower it or raise max_tokens"
            )

    def _settle_choice(self) -> None:
        """Check bias, allowed and banned ids; sets of ids become sorted tuples."""
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        names = ["banned_token_ids"]
        names += [] if self.allowed_token_ids is None else ["allowed_token_ids"]
        for name in names:
            ids = _token_ids(name, getattr(self, name))
            object.__setattr__(self, name, tuple(sorted(set(ids))))
        if self.allowed_token_ids == ():
            raise ValueError(
                "allowed_token_ids must not be empty, or nothing could be said: name a token, or "
                "give null to allow all"
            )

    def _settle_golden(self) -> None:
        golden = _token_ids("golden_token_ids", self.golden_token_ids, low=FREE)
        object.__setattr__(self, "golden_token_ids", golden)
        if len(golden) > self.max_tokens:
            raise ValueError(
                f"golden_token_ids must have at most max_tokens={self.max_tokens} entries, got "
                f"{len(golden)}: shorten it or raise max_tokens"
            )
        if golden and self.grammar is not None:
            raise ValueError(
                "golden_token_ids and grammar cannot be given together, because forced tokens need "
                "not follow a grammar: give one of the two"
            )


class OptionArguments(TypedDict, total=False):
    """The fields of `Options` as arguments of a function, for `**options: Unpack[...]`."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    thinking: bool
    effort: Effort | None
    grammar: Grammar | Mapping[str, Any] | None
    logit_bias: Bias
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    ignore_eos: bool
    golden_token_ids: Sequence[int]


def make_options(**given: Unpack[OptionArguments]) -> Options:
    """`Options` of arguments by name. Raises TypeError for a name that is none of its fields."""
    known = [field.name for field in dataclasses.fields(Options)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; known are {', '.join(known)}")
    return Options(**given)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """(token id, bias) in order of the ids, of a mapping or of pairs."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Sequence):
        raise TypeError(
            f"logit_bias must be a mapping of token ids to numbers, got {reprlib.repr(given)}"
        )
    found: dict[Any, float] = {}
    for pair in pairs:
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(
                f"logit_bias must be a mapping or pairs (token id, bias), got {reprlib.repr(pair)}"
            )
        token, bias = pair
        digits = isinstance(token, str) and token.isascii() and token.isdigit()
        token = int(token) if digits and len(token) <= _DIGITS else token  # a key of JSON
        _integer("logit_bias: a token id", token, 0, _IDS_END)
        _limited(f"logit_bias of token {token}", bias, "; banned_token_ids rules a token out")
        if token in found:
            raise ValueError(f"logit_bias must name a token once, got token {token} twice")
        found[token] = float(bias)
    return tuple(sorted(found.items()))


def _token_ids(name: str, given: object, low: int = 0) -> tuple[int, ...]:
    if isinstance(given, bytes) or not isinstance(given, Sequence) or given == "":
        raise TypeError(f"{name} must be a list, got {reprlib.repr(given)}")
    for token in given:
        _integer(name, token, low, _IDS_END)
    return tuple(given)


def _limited(name: str, value: Any, more: str = "") -> None:
    _number(name, value)
    if not -MOST <= value <= MOST:  # NaN, too
        raise ValueError(
            f"{name} must be in [-{MOST:g}, {MOST:g}], got {reprlib.repr(value)}{more}"
        )


def _number(name: str, value: object) -> None:
    """One number, of Python or NumPy: `make_sampling` would take a list of them as well."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {reprlib.repr(value)}")
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a finite number, got {reprlib.repr(value)}") from None


def _integer(name: str, value: object, low: int, end: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {reprlib.repr(value)}")
    if not low <= value < end:
        raise ValueError(f"{name} must be in [{low}, {end}), got {reprlib.repr(value)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, with the options of its reply and its own noise seed.

    `id` names it in results; `prompt` is what the caller gave, token ids as a tuple, parts of
    messages without their images; `chat` holds the `tools` and `schema` that were rendered with it
    and, as `images`, the keys of its images in the order given. `images` are they in ascending
    order; every place of their spans carries the model's image token in `tokens`.
    """

    id: str | int
    prompt: Any
    tokens: tuple[int, ...]
    seed: int
    options: Options
    chat: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    images: tuple[ImageSpan, ...] = ()


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
        return shaded_tokens(self.pieces, self.logprobs)


def shaded_tokens(pieces: Sequence[str], logprobs: Sequence[float]) -> str:
    """HTML of a reply's pieces on a background that darkens as their probability falls."""
    spans = []
    for piece, logprob in zip(pieces, logprobs, strict=True):
        shade = min(1.0, -logprob / 8)
        shown = html.escape(piece).replace("\n", "↵\n")
        spans.append(
            f'<span title="{logprob:.3f}" style="background:rgba(214,96,77,{shade:.2f})">'
            f"{shown}</span>"
        )
    return f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'
