"""From results to outputs, with what a scoring pass adds to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from deepinfer_jax import scoring
from deepinfer_jax.llm.outputs import CompletionOutput, RequestOutput, TopLogprobs
from deepinfer_jax.llm.parameters import SamplingParams
from deepinfer_jax.loading import Model
from deepinfer_jax.requests import Request, Result
from deepinfer_jax.scoring import Scored


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A prompt: its text if it has one, what was asked of it, and a request for every reply."""

    text: str | None
    params: SamplingParams
    samples: tuple[Request, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the prompt."""
        return self.samples[0].tokens


def outputs(
    model: Model,
    asked: Sequence[Asked],
    results: Mapping[str | int, Result],
    failed: Mapping[str | int, Exception],
) -> list[RequestOutput]:
    """What came of every prompt; `results` and `failed` by the ids of the requests.

    Raises RuntimeError where the scoring pass and the sampler differ in a bit.
    """
    scored = _score(model, asked, results)
    for one in asked:
        for request in one.samples:
            if request.id in results and request.id in scored:
                _check_bits(results[request.id], scored[request.id])
    numerics = model.numerics.fingerprint()
    return [_output(one, results, failed, scored, numerics) for one in asked]


def _score(
    model: Model, asked: Sequence[Asked], results: Mapping[str | int, Result]
) -> dict[str | int, Scored]:
    """Scores by request, of prompt and reply, as far as they are asked for.

    Where only the prompt's are, they come with the first reply to it. A prompt with images that has
    no reply has no scores either: its images may be why.
    """
    groups: dict[tuple[int, bool], list[tuple[Request, tuple[int, ...]]]] = {}
    for one in asked:
        params, kind = one.params, (one.params.top_logprobs, one.params.return_routed_experts)
        whole = params.top_logprobs > 0 or params.return_routed_experts
        chosen = one.samples if whole else one.samples[:1] if params.prompt_logprobs else ()
        for k, request in enumerate(chosen):
            done = request.id in results
            reply = results[request.id].tokens if done and whole else ()
            if reply or (k == 0 and params.prompt_logprobs and (done or not request.images)):
                groups.setdefault(kind, []).append((request, request.tokens + reply))
    found: dict[str | int, Scored] = {}
    for (top, routed), members in groups.items():
        sequences, images = [tokens for _, tokens in members], [each.images for each, _ in members]
        scores = scoring.score_sequences(model, sequences, top=top, routed=routed, images=images)
        found |= zip((each.id for each, _ in members), scores, strict=True)
    return found


def _check_bits(result: Result, scored: Scored) -> None:
    """The product's promise, where both numbers are at hand."""
    seen = np.array(result.logprobs, np.float32)
    again = scored.logprobs[result.prompt_tokens - 1 :]
    if not len(again):
        return  # only the prompt was scored
    places = np.flatnonzero(seen != again)
    if places.size:
        place = int(places[0])
        raise RuntimeError(
            f"request {result.id}: token {place} of the reply has the log-probability "
            f"{seen[place]!s} where it was sampled and {again[place]!s} where it was scored: this "
            "device or these settings change bits; `deepinfer-jax check-determinism` says where"
        )


def _output(
    one: Asked,
    results: Mapping[str | int, Result],
    failed: Mapping[str | int, Exception],
    scored: Mapping[str | int, Scored],
    numerics: str,
) -> RequestOutput:
    params, first, prompt_end = one.params, one.samples[0].id, len(one.tokens) - 1
    own = scored.get(first) if params.prompt_logprobs else None
    return RequestOutput(
        request_id=str(first),
        prompt=one.text,
        prompt_token_ids=one.tokens,
        prompt_logprobs=None if own is None else tuple(own.logprobs[:prompt_end].tolist()),
        prompt_top_logprobs=(
            None if own is None or not params.top_logprobs else _tops(own, 0, prompt_end)
        ),
        outputs=tuple(
            _completion(k, params, request, results.get(request.id), failed.get(request.id),
                        scored.get(request.id))
            for k, request in enumerate(one.samples)
        ),
        numerics=numerics,
    )  # fmt: skip


def _completion(
    index: int, params: SamplingParams, request: Request, result: Result | None,
    error: Exception | None, scored: Scored | None,
) -> CompletionOutput:  # fmt: skip
    tops = () if params.top_logprobs else None
    if result is None:
        assert error is not None, f"request {request.id} has neither a result nor an error"
        raw = None if params.logprob_mode == "processed" else ()
        processed = None if params.logprob_mode == "raw" else ()
        return CompletionOutput(
            index, "", (), raw, processed, (), tops, "error", request.seed, error=error
        )
    if tops is not None:
        assert scored is not None, "the most probable tokens were asked for"
        tops = _tops(scored, len(request.tokens) - 1, len(scored.logprobs))
    return CompletionOutput(
        index=index,
        text=result.text,
        token_ids=result.tokens,
        logprobs=None if params.logprob_mode == "processed" else result.logprobs,
        logprobs_processed=None if params.logprob_mode == "raw" else result.logprobs_processed,
        kept_mass=result.kept_mass,
        top_logprobs=tops,
        finish_reason=result.finish_reason,
        seed=request.seed,
        routed_experts=scored.routed if scored is not None else None,
        pieces=result.pieces,
        timing=result.timing,
    )


def _tops(scored: Scored, start: int, end: int) -> tuple[TopLogprobs, ...]:
    """The most probable tokens of the places from `start` to before `end`."""
    ids, values = scored.top_ids[start:end].tolist(), scored.top_logprobs[start:end].tolist()
    return tuple(dict(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
