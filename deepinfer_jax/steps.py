"""The transitions: state in, state out. Everything that generates or scores is made of these.

`prefill` and `decode` advance sequences and sample; `verify` feeds several tokens of each at once
and `speculate` drafts, verifies and commits a round; `decode_many` keeps a batch on the device for
several steps; `score` recomputes log-probabilities without a cache, for trainers. All are pure,
take arrays as arguments and can be jitted with `cfg`, `numerics` and the sizes static.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import rows as row_sets
from deepinfer_jax import sampling as samplers
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import draft, head
from deepinfer_jax.model.forward import OFF, Hidden, Replay, forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows
from deepinfer_jax.sampling import Sampled, Sampling
from deepinfer_jax.tables import Tables

SCORE_ROWS = 1024  # rows whose logits exist at once while scoring


def extend(
    params: Any, tables: Tables, rows: Rows, cache: Cache, cfg: ModelConfig, numerics: Numerics,
    *, replay: Replay = OFF, prompt_lengths: jax.Array | None = None,
) -> tuple[Hidden, Cache]:  # fmt: skip
    """Run `rows` through the backbone and store the drafter's context; lengths stay as they are."""
    hidden, after = forward(
        params, tables, rows, cache, cfg, numerics, replay=replay, prompt_lengths=prompt_lengths
    )
    assert after is not None  # a cache went in
    if cfg.num_nextn_predict_layers:
        after = draft.store_context(params, tables, hidden, after, cfg, numerics)
    return hidden, after


def prefill(
    params: Any, tables: Tables, rows: Rows, cache: Cache, sampling: Sampling, cfg: ModelConfig,
    numerics: Numerics, *, replay: Replay = OFF, prompt_lengths: jax.Array | None = None,
) -> tuple[Sampled, Cache]:  # fmt: skip
    """Run prompt rows (whole prompts or chunks) and sample the next token of every slot.

    Args:
      rows: T rows, continuing what the cache holds of each slot.
      sampling: parameters of the B slots.

    Returns:
      (Sampled of [B], cache). The sample of a slot is that of its last row here, to be used when
      the row is the prompt's last; slots without rows give an arbitrary sample. `cache.lengths`
      becomes the end of each slot's rows.
    """
    _check_sampling(sampling, cache.slots)
    hidden, cache = extend(
        params, tables, rows, cache, cfg, numerics, replay=replay, prompt_lengths=prompt_lengths
    )
    last = last_rows(hidden.rows, cache.slots)
    logits = head.logits(params, hidden.output[last], numerics)
    # From the call's rows: a compact replay may have dropped every row of a slot's early chunk.
    target = jnp.where(rows.real, rows.slots, cache.slots)
    ends = jnp.zeros((cache.slots,), jnp.int32).at[target].max(rows.positions + 1, mode="drop")
    lengths = jnp.where(ends > 0, ends, cache.lengths)
    sampled = samplers.sample(logits, sampling, ends)
    return sampled, dataclasses.replace(cache, lengths=lengths)


def _check_sampling(sampling: Sampling, count: int) -> None:
    """One row of parameters for each sequence: a single one would be broadcast, noise and all."""
    given = sampling.seed.shape[0]
    if given != count:
        raise ValueError(
            f"sampling has parameters of {given} rows for {count} sequences or slots: make one row "
            "for each, with a seed of its own (make_sampling)"
        )


