"""Engram rows from outside the device: which rows a call reads follows from its tokens alone.

So they are found on the host before the call, from the memory map of the files, and while the call
before it is at work (docs/checkpoints.md 4). Calls whose tokens are all known, prompts and replies
to score, can have them; in decoding the device makes the tokens itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from deepinfer_jax.checkpoint import Mapped
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram import Fetched, HashConstants, hash_constants
from deepinfer_jax.params import Params
from deepinfer_jax.tables import Tables


def table_rows(
    tokens: np.ndarray, tables: Tables, cfg: ModelConfig, image: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """Rows that each Engram layer reads for tokens [B, S]: [B * S, columns] int64, on the host.

    As `model.engram.table_rows` finds them on the device. image [B, S] bool: where images stand.
    """
    map_ = np.asarray(tables.token_map)
    compressed = map_[np.clip(tokens, 0, len(map_) - 1)].astype(np.int64)
    if image is not None:
        compressed = np.where(image, -1, compressed)
    before = lookback(compressed, cfg.engram_max_ngram_size).reshape(-1, cfg.engram_max_ngram_size)
    known = np.where(before < 0, map_[cfg.engram_pad_token_id], before)
    return tuple(_hashed(known, constants) for constants in hash_constants(cfg))


def lookback(compressed: np.ndarray, size: int) -> np.ndarray:
    """Compressed ids [B, S] and those before each of them: [B, S, size], newest first.

    -1 before the start, inside an image, and at all that is farther than one of these.
    """
    alive, columns = compressed >= 0, [compressed]
    for back in range(1, size):
        token = np.full_like(compressed, -1)
        token[:, back:] = compressed[:, : max(compressed.shape[1] - back, 0)]
        alive = alive & (token >= 0)
        columns.append(np.where(alive, token, -1))
    return np.stack(columns, axis=-1)


def _hashed(known: np.ndarray, constants: HashConstants) -> np.ndarray:
    """Products stay below 2^63: a multiplier is at most 2^63 by the number of compressed ids."""
    wide = known.astype(np.uint64) * np.array(constants.multipliers, np.uint64)
    mixed = np.bitwise_xor.accumulate(wide, axis=1)[:, 1:, None]
    columns = mixed % np.array(constants.primes, np.uint64)[None]
    return columns.reshape(len(known), -1).astype(np.int64) + np.array(constants.offsets)


def fetched(
    params: Params, tables: Tables, tokens: np.ndarray, cfg: ModelConfig,
    image: np.ndarray | None = None,
) -> Params:  # fmt: skip
    """`params` for one call on tokens [B, S] without a cache (`steps.score`): with the rows that it
    reads in place of tables that are mapped, already on their way to the device.

    Raises ValueError where no table is mapped.
    """
    made = []
    rows = table_rows(np.asarray(tokens), tables, cfg, image)
    for memory, index in zip(params["engram"], rows, strict=True):
        if not all(isinstance(leaf, Mapped) for leaf in jax.tree.leaves(memory["embed"])):
            raise ValueError(
                'the Engram tables are in memory: load the model with engram="mapped" to fetch '
                "their rows"
            )
        take = functools.partial(_taken, index=index)
        made.append({**memory, "embed": Fetched(jax.tree.map(take, memory["embed"]))})
    return {**params, "engram": tuple(made)}


def _taken(table: Mapped, index: np.ndarray) -> jax.Array:
    return jax.device_put(table.rows(index))


def prefetched(
    params: Params, tables: Tables, calls: Iterable[np.ndarray], cfg: ModelConfig
) -> Iterator[tuple[np.ndarray, Params]]:
    """Each of `calls` (tokens [B, S]) with the `params` for it (`fetched`), in order.

    The rows of the next call are read by a thread of its own as soon as those of the one before
    are handed out: while the device is at work on that. Raises as `fetched`.
    """
    with ThreadPoolExecutor(1, "engram-rows") as reader:
        ready = None
        for tokens in calls:
            coming = tokens, reader.submit(fetched, params, tables, tokens, cfg)
            if ready is not None:
                yield ready[0], ready[1].result()
            ready = coming
        if ready is not None:
            yield ready[0], ready[1].result()
