"""`SamplingParams`: how replies are made, in the names of vLLM and of the published engine."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import InitVar
from typing import Any, Literal, get_args

from deepinfer_jax.grammar import Grammar
from deepinfer_jax.prompts import request_seed
from deepinfer_jax.requests import Bias, Options

LogprobMode = Literal["raw", "processed", "both"]
MOST_TOP = 1000  # of `top_logprobs`
MOST_REPLIES = 2**20  # to one prompt: all of them are made requests at once
_ENDLESS = 2**31 - 1
# What `Options` checks and keeps under the same name.
_SHARED = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "logit_bias", "allowed_token_ids", "banned_token_ids", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "golden_token_ids"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the replies to a prompt are made and what is said of them; docs/llm.md has a table.

    Attributes:
      n: replies to the prompt. Each has noise of its own (`sample_seed`); the first is that of n=1.
      temperature, top_p, top_k, min_p, stop, stop_token_ids, ignore_eos, logit_bias,
      allowed_token_ids, banned_token_ids, presence_penalty, frequency_penalty, repetition_penalty,
      min_tokens, golden_token_ids: as in `Options`.
      max_tokens: most tokens of a reply; 0 counts as 1, None is as many as there is room for.
      so_args: what the reply must follow: a `Grammar`, or the published engine's mapping
        (`schema_type`, `schema`, `trigger_token_ids`, `bound_token_id`).
      seed: of the noise, cut to its low 64 bits; None draws a fresh one, which the output reports.
      prompt_logprobs: also give the log-probability of every token of the prompt but the first.
      top_logprobs: how many of the most probable tokens to name at every place, 0 to 1000.
      logprob_mode: "raw" (temperature 1, nothing removed: what a trainer computes), "processed" (of
        the distribution that the token was drawn from) or "both".
      return_routed_experts: also give the experts of every token.
      seq_seed: another name of `seed`. first_n_token_no_eos: 1 is min_tokens=1, 0 is nothing.
      logprobs: a number is another name of `top_logprobs`; true, false and None mean nothing, for
        log-probabilities of the reply always come. These three are arguments, not attributes.

    Raises TypeError or ValueError that names the field, what was expected and what came.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logit_bias: Bias | None = ()
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] | None = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    golden_token_ids: Sequence[int] | None = ()
    so_args: Grammar | Mapping[str, Any] | None = None
    seed: int | None = None
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    logprob_mode: LogprobMode = "both"
    return_routed_experts: bool = False
    seq_seed: InitVar[int | None] = None
    first_n_token_no_eos: InitVar[int] = 0
    logprobs: InitVar[int | bool | None] = None

    def __post_init__(
        self, seq_seed: int | None, first_n_token_no_eos: int, logprobs: int | bool | None
    ) -> None:
        self._settle_counts(logprobs)
        self._settle_seed(seq_seed)
        self._settle_end(first_n_token_no_eos)
        for name in ("prompt_logprobs", "return_routed_experts"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"{name} must be true or false, got {reprlib.repr(getattr(self, name))}"
                    + ("; top_logprobs says how many" if name == "prompt_logprobs" else "")
                )
        modes, mode = get_args(LogprobMode), self.logprob_mode
        if not isinstance(mode, str) or mode not in modes:
            raise ValueError(f"logprob_mode must be one of {modes}, got {reprlib.repr(mode)}")
        if self.so_args is not None and not isinstance(self.so_args, Grammar):
            self._set("so_args", Grammar.from_so_args(self.so_args))
        for name in ("stop", "stop_token_ids", "logit_bias", "banned_token_ids",
                     "golden_token_ids"):  # fmt: skip
            if getattr(self, name) is None:
                self._set(name, ())
        checked = self.options(_ENDLESS)
        for name in _SHARED:
            self._set(name, getattr(checked, name))

    def options(self, room: int) -> Options:
        """The same as `Options`, with `room` tokens where `max_tokens` is None.

        The seed is not part of it: a request has its own.
        """
        shared: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        most = room if self.max_tokens is None else self.max_tokens
        return Options(max_tokens=most, grammar=self.so_args, **shared)

    def _settle_counts(self, logprobs: int | bool | None) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, _ENDLESS)
            self._set("max_tokens", max(self.max_tokens, 1))
        _integer("n", self.n, 1, MOST_REPLIES)
        if logprobs is not None and not isinstance(logprobs, bool):
            _integer("logprobs", logprobs, 0, MOST_TOP)
            if self.top_logprobs not in (0, logprobs):
                raise ValueError(
                    f"logprobs={logprobs} and top_logprobs={self.top_logprobs} are two names of "
                    "one number: give one"
                )
            self._set("top_logprobs", logprobs)
        _integer("top_logprobs", self.top_logprobs, 0, MOST_TOP)

    def _settle_seed(self, seq_seed: int | None) -> None:
        for name, value in (("seed", self.seed), ("seq_seed", seq_seed)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an integer or None, got {reprlib.repr(value)}")
        if seq_seed is not None:
            if self.seed is not None:
                raise ValueError(
                    f"seed={self.seed} and seq_seed={seq_seed} are two names of one thing: give one"
                )
            self._set("seed", seq_seed)
        if self.seed is not None:
            self._set("seed", self.seed & (2**64 - 1))

    def _settle_end(self, first_n_token_no_eos: int) -> None:
        """The published engine masks the end token for the first token or not at all."""
        first = first_n_token_no_eos
        if isinstance(first, bool) or not isinstance(first, int):
            raise TypeError(f"first_n_token_no_eos must be 0 or 1, got {reprlib.repr(first)}")
        if first not in (0, 1):
            raise ValueError(
                f"first_n_token_no_eos must be 0 or 1, got {first}; min_tokens={first} keeps the "
                "end away for longer"
            )
        if first and self.min_tokens == 0:
            self._set("min_tokens", 1)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def sample_seed(seed: int, index: int) -> int:
    """The noise seed of reply number `index` to a prompt whose seed is `seed`.

    The first has `seed` itself, so that one reply is the first of many; the others derive theirs
    from both by `request_seed`, so that each can be repeated alone.
    """
    return seed if index == 0 else request_seed(seed, f"sample {index}")


def _integer(name: str, value: object, low: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {reprlib.repr(value)}")
    if not low <= value <= most:
        raise ValueError(f"{name} must be in {low}..{most}, got {reprlib.repr(value)}")
