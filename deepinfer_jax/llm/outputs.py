"""What `LLM` returns: an output for every prompt, a completion for every reply to it."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from deepinfer_jax.requests import Timing, shaded_tokens

TopLogprobs = Mapping[int, float]


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One reply. Everything but `timing` is a function of the request and the model alone.

    Attributes:
      index: which of the n replies to its prompt.
      text, token_ids: as in `Result`; the ids hold the token that ended the reply.
      logprobs: log-probability of each token at temperature 1 without truncation; None in the mode
        "processed".
      logprobs_processed: the same in the distribution it was drawn from; None in the mode "raw".
      kept_mass: probability of what truncation had left to draw each token from; 1.0 without.
      top_logprobs: for each token the most probable ones at its place, {id: raw log-probability},
        best first, lower id among equals; None unless asked for.
      finish_reason: "stop", "length", or "error": it failed alone, and has no tokens.
      seed: of its noise; the same prompt with it as `SamplingParams.seed` gives this reply.
      routed_experts: [prompt + reply, layers, k] int32, experts of every token, best first; None
        unless asked for. Not compared.
      error: what it failed of.
      pieces: the text that each token completed.
      timing: not compared; None where it failed.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    logprobs_processed: tuple[float, ...] | None
    kept_mass: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] | None
    finish_reason: Literal["stop", "length", "error"]
    seed: int
    routed_experts: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    error: Exception | None = dataclasses.field(default=None, compare=False)
    pieces: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    timing: Timing | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def cumulative_logprob(self) -> float:
        """Sum of `logprobs`, or of `logprobs_processed` in the mode "processed"."""
        return math.fsum(self._shown)

    @property
    def log_kept_mass(self) -> tuple[float, ...]:
        """Natural logarithms of `kept_mass`: `logprobs` less `logprobs_processed`, up to rounding,
        where the temperature is 1 and nothing was added to logits.
        """
        return tuple(math.log(mass) if mass > 0 else -math.inf for mass in self.kept_mass)

    @property
    def _shown(self) -> tuple[float, ...]:
        return (self.logprobs if self.logprobs is not None else self.logprobs_processed) or ()

    def _repr_html_(self) -> str:
        """Tokens on a background that darkens as their probability falls, for notebooks."""
        if self.error is not None:
            return f"<div><b>error:</b> {html.escape(str(self.error))}</div>"
        return shaded_tokens(self.pieces, self._shown)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came of one prompt.

    Attributes:
      request_id: the prompt's place in the call, as text.
      prompt: its text, of a chat as it was rendered; None where token ids were given.
      prompt_token_ids: what the model read; the places of an image hold the image token.
      prompt_logprobs: of tokens 1, 2, .. of the prompt, at temperature 1 without truncation: one
        less than it has tokens. At places of images they mean nothing. None unless asked for, and
        where a prompt with images has no first reply.
      prompt_top_logprobs: the most probable tokens at the same places, as in `CompletionOutput`;
        None unless both were asked for.
      outputs: the n replies.
      numerics: fingerprint of what fixed the bits (`Result.numerics`).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[float, ...] | None
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None
    outputs: tuple[CompletionOutput, ...]
    numerics: str

    @property
    def finished(self) -> bool:
        """Whether every reply has ended by itself, none with an error."""
        return all(output.error is None for output in self.outputs)

    def _repr_html_(self) -> str:
        """The prompt and its replies."""
        said = self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} tokens"
        replies = "".join(output._repr_html_() for output in self.outputs)
        return f'<div style="white-space:pre-wrap"><i>{html.escape(said)}</i>{replies}</div>'
