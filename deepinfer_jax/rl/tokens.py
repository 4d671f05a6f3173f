"""Tokens in, tokens out, one seed per row: the engine as services of training protocols call it.

Plain functions over `generate`. What a row gives depends on the weights, its own tokens, options
and seed, bit for bit; rows share the device and the beginnings of their prompts, nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import generation, scoring
from deepinfer_jax.loading import Model
from deepinfer_jax.params import Params
from deepinfer_jax.planning.policies import OFF, Policy
from deepinfer_jax.requests import FinishReason


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """One reply.

    Attributes:
      tokens: of the reply, with the one that ended it.
      logprobs: of each at temperature 1 without truncation.
      logprobs_processed: of each in the distribution that it was drawn from.
      kept_mass: what truncation had left to draw each from.
      stop_reason: "stop" (a stop token) or "length".
      prompt_logprobs: at temperature 1, of the prompt's tokens from the second on; None unless
        asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprobs_processed: tuple[float, ...]
    kept_mass: tuple[float, ...]
    stop_reason: FinishReason
    prompt_logprobs: tuple[float, ...] | None = None


def sample_tokens(
    model: Model, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int],
    max_tokens: int | Sequence[int], stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
    temperature: float | Sequence[float] = 1.0, top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = -1, params: Params | None = None, prompt_logprobs: bool = False,
    batch_size: int | None = None, speculative: Policy = OFF,
) -> list[SampledTokens]:  # fmt: skip
    """One reply to each of `prompts` (token ids), in order.

    Args:
      seeds: the 64-bit noise seed of each row, used as it is; rows of one seed and prompt give one
        reply. `seed_of_key` makes one of a JAX key, `groups.member_seed` one of a group's member.
      max_tokens, temperature, top_p, top_k: one for all rows, or one for each.
      stop_tokens: ids that end a reply: a list for all rows, or a list for each. The model's own
        end token ends a reply where it is among them, and is a token like others where it is not.
      params: weights in place of the model's own, such as a trainer's floats (`params.widen`); new
        ones of the same shapes compile nothing.
      prompt_logprobs: also score the prompts, in one more pass.
      batch_size, speculative: as in `generate`; they change speed and memory only.

    Raises ValueError where a list has not one entry for each row; the rest as `generate`.
    """
    count = len(prompts)
    if params is not None:
        model = dataclasses.replace(model, params=params)
    stops = _stops(stop_tokens, count)
    columns = {
        "seed": _column("seeds", list(seeds), count),
        "max_tokens": _column("max_tokens", max_tokens, count),
        "temperature": _column("temperature", temperature, count),
        "top_p": _column("top_p", top_p, count),
        "top_k": _column("top_k", top_k, count),
    }
    asked = [
        {"tokens": list(tokens), "ignore_eos": True, "stop_token_ids": stops[row]}
        | {name: column[row] for name, column in columns.items()}
        for row, tokens in enumerate(prompts)
    ]
    made = generation.generate(model, asked, batch_size=batch_size, speculative=speculative)
    before: list[Any] = [None] * count
    if prompt_logprobs:
        scored = scoring.score_sequences(model, prompts)
        before = [tuple(each.logprobs.tolist()) for each in scored]
    return [
        SampledTokens(
            each.tokens, each.logprobs, each.logprobs_processed, each.kept_mass,
            each.finish_reason, first,
        )
        for each, first in zip(made, before, strict=True)
    ]  # fmt: skip


def seed_of_key(key: Any) -> int:
    """The 64-bit seed that a JAX key (new style or two uint32 words) stands for.

    Raises TypeError for keys of another size and for anything else.
    """
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    words = np.asarray(key)
    if words.dtype != np.uint32 or words.shape != (2,):
        raise TypeError(
            f"key must be one threefry key (two uint32 words), got {words.dtype} of {words.shape}; "
            "make it with jax.random.key(seed, impl='threefry2x32')"
        )
    return int(words[0]) | int(words[1]) << 32


def _column(name: str, given: Any, count: int) -> list[Any]:
    """`given` for every row."""
    if not isinstance(given, Sequence | np.ndarray):
        return [given] * count
    values = [value.item() if isinstance(value, np.generic) else value for value in given]
    if len(values) != count:
        raise ValueError(
            f"{name} must have one entry for each of {count} prompts, got {len(values)}"
        )
    return values


def _stops(given: Sequence[Any], count: int) -> list[list[int]]:
    """The stop tokens of every row."""
    if not any(isinstance(each, Sequence | np.ndarray) for each in given):
        return [[int(token) for token in given]] * count
    return [[int(token) for token in each] for each in _column("stop_tokens", given, count)]
