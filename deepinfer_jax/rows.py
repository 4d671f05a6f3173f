"""Rows: the tokens one call works on, flat, whatever they are for.

A row is one token of one slot at one absolute position. Rows of a slot are contiguous and ascending
in position; how many each slot has is free. A whole prompt, a chunk of one, single decode steps and
verification runs of different lengths are all just rows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import summaries

FAR = np.int32(2**30)  # a position that no sequence reaches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """T rows.

    tokens      [T] int32
    slots       [T] int32; -1 marks a padding row: it writes nothing, its results mean nothing
    positions   [T] int32, absolute, from 0
    image       [T] bool: inside an image span, delimiters included
    embeddings  [T, D] replacing the token embedding where `image`, or None for text
    seeds       [T, 2] uint32, of each row's request: which replica of an expert it goes to; None: 0
    """

    tokens: jax.Array
    slots: jax.Array
    positions: jax.Array
    image: jax.Array
    embeddings: jax.Array | None = None
    seeds: jax.Array | None = None

    __repr__ = summaries.of_fields

    @property
    def real(self) -> jax.Array:
        """[T] bool: not padding."""
        return self.slots >= 0


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`: sizes of calls are few."""
    return 1 << (count - 1).bit_length()


def text_rows(tokens: jax.Array, slots: jax.Array, positions: jax.Array) -> Rows:
    """Rows without images."""
    tokens = jnp.asarray(tokens, jnp.int32)
    return Rows(
        tokens,
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(positions, jnp.int32),
        jnp.zeros(tokens.shape, bool),
    )


def batch_rows(tokens: jax.Array, lengths: jax.Array) -> Rows:
    """Rows of a right-padded batch tokens [B, S]: lengths[b] tokens of row b, from position 0."""
    tokens = jnp.asarray(tokens, jnp.int32)
    b, s = tokens.shape
    offset = jnp.arange(s, dtype=jnp.int32)[None, :]
    slots = jnp.where(offset < lengths[:, None], jnp.arange(b, dtype=jnp.int32)[:, None], -1)
    positions = jnp.where(slots >= 0, offset, 0)
    return text_rows(tokens.reshape(-1), slots.reshape(-1), positions.reshape(-1))


def join_rows(first: Rows, second: Rows) -> Rows:
    """The rows of two calls as one; no slot may have rows in both. `second` is without images."""
    if first.embeddings is not None:
        t, d = second.slots.shape[0], first.embeddings.shape[1]
        second = dataclasses.replace(second, embeddings=jnp.zeros((t, d), first.embeddings.dtype))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)


def seeded(rows: Rows, seeds: jax.Array | np.ndarray) -> Rows:
    """`rows` with the seeds [B, 2] of the slots' requests; no bit of any result depends on them."""
    return dataclasses.replace(rows, seeds=jnp.asarray(seeds)[jnp.maximum(rows.slots, 0)])


def take_rows(rows: Rows, index: jax.Array) -> Rows:
    """The rows at `index` [N]; -1 gives a padding row."""
    safe = jnp.maximum(index, 0)
    taken = jax.tree.map(lambda a: a[safe], rows)
    return dataclasses.replace(
        taken,
        slots=jnp.where(index >= 0, taken.slots, -1),
        positions=jnp.where(index >= 0, taken.positions, 0),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spans:
    """Where each slot's rows lie in this call: first row [B], first position [B] (FAR: none)."""

    first: jax.Array
    start: jax.Array

    @property
    def slots(self) -> int:
        """Number of slots B."""
        return self.first.shape[0]


def spans_of(rows: Rows, slots: int) -> Spans:
    """Find the spans of `rows` over `slots` slots."""
    to = jnp.where(rows.real, rows.slots, slots)
    count = rows.slots.shape[0]
    order = jnp.arange(count, dtype=jnp.int32)
    first = jnp.full((slots,), count, jnp.int32).at[to].min(order, mode="drop")
    start = jnp.full((slots,), FAR, jnp.int32).at[to].min(rows.positions, mode="drop")
    return Spans(first, start)


def row_of(spans: Spans, slot: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(is the token at `position` of `slot` a row of this call, its row number; 0 where it is not).

    Positions after the slot's last row are not asked for: nothing looks ahead.
    """
    start = spans.start[slot]
    inside = position >= start
    return inside, jnp.where(inside, spans.first[slot] + position - start, 0)
