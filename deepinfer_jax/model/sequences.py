"""Attention and index scores of whole sequences at once: the dense forms that training uses.

The rows of a call are B sequences of S tokens each, from position 0, row b * S + p
(`rows.batch_rows`). Masks stand where serving gathers, so gradients need no scattering; the sums
are the same up to their order. Serving never comes here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import numerics as nx
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of whole sequences, and who sees which; S = C chunks of W tokens, W the window.

    near [B, C, 2W, K]: the chunk before and the chunk itself; near_mask [B, C, W, 2W].
    far [B, N, K]: compressed entries, or None; far_mask [B, C, W, N].
    """

    near: jax.Array
    near_mask: jax.Array
    far: jax.Array | None
    far_mask: jax.Array | None


def check_rows(count: int, length: int, window: int, ratios: tuple[int, ...]) -> None:
    """Refuse a call that is not whole sequences of `length` tokens (`rows="dense"`)."""
    steps = (window, *ratios)
    if count % length or any(length % step for step in steps):
        raise ValueError(
            f'rows="dense" needs sequences of `length` tokens, a multiple of the window and of the '
            f'ratios {steps}: got {count} rows and length={length}; pad, or use rows="batched"'
        )


def entries_of(data: jax.Array, length: int, ratio: int) -> jax.Array:
    """Compressed vectors [T, K], each at the row of its group's last token -> [B, S/m, K]."""
    return data.reshape(-1, length // ratio, ratio, data.shape[-1])[:, :, ratio - 1]


def selected_mask(selected: jax.Array, count: int) -> jax.Array:
    """Entry lists [T, k], ascending, -1 padded -> bool [T, count]."""
    if selected.shape[1] >= count:  # then a list holds all that its row may see: a prefix
        kept = jnp.count_nonzero(selected >= 0, axis=1)
        return jnp.arange(count, dtype=jnp.int32)[None, :] < kept[:, None]
    return jnp.any(selected[:, :, None] == jnp.arange(count, dtype=jnp.int32)[None, None], axis=1)


def visible_mask(rows: Rows, count: int, ratio: int) -> jax.Array:
    """The entries that each row may see: bool [T, count]."""
    visible = jnp.where(rows.real, (rows.positions + 1) // ratio, 0)
    return jnp.arange(count, dtype=jnp.int32)[None, :] < visible[:, None]


def make_keys(
    new: jax.Array, entries: jax.Array | None, mask: jax.Array | None, floor: jax.Array,
    length: int, window: int,
) -> Keys:  # fmt: skip
    """Keys of all sequences: window vectors new [T, K], entries [B, N, K] seen by mask [T, N].

    floor [T]: first window position of a row, beyond the row itself where it is padding.
    """
    own = new.reshape(-1, length // window, window, new.shape[-1])
    before = jnp.pad(own, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    chunks = own.shape[1]
    offset = jnp.arange(window, dtype=jnp.int32)[:, None]
    place = jnp.arange(2 * window, dtype=jnp.int32)[None, :]
    inside = (place > offset) & (place <= offset + window)
    position = (jnp.arange(chunks, dtype=jnp.int32)[:, None] - 1) * window + place
    least = jnp.maximum(floor, 0).reshape(-1, chunks, window, 1)
    near_mask = inside[None, None] & (position[None, :, None, :] >= least)
    if mask is not None:
        mask = mask.reshape(-1, chunks, window, mask.shape[-1])
    return Keys(jnp.concatenate([before, own], axis=2), near_mask, entries, mask)


def attend(q: jax.Array, keys: Keys, sink: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """`numerics.attend` for q [T, H, K]: output float32 [T, H, K], and the weights.

    weights [B, H, C, W, 2W + N] float32: what every key got, the sink's share left out.
    """
    shape, width = q.shape, keys.near.shape[2]
    q = q.reshape(*keys.near_mask.shape[:3], *shape[1:])
    s, mask = nx.einsum("bcohk,bcjk->bhcoj", q, keys.near), keys.near_mask
    if keys.far is not None and keys.far_mask is not None:
        s = jnp.concatenate([s, nx.einsum("bcohk,bnk->bhcon", q, keys.far)], axis=-1)
        mask = jnp.concatenate([mask, keys.far_mask], axis=-1)
    mask = mask[:, None]
    s = jnp.where(mask, s * np.float32(scale), -jnp.inf)
    top = nx.finite_max(s, -1)
    p = jnp.where(mask, jnp.exp(jnp.where(mask, s, 0) - top), 0)
    z = nx.plain_sum(p, -1) + jnp.exp(sink.reshape(1, -1, 1, 1) - top[..., 0])
    rounded = nx.round_to(p, q.dtype)
    value = nx.einsum("bhcoj,bcjk->bcohk", rounded[..., :width], keys.near)
    if keys.far is not None:
        value = value + nx.einsum("bhcon,bnk->bcohk", rounded[..., width:], keys.far)
    value = value / z.transpose(0, 2, 3, 1)[..., None]
    return value.reshape(shape), p / z[..., None]


def attend_blocks(
    q: jax.Array, keys: jax.Array, mask: jax.Array, sink: jax.Array, scale: float
) -> jax.Array:
    """Attention of blocks that share their keys: q [B, N, H, K], keys [B, J, K], mask [B, J]."""
    mask = mask[:, None, None, :]
    keys = jnp.where(mask[:, 0, 0, :, None], keys, 0)
    s = jnp.where(mask, nx.einsum("bnhk,bjk->bhnj", q, keys) * np.float32(scale), -jnp.inf)
    top = nx.finite_max(s, -1)
    p = jnp.where(mask, jnp.exp(jnp.where(mask, s, 0) - top), 0)
    z = nx.plain_sum(p, -1) + jnp.exp(sink.reshape(1, -1, 1) - top[..., 0])
    value = nx.einsum("bhnj,bjk->bnhk", nx.round_to(p, q.dtype), keys)
    return value / z.transpose(0, 2, 1)[..., None]


def index_scores(query: Any, keys: jax.Array, length: int, numerics: Numerics) -> jax.Array:
    """`numerics.index_scores` of an `index.IndexQuery` against all entries [B, N, K]: [T, N]."""
    heads = query.heads.reshape(-1, length, *query.heads.shape[1:])
    weights = query.weights.reshape(-1, length, query.weights.shape[-1]).astype(jnp.float32)
    s = nx.einsum("bshk,bnk->bhsn", heads, keys)
    total = nx.plain_sum(jnp.maximum(s, 0) * weights.transpose(0, 2, 1)[..., None], 1)
    if numerics.dtype != "float32":
        total = nx.round_to(total, jnp.bfloat16).astype(jnp.float32)
    return total.reshape(-1, keys.shape[1])
