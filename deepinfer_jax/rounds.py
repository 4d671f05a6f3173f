"""Decoding in rounds: draft, verify, commit; a round without drafts is a plain decode step.

What is emitted is a function of the request alone. In coupled mode the target's token at an index
is chosen with the noise of that index, whoever asks for it, and a draft is accepted exactly when it
is that token: how many drafts are made and which of them are verified decide how much comes out of
a round and nothing else (docs/determinism.md). All functions are pure and can be jitted with `cfg`,
`numerics`, `size`, `rows`, `mode` and `steps` static. Legend: B slots, N drafts of a round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import edits as editing
from deepinfer_jax import layout, rejection, summaries
from deepinfer_jax import rows as row_sets
from deepinfer_jax import sampling as samplers
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.edits import Edits
from deepinfer_jax.model import draft, head, moe
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.planning.schedules import Lengths, Schedule
from deepinfer_jax.sampling import Sampled, Sampling
from deepinfer_jax.steps import Loads, check_mask, check_sampling, extend, loads_of
from deepinfer_jax.tables import Tables

Mode = Literal["coupled", "rejection"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Running:
    """A batch between rounds.

    tokens [B]: newest token of each slot, not yet in the cache; active [B]: slots that take part;
    left [B]: tokens each slot may still emit; stops [B, S]: token ids that end a slot (-1: none),
    emitted as its last token; edits: what slots change of their logits, None where none does.
    """

    tokens: jax.Array
    active: jax.Array
    left: jax.Array
    stops: jax.Array
    edits: Edits | None = None

    __repr__ = summaries.of_fields


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
    """What one round did.

    sampled     Sampled of [B, N + 1]: entry j is the target's choice after draft j
    emitted     [B, N + 1] bool: entries that became part of the reply; the others mean nothing
    drafts      [B, N] int32
    confidence  [B, N] float32, raw (see `planning.probabilities`)
    scheduled   [B] int32, drafts that were verified; 0 in slots that took no part
    accepted    [B] int32, leading ones among them that were right, emitted or not
    loads       tokens that each expert had (`steps.Loads`), where experts lie on slots
    """

    sampled: Sampled
    emitted: jax.Array
    drafts: jax.Array
    confidence: jax.Array
    scheduled: jax.Array
    accepted: jax.Array
    loads: Loads | None = None

    __repr__ = summaries.of_fields


# -- feeding rows ----------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Packing:
    """Rows of a flat call, slot after slot: slot, offset [T] (0 is the newest token), real [T] bool
    and the first row of every slot [B].
    """

    slot: jax.Array
    offset: jax.Array
    real: jax.Array
    first: jax.Array


def _pack(scheduled: jax.Array, active: jax.Array, rows: int) -> _Packing:
    count = jnp.where(active, scheduled + 1, 0)
    end = jnp.cumsum(count, dtype=jnp.int32)
    number = jnp.arange(rows, dtype=jnp.int32)
    slot = jnp.count_nonzero(end[None, :] <= number[:, None], axis=1).astype(jnp.int32)
    real = slot < count.shape[0]
    slot = jnp.where(real, slot, 0)
    first = end - count
    return _Packing(slot, jnp.where(real, number - first[slot], 0), real, first)


def fitting(scheduled: jax.Array, most: jax.Array, rows: int) -> jax.Array:
    """`scheduled` [B] cut to 0..most [B] and to a call of `rows` rows; most -1: an inactive slot.

    Every active slot has its own row; drafts that do not fit are left out of the last slots.
    """
    wanted = jnp.clip(scheduled, 0, jnp.maximum(most, 0))
    before = jnp.cumsum(wanted, dtype=jnp.int32) - wanted
    return jnp.clip(_room(most >= 0, rows) - before, 0, wanted)


def _room(active: jax.Array, rows: int) -> jax.Array:
    return rows - jnp.count_nonzero(active).astype(jnp.int32)


def verify(
    params: Any, tables: Tables, tokens: jax.Array, drafts: jax.Array, scheduled: jax.Array,
    active: jax.Array, cache: Cache, sampling: Sampling, cfg: ModelConfig, numerics: Numerics,
    *, rows: int | None = None, draft_logits: jax.Array | None = None,
    mask: jax.Array | None = None, edits: Edits | None = None,
) -> tuple[Sampled, Cache]:  # fmt: skip
    """Feed each slot its newest token and some drafts, and choose after every one of them.

    Args:
      tokens: [B] the newest token of each slot, not yet in the cache.
      drafts: [B, N] proposals for the positions that follow; N may be 0.
      scheduled: [B] how many of a slot's drafts to verify; cut as in `fitting`.
      active: [B] bool; other slots have no rows.
      rows: rows of the call, B to B * (N + 1) (the default). Fewer rows take less time.
      draft_logits: [B, N, V] what the drafts were drawn from; given, drafts are judged by rejection
        sampling (module `rejection`) instead of by the target's own choice.
      mask: bool, True where a token is allowed (each place needs one): [B, V], or [B, N + 1, V]
        where entry j is of the token that follows draft j. Drafts that it forbids are not right.
      edits: of the B slots, what they change of their logits; default nothing.

    Returns:
      (Sampled of [B, N + 1], cache). Entry j is the token that follows draft j, right if drafts
      1..j are what was chosen before them; entries beyond `scheduled` are arbitrary. Lengths are
      left alone: the caller decides how many rows count.

    Raises ValueError where N + 1 rows would overrun the cache's rings, or shapes do not fit.
    """
    b, n = drafts.shape
    rows = b * (n + 1) if rows is None else rows
    _check_rows(cache, cfg, n, rows)
    check_sampling(sampling, b)
    check_mask(mask, b, n + 1, cfg)
    fit = fitting(scheduled, jnp.where(active, n, -1), rows)
    sampled, _, cache = _verify(
        params, tables, tokens, drafts, fit, active, cache, sampling, cfg, numerics, rows,
        draft_logits, mask, edits,
    )  # fmt: skip
    return sampled, cache


def _verify(
    params: Any, tables: Tables, tokens: jax.Array, drafts: jax.Array, scheduled: jax.Array,
    active: jax.Array, cache: Cache, sampling: Sampling, cfg: ModelConfig, numerics: Numerics,
    rows: int, draft_logits: jax.Array | None, mask: jax.Array | None, edits: Edits | None,
) -> tuple[Sampled, Loads | None, Cache]:  # fmt: skip
    """`verify` with lengths that fit; also where tokens went, with experts on slots."""
    n = drafts.shape[1]
    packing = _pack(scheduled, active, rows)
    slot, offset = packing.slot, packing.offset
    fed = jnp.concatenate([tokens[:, None], drafts], axis=1)[slot, offset]
    positions = jnp.where(packing.real, cache.lengths[slot] + offset, 0)
    flat = row_sets.text_rows(fed, jnp.where(packing.real, slot, -1), positions)
    flat = row_sets.seeded(flat, sampling.seed)
    hidden, cache = extend(params, tables, flat, cache, cfg, numerics)
    logits = head.logits(params, hidden.output, numerics)
    each = jax.tree.map(lambda x: jnp.asarray(x)[slot], sampling)
    edits = None if edits is None else editing.of_rows(edits, slot, drafts, offset)
    mask = _allowed(mask, slot, offset)
    index = positions + 1
    own, allowed = editing.edited(editing.spoken(logits, cfg), edits, index, mask)
    if draft_logits is None:
        sampled = samplers.sample(logits, each, index, allowed, own)
    else:
        following = jnp.minimum(offset, n - 1)
        drawn = editing.spoken(draft_logits[slot, following], cfg)
        drawn = editing.edited(drawn, edits, index, mask)[0]
        sampled = rejection.sample(
            logits, drawn, drafts[slot, following], offset < scheduled[slot], each, index,
            allowed, own,
        )  # fmt: skip
    place = packing.first[:, None] + jnp.arange(n + 1, dtype=jnp.int32)[None, :]
    loads = loads_of(params, hidden.routed, flat, cfg)
    return jax.tree.map(lambda x: x[jnp.minimum(place, rows - 1)], sampled), loads, cache


def _allowed(mask: jax.Array | None, slot: jax.Array, offset: jax.Array) -> jax.Array | None:
    """The mask [T, V] of tokens that follow `offset` [T] drafts of `slot` [T]."""
    if mask is None:
        return None
    return mask[slot] if mask.ndim == 2 else mask[slot, offset]


def _check_rows(cache: Cache, cfg: ModelConfig, n: int, rows: int) -> None:
    slack = cache.window.shape[2] - cfg.sliding_window
    if n + 1 > slack:
        raise ValueError(
            f"{n} drafts are {n + 1} rows of a slot, but the cache has room for {slack} (its "
            f"slack): rejected rows would destroy what later ones read; verify at most {slack - 1} "
            f"drafts, or make the cache with slack={n + 1}"
        )
    if not cache.slots <= rows <= cache.slots * (n + 1):
        raise ValueError(
            f"rows (of one verification) must lie in {cache.slots}..{cache.slots * (n + 1)} for "
            f"{cache.slots} slots and {n} drafts, got {rows}"
        )


# -- one round -------------------------------------------------------------------------------------


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


def propose(
    params: Any, tables: Tables, running: Running, cache: Cache, sampling: Sampling,
    cfg: ModelConfig, numerics: Numerics, *, size: int, mode: Mode = "coupled",
    mask: jax.Array | None = None,
) -> draft.Draft:  # fmt: skip
    """`size` drafts after each slot's newest token; it can follow a prefill as well as a round.

    Coupled: drawn with the target's own noise; rejection: with noise of this round's own. `mask`
    [B, V] or [B, size, V] bool: what a draft may be, where entry j is of draft j + 1.
    Raises ValueError for a model without draft layers and for a size beyond its block.
    """
    if not cfg.num_nextn_predict_layers:
        raise ValueError("this model has no draft layers (num_nextn_predict_layers=0): use size=0")
    check_mask(mask, cache.slots, size, cfg)
    every = jnp.arange(cache.slots, dtype=jnp.int32)

    def pick(logits, position, before):
        offset, edits = position - cache.lengths - 1, running.edits
        if edits is not None and before:
            edits = editing.of_rows(edits, every, jnp.stack(before, axis=1), offset)
        allowed = _allowed(mask, every, offset)
        own, allowed = editing.edited(editing.spoken(logits, cfg), edits, position, allowed)
        if mode == "rejection":
            return rejection.draft(own, sampling, position, cache.lengths, allowed)
        return samplers.sample(own, sampling, position, allowed).token

    slots = jnp.where(running.active, every, -1)
    return draft.draft(
        params, tables, cache, slots, cache.lengths, running.tokens, pick, cfg, numerics, size,
        jnp.asarray(sampling.seed),
    )  # fmt: skip


def speculate(
    params: Any, tables: Tables, running: Running, cache: Cache, sampling: Sampling,
    schedule: Schedule, cfg: ModelConfig, numerics: Numerics, *, size: int,
    rows: int | None = None, mode: Mode = "coupled", mask: jax.Array | None = None,
) -> tuple[Round, Running, Cache]:  # fmt: skip
    """One round of every active slot: draft `size` tokens, verify as many as scheduled, commit.

    `rows`: of the verification, as in `verify`; what the schedule asks beyond them is cut. In
    coupled mode neither these nor `schedule` change what is emitted, only how much of it at once. A
    slot stops after a stop token or when nothing is left. With `size` 0 nothing is drafted: a plain
    decode step. `mask` [B, V] bool: what a slot may say, and draft, at all.

    Raises ValueError for an unknown mode and where sizes do not fit the model or the cache.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    b = cache.slots
    rows = b * (size + 1) if rows is None else rows
    _check_rows(cache, cfg, size, rows)
    check_sampling(sampling, b)
    check_mask(mask, b, None, cfg)
    drafts, confidence = jnp.zeros((b, 0), jnp.int32), jnp.zeros((b, 0), jnp.float32)
    scheduled, logits, loads = jnp.zeros((b,), jnp.int32), None, None
    if size:
        made = propose(
            params, tables, running, cache, sampling, cfg, numerics, size=size, mode=mode,
            mask=mask,
        )  # fmt: skip
        drafts, confidence = made.tokens, made.confidence
        loads = draft_loads(params, made, running, cfg)
        logits = made.logits if mode == "rejection" else None
        # The last token of a round is no draft: with one left nothing could come of drafts.
        most = jnp.where(running.active, jnp.clip(running.left - 1, 0, size), -1)
        room = _room(running.active, rows)
        wanted = schedule.lengths(confidence, jnp.maximum(most, 0), room)
        scheduled = fitting(wanted, most, rows)
    return settle(
        params, tables, running, drafts, confidence, scheduled, cache, sampling, cfg, numerics,
        rows=rows, draft_logits=logits, mask=mask, loads=loads,
    )  # fmt: skip


