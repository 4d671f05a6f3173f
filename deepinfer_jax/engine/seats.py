"""Requests at work, on the host: where each sits, what has come of it, what makes it a result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from deepinfer_jax import edits as editing
from deepinfer_jax import grammar, sampling
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.edits import Edits
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.grammar import State
from deepinfer_jax.images.spans_in_prompt import places_of
from deepinfer_jax.requests import Request, Result, Timing
from deepinfer_jax.rounds import Round
from deepinfer_jax.sampling import Sampled, Sampling
from deepinfer_jax.transcript import Transcript


@dataclasses.dataclass
class Work:
    """A request from its submission to its end; preemption does not touch it.

    number: of the submission. admitted, first_token: seconds from the engine's start. state: of the
    reply under its grammar, if it has one.
    """

    number: int
    request: Request
    transcript: Transcript
    admitted: float = math.nan
    first_token: float = math.nan
    raw: list[float] = dataclasses.field(default_factory=list)
    processed: list[float] = dataclasses.field(default_factory=list)
    kept: list[float] = dataclasses.field(default_factory=list)
    rounds: int = 0
    verified: int = 0
    accepted: int = 0
    state: State | None = None

    @property
    def left(self) -> int:
        """Tokens it may still emit."""
        return self.request.options.max_tokens - len(self.raw)

    def token(self, position: int) -> int:
        """Of the prompt, or of the reply so far."""
        prompt = self.request.tokens
        return prompt[position] if position < len(prompt) else (
            self.transcript.tokens[position - len(prompt)]
        )  # fmt: skip

    def take(self, made: Round, slot: int) -> tuple[str, int]:
        """Take what rounds emitted in `slot`: (text that became certain, tokens taken).

        Raises FloatingPointError where a number is not finite, GrammarError where the reply cannot
        go on under its grammar.
        """
        text, before = "", len(self.raw)
        for step, place in np.argwhere(made.emitted[:, slot]).tolist():
            numbers = [float(x[step, slot, place]) for x in _numbers(made.sampled)]
            if not all(map(math.isfinite, numbers)):
                raise FloatingPointError(
                    f"request {self.request.id!r}: the log-probability of token {len(self.raw)} is "
                    f"not finite (raw {numbers[0]}, processed {numbers[1]}, kept mass "
                    f"{numbers[2]}); are the weights damaged?"
                )
            text += self.transcript.push(int(made.sampled.token[step, slot, place]))
            for numbered, number in zip((self.raw, self.processed, self.kept), numbers,
                                        strict=True):  # fmt: skip
                numbered.append(number)
            self._count(made, step, slot, place)
            if self.transcript.finished:
                break
        if self.state is not None:
            self.state = grammar.advance(self.state, self.transcript.tokens[before:])
            if self.state.failure is not None:
                raise self.state.failure
        return text, len(self.raw) - before

    def _count(self, made: Round, step: int, slot: int, place: int) -> None:
        """Count what entry `place` of a round cost, once it is in the reply."""
        if len(self.raw) == 1:
            return  # the first token comes from the prompt
        if place == 0:
            self.rounds += 1
            self.verified += int(made.scheduled[step, slot])
        self.accepted += place < int(made.accepted[step, slot])

    def result(self, numerics: str, now: float) -> Result:
        """What it came to."""
        transcript, request = self.transcript, self.request
        assert transcript.finished is not None, "the reply has not ended"
        return Result(
            id=request.id,
            prompt=request.prompt,
            text=transcript.text,
            tokens=tuple(transcript.tokens),
            logprobs=tuple(self.raw),
            logprobs_processed=tuple(self.processed),
            kept_mass=tuple(self.kept),
            pieces=tuple(transcript.pieces),
            finish_reason=transcript.finished,
            prompt_tokens=len(request.tokens),
            seed=request.seed,
            numerics=numerics,
            timing=Timing(
                self.admitted, self.first_token, now, self.rounds, self.verified, self.accepted
            ),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Seat:
    """One stay of a request in a slot. A preempted request comes back to another seat, in the same
    slot perhaps, so what rounds emitted for the one before is told apart by identity.
    """

    work: Work


def _numbers(sampled: Sampled) -> tuple:
    return sampled.logprob_raw, sampled.logprob_processed, sampled.kept_mass


def sampling_of(seated: Sequence[Work | None], truncates: bool) -> Sampling:
    """Sampling parameters of every slot; an empty one is greedy, which costs nothing.

    `truncates`: whether one of them may (`Sizes.truncates`).
    """
    options = [work.request.options if work else None for work in seated]
    made = sampling.make_sampling(
        len(seated),
        [o.temperature if o else 0.0 for o in options],
        [o.top_p if o else 1.0 for o in options],
        [o.top_k if o else -1 for o in options],
        [o.min_p if o else 0.0 for o in options],
        seeds=[work.request.seed if work else 0 for work in seated],
    )
    return made if truncates else sampling.untruncated(made)


def edits_of(work: Work, cfg: ModelConfig, sizes: Sizes) -> Edits:
    """What a request changes of its logits as its reply stands, for one slot."""
    request, asked = work.request, work.request.options
    return editing.make_edits(
        cfg.vocab_size,
        said(request, cfg),
        work.transcript.tokens,
        bias=dict(asked.biases),
        allowed=asked.allowed_token_ids,
        banned=asked.banned_token_ids,
        repetition=asked.repetition_penalty,
        frequency=asked.frequency_penalty,
        presence=asked.presence_penalty,
        ends=padded(asked.ends(cfg.eos_token_id), sizes.stop_ids),
        least=asked.min_tokens,
        forced=padded(asked.golden_token_ids, sizes.forced),
    )


def said(request: Request, cfg: ModelConfig) -> list[int]:
    """The tokens of the prompt that are text: those of images are places, and no repetition."""
    if cfg.vision is None:
        return list(request.tokens)
    shown = {place for image in request.images for place in places_of(image, cfg.vision)}
    return [token for place, token in enumerate(request.tokens) if place not in shown]


def padded(ids: Sequence[int], size: int) -> list[int]:
    """`ids` and then -1 up to `size`."""
    return [*ids, *[-1] * (size - len(ids))]
