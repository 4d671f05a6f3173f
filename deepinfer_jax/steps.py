"""The transitions: state in, state out. Everything that generates or scores is made of these.

`prefill` and `decode` advance sequences and sample; `decode_many` keeps a batch on the device for
several steps; `score` recomputes log-probabilities without a cache, for trainers. All are pure,
take arrays as arguments and can be jitted with `cfg`, `numerics` and the other keywords static.
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


def last_rows(rows: Rows, slots: int) -> jax.Array:
    """The number of each slot's last row [B]; 0 where a slot has none."""
    number = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    target = jnp.where(rows.real, rows.slots, slots)
    return jnp.zeros((slots,), jnp.int32).at[target].max(number, mode="drop")


def decode(
    params: Any, tables: Tables, tokens: jax.Array, active: jax.Array, cache: Cache,
    sampling: Sampling, cfg: ModelConfig, numerics: Numerics,
) -> tuple[Sampled, Cache]:  # fmt: skip
    """Feed one token per slot and sample the next.

    tokens [B]: the newest token of each slot, not yet in the cache; active [B] bool: slots that
    take part, the others are left as they are and sample something arbitrary.
    """
    slots = jnp.where(active, jnp.arange(cache.slots, dtype=jnp.int32), -1)
    positions = jnp.where(active, cache.lengths, 0)
    rows = row_sets.text_rows(tokens, slots, positions)
    hidden, cache = extend(params, tables, rows, cache, cfg, numerics)
    logits = head.logits(params, hidden.output, numerics)
    sampled = samplers.sample(logits, sampling, positions + 1)
    lengths = cache.lengths + active.astype(jnp.int32)
    return sampled, dataclasses.replace(cache, lengths=lengths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Running:
    """A batch between decode steps.

    tokens [B]: newest token of each slot; active [B]; left [B]: tokens each slot may still emit;
    stops [B, S]: token ids that end a slot (-1: none), emitted as its last token.
    """

    tokens: jax.Array
    active: jax.Array
    left: jax.Array
    stops: jax.Array


def decode_many(
    params: Any, tables: Tables, running: Running, cache: Cache, sampling: Sampling,
    cfg: ModelConfig, numerics: Numerics, *, steps: int,
) -> tuple[Sampled, jax.Array, Running, Cache]:  # fmt: skip
    """`steps` decode steps without returning to the host.

    Returns (Sampled of [steps, B], emitted [steps, B] bool, running, cache). A slot stops after a
    stop token or when nothing is left; what it samples afterwards is marked not emitted.
    """

    def step(carry, _):
        now, cache = carry
        sampled, cache = decode(
            params, tables, now.tokens, now.active, cache, sampling, cfg, numerics
        )
        left = now.left - now.active.astype(jnp.int32)
        stopped = jnp.any(sampled.token[:, None] == now.stops, axis=1)
        after = Running(
            tokens=jnp.where(now.active, sampled.token, now.tokens),
            active=now.active & ~stopped & (left > 0),
            left=left,
            stops=now.stops,
        )
        return (after, cache), (sampled, now.active)

    (running, cache), (sampled, emitted) = lax.scan(step, (running, cache), length=steps)
    return sampled, emitted, running, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """raw [B, S-1]: log-probability at temperature 1 of token i+1 given tokens 0..i; routed
    [L, B, S, k]: experts of every token. Entries at or beyond a row's length are arbitrary.
    """

    raw: jax.Array
    routed: jax.Array


def score(
    params: Any, tables: Tables, tokens: jax.Array, lengths: jax.Array, cfg: ModelConfig,
    numerics: Numerics, *, remat: bool = False,
) -> Scores:  # fmt: skip
    """Log-probabilities of tokens [B, S] (right-padded, lengths [B]): what the sampler saw.

    No cache; differentiable in `params` when they are plain floats. The values are the sampler's
    `logprob_raw` in every bit, whatever the batch, the padding and the prefill and decode schedule.
    """
    b, s = tokens.shape
    rows = row_sets.batch_rows(tokens, lengths)
    hidden, _ = forward(params, tables, rows, None, cfg, numerics, length=s, remat=remat)
    following = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1).reshape(-1)
    raw = _row_logprobs(params, hidden.output, following, numerics)
    return Scores(
        raw.reshape(b, s)[:, :-1], hidden.routed.reshape(-1, b, s, hidden.routed.shape[-1])
    )


def _row_logprobs(
    params: Any, output: jax.Array, tokens: jax.Array, numerics: Numerics
) -> jax.Array:
    """Log-probability of one token per row, in blocks of rows so that few logits exist at once."""
    count = output.shape[0]
    block = min(SCORE_ROWS, count)
    pad = -count % block

    @jax.checkpoint
    def one(part):
        x, token = part
        return samplers.logprob(head.logits(params, x, numerics), token)

    parts = (jnp.pad(output, ((0, pad), (0, 0))), jnp.pad(tokens, (0, pad)))
    parts = jax.tree.map(lambda a: a.reshape(-1, block, *a.shape[1:]), parts)
    return lax.map(one, parts).reshape(-1)[:count]
