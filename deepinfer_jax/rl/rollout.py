"""Replies to a batch of prompts in one jitted program, with the log-probs a trainer needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import cache as caches
from deepinfer_jax import rounds, steps, summaries
from deepinfer_jax import rows as row_sets
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.mirror import Split
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.planning.schedules import Lengths
from deepinfer_jax.requests import FinishReason
from deepinfer_jax.rounds import Running
from deepinfer_jax.sampling import Sampled, Sampling
from deepinfer_jax.tables import Tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """Prompts with their replies; S is the prompts' width plus the most new tokens.

    tokens [B, S] int32, zeros from `lengths` [B] on; prompt_lengths [B]. raw, processed, kept_mass
    [B, S-1] float32: what the sampler saw of token i+1 (as in `steps.Scores`), zero where the
    token was not sampled. stopped [B] bool: the reply ends with one of its stop tokens, not at its
    limit. rounds: int32, decode steps or verification rounds that it took. routed [L, B, S, k]
    int32: logical ids of the experts of every token, best first, -1 from `lengths` on; None unless
    asked for.
    """

    tokens: jax.Array
    lengths: jax.Array
    prompt_lengths: jax.Array
    raw: jax.Array
    processed: jax.Array
    kept_mass: jax.Array
    stopped: jax.Array
    rounds: jax.Array
    routed: jax.Array | None = None

    __repr__ = summaries.of_fields

    @property
    def sampled(self) -> jax.Array:
        """[B, S-1] bool: token i+1 was sampled (and is not of the prompt or padding)."""
        place = jnp.arange(1, self.tokens.shape[1], dtype=jnp.int32)[None, :]
        return (place >= self.prompt_lengths[:, None]) & (place < self.lengths[:, None])

    def stop_reasons(self) -> list[FinishReason]:
        """Why each reply ended, on the host: "stop" or "length", as in `Result.finish_reason`."""
        return ["stop" if stopped else "length" for stopped in np.asarray(self.stopped).tolist()]


def rollout(
    params: Any, tables: Tables, prompts: jax.Array, lengths: jax.Array, sampling: Sampling,
    stops: jax.Array, cfg: ModelConfig, numerics: Numerics, *, new: int, size: int = 0,
    scheduled: jax.Array | None = None, together: tuple[str, ...] = (),
    limits: jax.Array | None = None, routed: bool = False, split: Split | None = None,
) -> Rollout:  # fmt: skip
    """Sample one reply to each prompt.

    Args:
      prompts: [B, P] int32, right-padded; lengths: [B], cut to 1..P.
      sampling: parameters and seeds of the B replies.
      stops: int32 token ids that end a reply, as its last token: [K], or [B, K] with those of each
        reply, filled up with -1.
      new: most tokens of any reply.
      size: drafts made in a round, 0 to decode one by one. Changes the speed only.
      scheduled: [R, B] int32, how many drafts to verify in round r (row r mod R); default: all.
      together: mesh axes whose devices go on until all are done (inside `jax.shard_map`).
      split: how devices share the prompts' rows, as in `forward`; they share the cache, too.
      limits: [B] int32, most tokens of each reply, cut to 1..new; default `new`.
      routed: also give the experts of every token. They are computed after sampling, in one pass
        over the finished sequences, which routes as the sampler did in every bit.

    Jit with `cfg`, `numerics`, `new`, `size` and `routed` static. `params` may be stored weights or
    a trainer's floats; new ones of the same shapes are another argument of the same program.
    Nothing is kept between calls, so no prefix of old weights can be used again.

    Raises ValueError where `lengths`, `new`, `size`, `scheduled`, `stops`, `limits` or `sampling`
    do not fit the prompts or the model, or prompt and reply reach beyond the tables.
    """
    b, p = prompts.shape
    _check(p + new, b, tables, cfg, new, size, scheduled)
    _check_ends(b, lengths, stops, limits)
    lengths = jnp.clip(lengths, 1, p)
    if scheduled is None:
        scheduled = jnp.full((1, b), size, jnp.int32)
    cache = caches.init_share(cfg, numerics, b, p + new, 1 if split is None else split.ranks)
    rows = row_sets.batch_rows(prompts, lengths)
    first, cache = steps.prefill(params, tables, rows, cache, sampling, cfg, numerics, split=split)
    ends = jnp.broadcast_to(jnp.atleast_2d(stops), (b, stops.shape[-1])).astype(jnp.int32)
    most = jnp.full((b,), new) if limits is None else jnp.clip(jnp.asarray(limits), 1, new)
    left = most.astype(jnp.int32) - 1
    going = ~jnp.any(first.token[:, None] == ends, axis=1) & (left > 0)
    running = Running(first.token, going, left, ends)
    first = jax.tree.map(lambda x: x[:, None], first)
    out = _record(_start(prompts, lengths, new), first, lengths, jnp.ones((b, 1), bool))
    out = _decoded(
        params, tables, out, running, cache, sampling, cfg, numerics, size, scheduled, together
    )
    out = _ended(out, ends)
    return _with_experts(out, params, tables, cfg, numerics) if routed else out


def _decoded(
    params: Any, tables: Tables, out: Rollout, running: Running, cache: Cache, sampling: Sampling,
    cfg: ModelConfig, numerics: Numerics, size: int, scheduled: jax.Array,
    together: tuple[str, ...],
) -> Rollout:  # fmt: skip
    """Rounds until every reply has ended, on all devices of the axes `together`."""

    def more(carry: tuple[Rollout, Running, Cache]) -> jax.Array:
        active = jnp.any(carry[1].active)
        return lax.pmax(active.astype(jnp.int32), together) > 0 if together else active

    def step(carry: tuple[Rollout, Running, Cache]) -> tuple[Rollout, Running, Cache]:
        out, running, cache = carry
        wanted = scheduled[out.rounds % scheduled.shape[0]]
        place = cache.lengths + 1
        made, running, cache = rounds.speculate(
            params, tables, running, cache, sampling, Lengths(wanted), cfg, numerics, size=size
        )
        return _record(out, made.sampled, place, made.emitted), running, cache

    return lax.while_loop(more, step, (out, running, cache))[0]


def _ended(out: Rollout, ends: jax.Array) -> Rollout:
    """`out` with `stopped`: whether the last token of each reply is one of `ends` [B, K]."""
    last = jnp.take_along_axis(out.tokens, out.lengths[:, None] - 1, axis=1)
    return dataclasses.replace(out, stopped=jnp.any(last == ends, axis=1))


def _with_experts(
    out: Rollout, params: Any, tables: Tables, cfg: ModelConfig, numerics: Numerics
) -> Rollout:
    """`out` with `routed`."""
    experts = steps.score(params, tables, out.tokens, out.lengths, cfg, numerics).routed
    place = jnp.arange(out.tokens.shape[1], dtype=jnp.int32)[None, :]
    there = (place < out.lengths[:, None])[None, :, :, None]
    return dataclasses.replace(out, routed=jnp.where(there, experts, -1))


def _check(
    longest: int, b: int, tables: Tables, cfg: ModelConfig, new: int, size: int,
    scheduled: jax.Array | None,
) -> None:  # fmt: skip
    if new < 1:
        raise ValueError(f"new (most tokens of a reply) must be at least 1, got {new}")
    known = tables.positions
    if longest > known:
        raise ValueError(
            f"prompts and replies reach {longest} tokens, the tables have {known} positions: cut "
            "the prompts, lower `new` or make longer tables"
        )
    most = cfg.most_drafts
    if not 0 <= size <= most:
        raise ValueError(
            f"size (drafts of a round) must lie in 0..{most} for this model, got {size}"
        )
    if scheduled is not None and (scheduled.ndim != 2 or scheduled.shape[1] != b):
        raise ValueError(
            f"scheduled must have shape [rounds, {b}], a column for each prompt, "
            f"got {list(scheduled.shape)}"
        )


def _check_ends(
    b: int, lengths: jax.Array, stops: jax.Array, limits: jax.Array | None
) -> None:  # fmt: skip
    if lengths.shape != (b,):
        raise ValueError(
            f"lengths must have shape [{b}], a number for each prompt, got {list(lengths.shape)}"
        )
    if stops.ndim != 1 and (stops.ndim != 2 or stops.shape[0] != b):
        raise ValueError(
            f"stops must have shape [K], or [{b}, K] with a row for each prompt, got "
            f"{list(stops.shape)}"
        )
    if limits is not None and limits.shape != (b,):
        raise ValueError(
            f"limits must have shape [{b}], a number for each prompt, got {list(limits.shape)}"
        )


def _start(prompts: jax.Array, lengths: jax.Array, new: int) -> Rollout:
    b, p = prompts.shape
    inside = jnp.arange(p, dtype=jnp.int32)[None, :] < lengths[:, None]
    tokens = jnp.pad(jnp.where(inside, prompts, 0).astype(jnp.int32), ((0, 0), (0, new)))
    nothing = jnp.zeros((b, p + new - 1), jnp.float32)
    stopped = jnp.zeros(lengths.shape, bool)
    return Rollout(tokens, lengths, lengths, nothing, nothing, nothing, stopped, jnp.int32(-1))


def _record(out: Rollout, judged: Sampled, place: jax.Array, emitted: jax.Array) -> Rollout:
    """Write emitted tokens [B, n], of which the first stands at `place` [B], and their numbers."""
    b, n = judged.token.shape
    row = jnp.broadcast_to(jnp.arange(b, dtype=jnp.int32)[:, None], (b, n))
    column = place[:, None] + jnp.arange(n, dtype=jnp.int32)[None, :]
    column = jnp.where(emitted, column, out.tokens.shape[1])  # out of range: dropped

    def put(to: jax.Array, value: jax.Array) -> jax.Array:
        return to.at[row, column - 1].set(value, mode="drop")

    return dataclasses.replace(
        out,
        tokens=out.tokens.at[row, column].set(judged.token, mode="drop"),
        lengths=out.lengths + jnp.count_nonzero(emitted, axis=1).astype(jnp.int32),
        raw=put(out.raw, judged.logprob_raw),
        processed=put(out.processed, judged.logprob_processed),
        kept_mass=put(out.kept_mass, judged.kept_mass),
        rounds=out.rounds + 1,
    )
