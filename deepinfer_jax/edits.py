"""What requests change of their logits: biases, bans, penalties, least length, forced tokens.

The token at an index is chosen from the model's logits as they stand after the edits of its row.
Those are a function of the request and of the tokens before that index, drafts of the same round
included: like all else, not of batch, slot or schedule (docs/options.md). A model that reads images
never says its image token, whatever is asked (`spoken`). For a row that has edits, in this order:

    x = logit + bias
    x = x / repetition where x > 0, else x * repetition     tokens of prompt or reply
    x = x - frequency * count                               count of the token in the reply so far
    x = x - presence                                        tokens of the reply
    only a forced token; else neither banned tokens nor, before `first_end`, ends

Legend: B slots, T rows, V vocabulary, N drafts, S ids that end a reply, F places to force.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import numerics, summaries
from deepinfer_jax.config import ModelConfig

Array = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Edits:
    """The edits of B slots, or of T rows.

    Attributes:
      active: [B] bool; the other fields of a slot that is not mean nothing.
      bias: [B, V] float32; -inf: never said, and of no bias.
      repetition: [B, 2] float32, what logits up to 0 and above are multiplied with: the penalty and
        its reciprocal. Both are arguments, so that no program divides and another multiplies.
      frequency, presence: [B] float32.
      seen: [B, V] bool, tokens of the prompt.
      counts: [B, V] int32, how often the reply has each token, the newest included.
      ends: [B, S] int32, ids that end the reply (-1: none), which it may not say at an index below
        first_end: [B] int32.
      forced: [B, F] int32, tokens of the reply from its first, which stands at the index
        start: [B] int32; -1: free.
    """

    active: Array
    bias: Array
    repetition: Array
    frequency: Array
    presence: Array
    seen: Array
    counts: Array
    ends: Array
    first_end: Array
    forced: Array
    start: Array

    __repr__ = summaries.of_fields


def idle(slots: int, vocab: int, ends: int, forced: int) -> Edits:
    """No slot edits; room for `ends` ids that end a reply and `forced` places to force.

    No two fields share an array, so that all can be donated.
    """
    return Edits(
        active=jnp.zeros((slots,), bool),
        bias=jnp.zeros((slots, vocab), jnp.float32),
        repetition=jnp.ones((slots, 2), jnp.float32),
        frequency=jnp.zeros((slots,), jnp.float32),
        presence=jnp.zeros((slots,), jnp.float32),
        seen=jnp.zeros((slots, vocab), bool),
        counts=jnp.zeros((slots, vocab), jnp.int32),
        ends=jnp.full((slots, ends), -1, jnp.int32),
        first_end=jnp.zeros((slots,), jnp.int32),
        forced=jnp.full((slots, forced), -1, jnp.int32),
        start=jnp.zeros((slots,), jnp.int32),
    )


def make_edits(
    vocab: int,
    prompt: Sequence[int],
    reply: Sequence[int] = (),
    *,
    bias: Mapping[int, float] | None = None,
    allowed: Collection[int] | None = None,
    banned: Collection[int] = (),
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    ends: Sequence[int] = (),
    least: int = 0,
    forced: Sequence[int] = (),
) -> Edits:
    """The edits of one slot in NumPy, with a B of 1, for a request whose reply so far is `reply`.

    `least`: tokens before an end; `ends` and `forced` come padded with -1. Values and ids are
    checked where requests are made (`requests.Options`, `prompts.make_requests`).
    """
    added = np.zeros(vocab, np.float32)
    for token, value in (bias or {}).items():
        added[token] = value
    added[~sayable(vocab, allowed, banned)] = -np.inf
    seen = np.zeros(vocab, bool)
    seen[list(prompt)] = True
    counts = np.bincount(np.array(reply, np.int64), minlength=vocab)
    return Edits(
        active=np.ones(1, bool),
        bias=added[None],
        repetition=np.array([[repetition, 1 / repetition]], np.float32),
        frequency=np.array([frequency], np.float32),
        presence=np.array([presence], np.float32),
        seen=seen[None],
        counts=counts.astype(np.int32)[None],
        ends=np.array([ends], np.int32).reshape(1, -1),
        first_end=np.array([len(prompt) + least], np.int32),
        forced=np.array([forced], np.int32).reshape(1, -1),
        start=np.array([len(prompt)], np.int32),
    )


def sayable(
    vocab: int, allowed: Collection[int] | None = None, banned: Collection[int] = ()
) -> np.ndarray:
    """[V] bool, on the host: what may be said at all; `allowed` None is all."""
    may = np.full(vocab, allowed is None)
    may[list(allowed or ())] = True
    may[list(banned)] = False
    return may


def spoken(logits: jax.Array, cfg: ModelConfig) -> jax.Array:
    """`logits` [T, V] with -inf at the image token of a model that has one.

    It marks the places of an image in a prompt and means nothing in a reply, so no token, draft or
    mass is ever its own; log-probabilities that are not processed still are the model's.
    """
    if cfg.image_token_id is None:
        return logits
    return jnp.where(_ids(logits) == cfg.image_token_id, -jnp.inf, logits)


def place(edits: Edits, slot: jax.Array, one: Edits) -> Edits:
    """`edits` with those of `one` (a B of 1) in `slot`."""
    return jax.tree.map(lambda every, x: every.at[slot].set(x[0]), edits, one)


def widened(edits: Edits, ends: int, forced: int) -> Edits:
    """`edits` with room for `ends` ids that end a reply and `forced` places to force."""

    def wide(ids: Array, size: int) -> jax.Array:
        return jnp.pad(ids, ((0, 0), (0, size - ids.shape[1])), constant_values=-1)

    return dataclasses.replace(
        edits, ends=wide(edits.ends, ends), forced=wide(edits.forced, forced)
    )


def of_rows(edits: Edits, slot: Array, drafts: Array, offset: Array) -> Edits:
    """The edits of T rows, each behind `offset` [T] of the drafts [B, N] of its `slot` [T]."""
    rows = jax.tree.map(lambda x: x[slot], edits)
    if not drafts.shape[1]:
        return rows
    said = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :] < offset[:, None]
    every = jnp.where(said, drafts[slot], -1)[:, :, None] == _ids(rows.bias)[:, None, :]
    more = jnp.count_nonzero(every, axis=1).astype(jnp.int32)
    return dataclasses.replace(rows, counts=rows.counts + more)


@jax.named_scope("edited")
def edited(
    logits: jax.Array, edits: Edits | None, index: Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """What tokens are drawn from at the absolute `index` [T]: logits [T, V] and mask [T, V] bool.

    `mask`: what is allowed beside the edits of the T rows (default all). A row without edits keeps
    its logits and its mask in every bit; without `edits` there is nothing to do.
    """
    if edits is None:
        return logits, mask
    active = edits.active[:, None]
    allowed = jnp.where(active, _allowed(edits, jnp.asarray(index)), True)
    changed = jnp.where(active, _changed(logits, edits), logits)
    return changed, allowed if mask is None else mask & allowed


def _changed(logits: jax.Array, edits: Edits) -> jax.Array:
    """Bias and penalties. What feeds an addition is pinned: no program may contract the two."""
    bias = jnp.asarray(edits.bias)
    x = numerics.pin(logits) + jnp.where(bias == -jnp.inf, 0, bias)
    less, more = edits.repetition[:, :1], edits.repetition[:, 1:]
    said = edits.counts > 0
    x = jnp.where(edits.seen | said, numerics.pin(x * jnp.where(x > 0, more, less)), x)
    count = edits.counts.astype(jnp.float32)
    x = x - numerics.pin(edits.frequency[:, None] * count)
    return x - jnp.where(said, edits.presence[:, None], 0)


def _allowed(edits: Edits, index: jax.Array) -> jax.Array:
    """[T, V] bool: what may be said at the `index` [T]."""
    ids = _ids(edits.bias)
    early = (index < edits.first_end)[:, None]
    ending = jnp.any(edits.ends[:, :, None] == ids[:, None, :], axis=1)
    allowed = (jnp.asarray(edits.bias) > -jnp.inf) & ~(early & ending)
    places = edits.forced.shape[1]
    if not places:
        return allowed
    count = index - edits.start
    token = jnp.take_along_axis(edits.forced, jnp.clip(count, 0, places - 1)[:, None], axis=1)
    token = jnp.where((count < places)[:, None], token, -1)
    return jnp.where(token >= 0, ids == token, allowed)


def committed(edits: Edits | None, tokens: jax.Array, emitted: jax.Array) -> Edits | None:
    """`edits` of B slots once those of tokens [B, K] that are `emitted` [B, K] bool are said."""
    if edits is None:
        return None
    slot = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    counts = jnp.asarray(edits.counts).at[slot, tokens].add(emitted.astype(jnp.int32))
    return dataclasses.replace(edits, counts=counts)


def _ids(like: Array) -> jax.Array:
    """Token ids [T, V] int32."""
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, 1)
