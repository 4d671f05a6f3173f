"""What everything is compared with: each request alone, one token at a time, in a cache of its own.

This is the plainest way to run the model: one slot, one row per call, from the first token of the
prompt on. Nothing of batching, chunking or speculation is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from deepinfer_jax import cache as caches
from deepinfer_jax import sampling as samplers
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.determinism import feeding
from deepinfer_jax.loading import Model
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import Options, Request
from deepinfer_jax.sampling import Sampling

# What a row gives. `scored` is the log-probability of the token that follows, which the last row of
# a sequence does not have.
ROW = ("token", "raw", "processed", "kept", "scored", "routed", "output")
LONGEST_PROMPT = 26  # a power of two less 6: the 32 rows of a prefill call end inside prompts
_SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
)


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """One request and everything its rows gave.

    Attributes:
      request: prompt tokens, noise seed and options.
      text: prompt and reply, N tokens.
      rows: by name of `ROW`, arrays [N, ...]; row i is the token at position i.
      state: what the cache of N tokens still lets be read (`feeding.visible`).
    """

    request: Request
    text: feeding.Text
    rows: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]

    @property
    def prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.tokens)

    def row(self, name: str, start: int, stop: int) -> np.ndarray:
        """`rows[name]` of these positions, without a `scored` that would need another token."""
        return self.rows[name][start : min(stop, self.scored_end(name))]

    def scored_end(self, name: str) -> int:
        """End of the positions at which `name` means something."""
        return len(self.text) - (name == "scored")


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A model with its references; `seed` also draws the schedules."""

    model: Model
    references: tuple[Reference, ...]
    seed: int

    @property
    def capacity(self) -> int:
        """Tokens a slot must hold."""
        return max(len(r.text) for r in self.references)

    def rng(self, name: str) -> np.random.Generator:
        """Random numbers that depend on the seed and a name alone."""
        return np.random.default_rng([self.seed, *name.encode()])

    def sampling(self, slots: Mapping[int, int], size: int) -> Sampling:
        """Sampling parameters of `size` slots; `slots` maps a slot to the number of a reference."""
        empty = Options(temperature=0.0)
        seated = [self.references[slots[s]].request if s in slots else None for s in range(size)]
        options = [r.options if r else empty for r in seated]
        return samplers.make_sampling(
            size,
            [o.temperature for o in options],
            [o.top_p for o in options],
            [o.top_k for o in options],
            [o.min_p for o in options],
            seeds=[r.seed if r else 0 for r in seated],
        )


def default_tokens(cfg: ModelConfig, max_length: int) -> int:
    """Tokens of a reply that carry a sequence past its window, so that every ring wraps."""
    slack = cfg.dspark_block_size + 1
    return max(1, min(cfg.sliding_window + 2 * slack, max_length - LONGEST_PROMPT))


def check_arguments(max_length: int, tokens: int, seed: int) -> None:
    """Raise TypeError or ValueError where a model of this length cannot be checked with these."""
    most = max_length - LONGEST_PROMPT
    if most < 1:
        raise ValueError(
            f"max_length of the model is {max_length}: the prompts of the checks need "
            f"{LONGEST_PROMPT} tokens and at least one more for a reply"
        )
    _integer("tokens", tokens, 1, most, f"max_length less prompts of up to {LONGEST_PROMPT}")
    _integer("seed", seed, 0, 2**64 - 1, "64 bits")


def _integer(name: str, value: object, low: int, high: int, reason: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high} ({reason}), got {value}")


def make_setup(model: Model, *, tokens: int, seed: int, count: int = 8) -> Setup:
    """`count` requests with prompts of mixed length, replies of `tokens`, and their references."""
    requests = make_prompts(model, tokens, seed, count)
    capacity = max(len(request.tokens) + tokens for request in requests)
    return Setup(model, tuple(refer(model, each, capacity) for each in requests), seed)


def make_prompts(model: Model, tokens: int, seed: int, count: int) -> list[Request]:
    """Requests of random prompts; n-grams repeat, and lengths run from 1 to LONGEST_PROMPT."""
    rng = np.random.default_rng([seed, count])
    vocabulary = min(model.cfg.vocab_size, model.tokenizer.vocab_size)
    lengths = np.linspace(LONGEST_PROMPT, 1, count).astype(int)
    prompts = []
    for number, length in enumerate(lengths.tolist()):
        ids = rng.integers(0, vocabulary, length)
        ids[ids == model.cfg.image_token_id] = 0  # it would ask for an image
        ids[length // 2 :][:4] = ids[:4][: length - length // 2]
        own = _SAMPLED[number % len(_SAMPLED)]
        prompts.append({"tokens": ids.tolist(), "id": number, "max_tokens": tokens, **own})
    options = Options(seed=seed)
    return make_requests(prompts, options, model.tokenizer, model.cfg, model.max_length)


def refer(
    model: Model, request: Request, capacity: int, prompt: feeding.Text | None = None
) -> Reference:
    """Run a request alone, one row per call; the reply goes on to max_tokens past any end token.

    capacity: of its cache, the same for all, so that they share a program; prompt: the request's
    tokens with images among them, default without.
    """
    end = len(request.tokens) + request.options.max_tokens
    cache = caches.init_cache(model.cfg, model.numerics, 1, capacity)
    sampling = _alone(request)
    text = feeding.plain_text(request.tokens, model.cfg) if prompt is None else prompt
    seen = []
    for position in range(end):
        part = [feeding.piece(0, text, position, position + 1)]
        fed, cache = feeding.feed(model, cache, part, 1, sampling=sampling, names=ROW)
        seen.append(fed.seen)
        if len(text) == position + 1 < end:
            text = feeding.joined(text, feeding.plain_text(fed.seen["token"], model.cfg))
    rows = {name: np.concatenate([row[name] for row in seen]) for name in ROW}
    rows["scored"] = _scored(rows, request)
    return Reference(request, text, rows, feeding.visible(model, cache, 0, end))


def _scored(rows: Mapping[str, np.ndarray], request: Request) -> np.ndarray:
    """Log-probability of the token that follows; in the reply it was drawn after its row ran."""
    reply = len(request.tokens) - 1
    return np.concatenate([rows["scored"][:reply], rows["raw"][reply:]])


def _alone(request: Request) -> Sampling:
    o = request.options
    return samplers.make_sampling(1, o.temperature, o.top_p, o.top_k, o.min_p, seeds=[request.seed])