def last_rows(rows: Rows, slots: int) -> jax.Array:
    """The number of each slot's last row [B]; 0 where a slot has none."""
    number = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    target = jnp.where(rows.real, rows.slots, slots)
    return jnp.zeros((slots,), jnp.int32).at[target].max(number, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Running:
    """A batch between decode steps.

    tokens [B]: newest token of each slot, not yet in the cache; active [B]: slots that take part;
    left [B]: tokens each slot may still emit; stops [B, S]: token ids that end a slot (-1: none),
    emitted as its last token.
    """

    tokens: jax.Array
    active: jax.Array
    left: jax.Array
    stops: jax.Array


def decode(
    params: Any, tables: Tables, tokens: jax.Array, active: jax.Array, cache: Cache,
    sampling: Sampling, cfg: ModelConfig, numerics: Numerics,
) -> tuple[Sampled, Cache]:  # fmt: skip
    """Feed one token per slot and sample the next.

    tokens [B]: the newest token of each slot, not yet in the cache; active [B] bool: slots that
    take part, the others are left as they are and sample something arbitrary.
    """
    none = jnp.zeros((cache.slots, 0), jnp.int32)
    judged, cache = verify(
        params, tables, tokens, none, jnp.zeros_like(tokens), active, cache, sampling, cfg, numerics
    )
    lengths = cache.lengths + active.astype(jnp.int32)
    sampled = jax.tree.map(lambda x: x[:, 0], judged)
    return sampled, dataclasses.replace(cache, lengths=lengths)


def verify(
    params: Any, tables: Tables, tokens: jax.Array, drafts: jax.Array, scheduled: jax.Array,
    active: jax.Array, cache: Cache, sampling: Sampling, cfg: ModelConfig, numerics: Numerics,
) -> tuple[Sampled, Cache]:  # fmt: skip
    """Feed each slot its newest token and some drafts, and sample after every one of them.

    Args:
      tokens: [B] the newest token of each slot, not yet in the cache.
      drafts: [B, N] proposals for the positions that follow; N may be 0.
      scheduled: [B] how many of a slot's drafts to verify; cut to 0..N.
      active: [B] bool; other slots have no rows.

    Returns:
      (Sampled of [B, N + 1], cache). Entry j is the target's own choice after draft j, right if
      drafts 1..j are what was chosen before them; entries beyond `scheduled` are arbitrary. Lengths
      are left alone: the caller decides how many rows count (engine spec 1.1).

    Raises ValueError where N + 1 rows would overrun the cache's rings, or shapes do not fit.
    """
    n = drafts.shape[1]
    slack = cache.window.shape[2] - cfg.sliding_window
    if n + 1 > slack:
        raise ValueError(
            f"{n} drafts are {n + 1} rows of a slot, but the cache has room for {slack} (its "
            f"slack): rejected rows would destroy what later ones read; verify at most {slack - 1} "
            f"drafts, or make the cache with slack={n + 1}"
        )
    _check_sampling(sampling, cache.slots)
    scheduled = jnp.clip(scheduled, 0, n)
    offset = jnp.arange(n + 1, dtype=jnp.int32)[None, :]
    fed = jnp.concatenate([tokens[:, None], drafts], axis=1)
    real = active[:, None] & (offset <= scheduled[:, None])
    slots = jnp.where(real, jnp.arange(cache.slots, dtype=jnp.int32)[:, None], -1)
    positions = jnp.where(real, cache.lengths[:, None] + offset, 0)
    rows = row_sets.text_rows(fed.reshape(-1), slots.reshape(-1), positions.reshape(-1))
    hidden, cache = extend(params, tables, rows, cache, cfg, numerics)
    logits = head.logits(params, hidden.output, numerics)
    each = jax.tree.map(lambda x: jnp.repeat(x, n + 1, axis=0), sampling)
    sampled = samplers.sample(logits, each, rows.positions + 1)
    return jax.tree.map(lambda x: x.reshape(-1, n + 1), sampled), cache


def propose(
    params: Any, tables: Tables, running: Running, cache: Cache, sampling: Sampling,
    cfg: ModelConfig, numerics: Numerics, *, size: int,
) -> draft.Draft:  # fmt: skip
    """`size` drafts after each slot's newest token, drawn with the target's own noise.

    Raises ValueError for a model without draft layers and for a size beyond its block.
    """
    if not cfg.num_nextn_predict_layers:
        raise ValueError("this model has no draft layers (num_nextn_predict_layers=0): use size=0")
    slots = jnp.where(running.active, jnp.arange(cache.slots, dtype=jnp.int32), -1)

    def pick(logits, position):
        return samplers.sample(logits, sampling, position).token

    return draft.draft(
        params, tables, cache, slots, cache.lengths, running.tokens, pick, cfg, numerics, size
    )


def speculate(
    params: Any, tables: Tables, running: Running, cache: Cache, sampling: Sampling,
    scheduled: jax.Array, cfg: ModelConfig, numerics: Numerics, *, size: int,
) -> tuple[Sampled, jax.Array, Running, Cache]:  # fmt: skip
    """One round of every active slot: draft `size` tokens, verify `scheduled` [B] of them, commit.

    Returns (Sampled of [B, size + 1], emitted [B, size + 1] bool, running, cache). What is emitted
    does not depend on `size` or `scheduled`, only how much of it at once: a draft is accepted
    exactly when it is the token that the target chooses there (engine spec 1.7). A slot stops after
    a stop token or when nothing is left. With `size` 0 nothing is drafted: a plain decode step.
    """
    if size:
        made = propose(params, tables, running, cache, sampling, cfg, numerics, size=size)
        drafts = made.tokens
    else:
        drafts = jnp.zeros((cache.slots, 0), jnp.int32)
    judged, cache = verify(
        params, tables, running.tokens, drafts, scheduled, running.active, cache, sampling, cfg,
        numerics,
    )  # fmt: skip
    right = samplers.accepted(judged.token, drafts, scheduled)
    emitted, running, count = _commit(running, judged.token, right)
    cache = dataclasses.replace(cache, lengths=cache.lengths + count)
    return judged, emitted, running, cache


def _commit(
    running: Running, tokens: jax.Array, right: jax.Array
) -> tuple[jax.Array, Running, jax.Array]:
    """Emit tokens [B, N + 1] up to the one after `right` [B] accepted drafts.

    Returns (emitted [B, N + 1] bool, running, number emitted [B]).
    """
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    stopping = jnp.any(tokens[:, :, None] == running.stops[:, None, :], axis=2)
    before = jnp.cumsum(stopping, axis=1, dtype=jnp.int32) - stopping.astype(jnp.int32)
    emitted = (offset <= right[:, None]) & (before == 0) & (offset < running.left[:, None])
    emitted = emitted & running.active[:, None]
    count = jnp.count_nonzero(emitted, axis=1).astype(jnp.int32)
    last = jnp.maximum(count - 1, 0)[:, None]
    newest = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    stopped = jnp.any(emitted & stopping, axis=1)
    left = running.left - count
    after = Running(
        tokens=jnp.where(running.active, newest, running.tokens),
        active=running.active & ~stopped & (left > 0),
        left=left,
        stops=running.stops,
    )
    return emitted, after, count


def decode_many(
    params: Any, tables: Tables, running: Running, cache: Cache, sampling: Sampling,
    cfg: ModelConfig, numerics: Numerics, *, steps: int, limit: jax.Array | None = None,
    leave: jax.Array | None = None,
) -> tuple[Sampled, jax.Array, Running, Cache]:  # fmt: skip
    """Up to `steps` decode steps without returning to the host.

    Args:
      steps: most steps, the length of the results.
      limit: int32 scalar, fewer steps of the same program; default `steps`.
      leave: bool scalar, return as soon as a slot stops (somebody waits for it); default False.

    Returns (Sampled of [steps, B], emitted [steps, B] bool, running, cache). A slot stops after a
    stop token or when nothing is left; entries that are not emitted are arbitrary.
    """
    shape = (steps, cache.slots)
    number = jnp.zeros(shape, jnp.float32)
    nothing = Sampled(jnp.zeros(shape, jnp.int32), number, number, number)
    none = jnp.zeros((cache.slots,), jnp.int32)
    limit = jnp.int32(steps) if limit is None else limit
    leave = jnp.asarray(False) if leave is None else leave
    started = running.active

    def more(carry):
        done, now, *_ = carry
        stopped = jnp.any(started & ~now.active)
        return (done < limit) & jnp.any(now.active) & ~(leave & stopped)

    def step(carry):
        done, now, cache, sampled, emitted = carry
        judged, emits, now, cache = speculate(
            params, tables, now, cache, sampling, none, cfg, numerics, size=0
        )
        sampled, emitted = jax.tree.map(
            lambda all, new: lax.dynamic_update_slice(all, new.T, (done, 0)),
            (sampled, emitted),
            (judged, emits),
        )
        return done + 1, now, cache, sampled, emitted

    carry = (jnp.int32(0), running, cache, nothing, jnp.zeros(shape, bool))
    _, running, cache, sampled, emitted = lax.while_loop(more, step, carry)
    return sampled, emitted, running, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """What the sampler saw of tokens [B, S]; entries at or beyond a row's length are arbitrary.

    raw, processed, kept_mass [B, S-1] float32: of token i+1 given tokens 0..i, as in `Sampled`.
    routed [L, B, S, k]: experts of every token, best first.
    """

    raw: jax.Array
    processed: jax.Array
    kept_mass: jax.Array
    routed: jax.Array


def score(
    params: Any, tables: Tables, tokens: jax.Array, lengths: jax.Array, cfg: ModelConfig,
    numerics: Numerics, *, sampling: Sampling | None = None, remat: bool = False,
) -> Scores:  # fmt: skip
    """Log-probabilities of tokens [B, S] (right-padded, lengths [B]): what the sampler saw.

    sampling: parameters of the B sequences; None is temperature 1 without truncation, where
    `processed` equals `raw`. No cache; differentiable in `params` when they are plain floats. The
    values are the sampler's in every bit, whatever the batch, the padding and the prefill, decode
    and draft schedule.
    """
    b, s = tokens.shape
    if sampling is not None:
        _check_sampling(sampling, b)
    rows = row_sets.batch_rows(tokens, lengths)
    hidden, _ = forward(params, tables, rows, None, cfg, numerics, length=s, remat=remat)
    following = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1).reshape(-1)
    each = None
    if sampling is not None:
        each = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), s, axis=0), sampling)
    seen = _judge_rows(params, hidden.output, following, each, numerics)
    raw, processed, kept = (x.reshape(b, s)[:, :-1] for x in seen)
    routed = hidden.routed.reshape(-1, b, s, hidden.routed.shape[-1])
    return Scores(raw, processed, kept, routed)


def _judge_rows(
    params: Any, output: jax.Array, tokens: jax.Array, sampling: Sampling | None,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """(raw, processed, kept mass) of one token per row, in blocks of rows so that few logits exist
    at once.
    """
    count = output.shape[0]
    block = min(SCORE_ROWS, count)
    pad = -count % block

    @jax.checkpoint
    def one(part):
        x, token, sampling = part
        logits = head.logits(params, x, numerics)
        if sampling is None:
            raw = samplers.logprob(logits, token)
            return raw, raw, jnp.ones_like(raw)
        seen = samplers.judge(logits, token, sampling)
        return seen.logprob_raw, seen.logprob_processed, seen.kept_mass

    def blocks(x):
        padded = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, block, *x.shape[1:])

    parts = jax.tree.map(blocks, (output, tokens, sampling))
    return jax.tree.map(lambda x: x.reshape(-1)[:count], lax.map(one, parts))