def settle(
    params: Any, tables: Tables, running: Running, drafts: jax.Array, confidence: jax.Array,
    scheduled: jax.Array, cache: Cache, sampling: Sampling, cfg: ModelConfig, numerics: Numerics,
    *, rows: int, draft_logits: jax.Array | None = None, mask: jax.Array | None = None,
    loads: Loads | None = None,
) -> tuple[Round, Running, Cache]:  # fmt: skip
    """The second half of a round: verify `scheduled` [B] of the drafts [B, N] and commit.

    `scheduled` must fit `rows` (see `fitting`); `loads` are those of the first half; the other
    arguments are those of `verify`.
    """
    sampled, verified, cache = _verify(
        params, tables, running.tokens, drafts, scheduled, running.active, cache, sampling, cfg,
        numerics, rows, draft_logits, mask, running.edits,
    )  # fmt: skip
    right = samplers.accepted(sampled.token, drafts, scheduled)
    emitted, running, count = commit(running, sampled.token, right)
    cache = dataclasses.replace(cache, lengths=cache.lengths + count)
    loads = None if verified is None else {**(loads or {}), **verified}
    made = Round(sampled, emitted, drafts, confidence, scheduled, right, loads)
    return made, running, cache


def commit(
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
    after = dataclasses.replace(
        running,
        tokens=jnp.where(running.active, newest, running.tokens),
        active=running.active & ~stopped & (left > 0),
        left=left,
        edits=editing.committed(running.edits, tokens, emitted),
    )
    return emitted, after, count


def draft_loads(params: Any, made: draft.Draft, running: Running, cfg: ModelConfig) -> Loads | None:
    """Where the tokens of proposing drafts went; None where no expert has a slot."""
    if not layout.has_placement(params):
        return None
    real = jnp.repeat(running.active, made.tokens.shape[1])
    return {"draft": moe.counted(made.routed, real, cfg.dspark_n_routed_experts)}


# -- many rounds -----------------------------------------------------------------------------------


def _going(
    active: jax.Array, stopped: jax.Array, enough: jax.Array, together: tuple[str, ...]
) -> jax.Array:
    """Whether another round is due, with slots `active` and `stopped` [B], on all devices alike."""
    any_active, ends = jnp.any(active), jnp.count_nonzero(stopped)
    if together:
        any_active = lax.pmax(any_active.astype(jnp.int32), together) > 0
        ends = lax.psum(ends.astype(jnp.int32), together)
    return any_active & ~((enough > 0) & (ends >= enough))


def decode_many(
    params: Any, tables: Tables, running: Running, cache: Cache, sampling: Sampling,
    cfg: ModelConfig, numerics: Numerics, *, steps: int, limit: jax.Array | None = None,
    leave: jax.Array | None = None, size: int = 0, rows: int | None = None,
    schedule: Schedule | None = None, mode: Mode = "coupled", mask: jax.Array | None = None,
    together: tuple[str, ...] = (),
) -> tuple[Round, Running, Cache]:  # fmt: skip
    """Up to `steps` rounds without returning to the host.

    Args:
      steps: most rounds, the length of the results.
      limit: int32 scalar, fewer rounds of the same program; default `steps`.
      leave: int32 scalar, return once so many slots have stopped (somebody waits for them);
        default 0: never.
      size: drafts made in a round; 0, the default, decodes one by one.
      rows, schedule, mode, mask: of every round, as in `speculate`; the default verifies every
        draft.
      together: mesh axes whose devices go on until all are done (inside `jax.shard_map`).

    Returns (Round of [steps, ...], running, cache). Rounds that were not run emit, schedule and
    accept nothing.
    """
    schedule = Lengths(jnp.int32(size)) if schedule is None else schedule
    limit = jnp.int32(steps) if limit is None else limit
    enough, started = jnp.int32(0) if leave is None else leave, running.active

    @jax.jit  # traced once, for the shapes of its record and for the loop
    def once(running: Running, cache: Cache) -> tuple[Round, Running, Cache]:
        return speculate(
            params, tables, running, cache, sampling, schedule, cfg, numerics, size=size, rows=rows,
            mode=mode, mask=mask,
        )  # fmt: skip

    def more(carry):
        done, now, *_ = carry
        return (done < limit) & _going(now.active, started & ~now.active, enough, together)

    def step(carry):
        done, now, cache, record = carry
        made, now, cache = once(now, cache)
        record = jax.tree.map(
            lambda every, one: lax.dynamic_update_index_in_dim(every, one, done, 0), record, made
        )
        return done + 1, now, cache, record

    shapes = jax.eval_shape(once, running, cache)[0]
    nothing = jax.tree.map(lambda one: jnp.zeros((steps, *one.shape), one.dtype), shapes)
    carry = (jnp.int32(0), running, cache, nothing)
    _, running, cache, record = lax.while_loop(more, step, carry)
    return record, running, cache
