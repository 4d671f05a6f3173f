"""Engram: n-gram memory, read by hashing, written through a gate (docs/model.md 5).

Hashes are exact 64-bit integers kept as two uint32 words: no device needs 64-bit types for them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.cache import ring_targets
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import divided
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, Spans, row_of
from deepinfer_jax.tables import Tables

_LIMB = 15  # bits of a multiplier limb: a 17-bit id times 15 bits fits in uint32


@dataclasses.dataclass(frozen=True)
class HashConstants:
    """Of one Engram layer: primes [orders][heads], table offsets [orders * heads], multipliers."""

    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    multipliers: tuple[int, ...]


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % d for d in range(3, int(n**0.5) + 1, 2))


@functools.lru_cache(maxsize=16)
def hash_constants(cfg: ModelConfig) -> tuple[HashConstants, ...]:
    """Primes and multipliers of every Engram layer (docs/model.md 5.2), checked for size.

    `loading.load` asks first, so that nothing is read or compiled for sizes that do not fit.

    Raises ValueError where a table has fewer rows than its primes need, or a size does not fit the
    integer arithmetic (compressed vocabulary up to 2^17, primes below 2^24).
    """
    if not cfg.engram_layer_ids:
        return ()
    for name, most in (("engram_compressed_vocab_size", 1 << 17), ("engram_vocab_size", 1 << 24)):
        if getattr(cfg, name) > most:
            raise ValueError(f"{name} must be at most {most}, got {getattr(cfg, name)}")
    seen: set[int] = set()
    layers = []
    for layer, rows in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True):
        primes = tuple(_next_primes(cfg, seen) for _ in range(cfg.engram_lookback))
        flat = [p for order in primes for p in order]
        if max(flat) >= 1 << 24:
            raise ValueError(
                f"engram_vocab_size={cfg.engram_vocab_size} leads to the prime {max(flat)}, which "
                f"must be below {1 << 24}; lower it"
            )
        if rows < sum(flat):
            raise ValueError(
                f"engram_num_embeddings: the table of layer {layer} has {rows} rows, its primes "
                f"need {sum(flat)}"
            )
        offsets = tuple(int(v) for v in np.cumsum([0, *flat[:-1]]))
        layers.append(HashConstants(primes, offsets, _multipliers(cfg, layer)))
    return tuple(layers)


def _next_primes(cfg: ModelConfig, seen: set[int]) -> tuple[int, ...]:
    """The next `engram_n_heads` primes from engram_vocab_size on that nothing has used."""
    found: list[int] = []
    cursor = cfg.engram_vocab_size - 1
    while len(found) < cfg.engram_n_heads:
        cursor += 1
        if cursor not in seen and _is_prime(cursor):
            found.append(cursor)
            seen.add(cursor)
    return tuple(found)


def _multipliers(cfg: ModelConfig, layer: int) -> tuple[int, ...]:
    bound = max(1, (2**63 - 1) // cfg.engram_compressed_vocab_size // 2)
    draw = np.random.default_rng(10007 * layer).integers(
        0, bound, size=cfg.engram_max_ngram_size, dtype=np.int64
    )
    return tuple(int(v) * 2 + 1 for v in draw)


# -- hashing ---------------------------------------------------------------------------------------

Wide = tuple[jax.Array, jax.Array]  # (high, low) uint32 words


def _products(tokens: jax.Array, multipliers: tuple[int, ...]) -> Wide:
    """Exact products of ids below 2^17, [T, n], with n constants below 2^63."""
    shifts = range(0, 63, _LIMB)
    mask = (1 << _LIMB) - 1
    high = low = jnp.zeros_like(tokens, jnp.uint32)
    for shift in shifts:
        limb = np.array([(m >> shift) & mask for m in multipliers], np.uint32)
        part = tokens.astype(jnp.uint32) * limb[None, :]
        if shift < 32:
            add_low = part << shift
            low = low + add_low
            high = high + (low < add_low).astype(jnp.uint32)
            if shift:
                high = high + (part >> (32 - shift))
        else:
            high = high + (part << (shift - 32))
    return high, low


def _modulo(value: Wide, primes: np.ndarray) -> jax.Array:
    """value [T, n, 1] mod primes [n, h] below 2^24, byte by byte from the top: int32 [T, n, h]."""
    divisor = primes.astype(np.uint32)[None]
    rest = jnp.zeros((value[0].shape[0], *primes.shape), jnp.uint32)
    for word in value:
        for shift in (24, 16, 8, 0):
            rest = (rest * 256 + ((word >> shift) & 255)) % divisor
    return rest.astype(jnp.int32)


def lookback(
    compressed: jax.Array, history: jax.Array | None, rows: Rows, spans: Spans, cfg: ModelConfig
) -> jax.Array:
    """Compressed ids of each row and of the tokens before it: [T, max_ngram], newest first.

    compressed [T]: -1 inside an image. A token before the start, or dead, is -1, and so is every
    farther one (docs/model.md 5.2). Earlier calls' tokens come from the ring `history` [B, Q].
    """
    slot = jnp.maximum(rows.slots, 0)
    alive = compressed >= 0
    columns = [compressed]
    for back in range(1, cfg.engram_max_ngram_size):
        wanted = rows.positions - back
        inside, row = row_of(spans, slot, wanted)
        token = compressed[row]
        if history is not None:
            token = jnp.where(inside, token, history[slot, wanted % history.shape[1]])
        alive = alive & (wanted >= 0) & (token >= 0)
        columns.append(jnp.where(alive, token, -1))
    return jnp.stack(columns, axis=1)


def table_rows(tokens: jax.Array, pad: jax.Array, constants: HashConstants) -> jax.Array:
    """Table rows [T, orders * heads] of look-backs [T, max_ngram]; -1 tokens hash as `pad`."""
    high, low = _products(jnp.where(tokens < 0, pad, tokens), constants.multipliers)
    mixed = [(high[:, 0], low[:, 0])]
    for order in range(1, tokens.shape[1]):
        mixed.append((mixed[-1][0] ^ high[:, order], mixed[-1][1] ^ low[:, order]))
    words = [jnp.stack(word, axis=1)[..., None] for word in zip(*mixed[1:], strict=True)]
    columns = _modulo((words[0], words[1]), np.array(constants.primes))
    return columns.reshape(tokens.shape[0], -1) + jnp.asarray(constants.offsets, jnp.int32)[None, :]


def compress_tokens(tables: Tables, rows: Rows) -> jax.Array:
    """Compressed id of every row's token [T]; -1 inside an image span."""
    safe = jnp.clip(rows.tokens, 0, tables.token_map.shape[0] - 1)
    return jnp.where(rows.image, -1, tables.token_map[safe])


def store_history(history: jax.Array, compressed: jax.Array, rows: Rows, spans: Spans) -> jax.Array:
    """Write the rows' compressed ids into the ring over positions."""
    slot, place = ring_targets(rows, spans, history.shape[1])
    return history.at[slot, place].set(compressed, mode="drop")


# -- reading and writing ---------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fetched:
    """Rows of a table that a call reads, in place of the table: [T, columns, W], `Quantized` or
    not. Whoever makes the call has found them by its tokens (`fetching`).
    """

    rows: Any


def read_table(table: Any, index: jax.Array, numerics: Numerics) -> jax.Array:
    """Rows of the table [rows, W] at index [T, columns] -> [T, columns * W], in column order.

    A table in memory of the host is read there, and only its rows travel. Raises ValueError for
    rows that were fetched for another call.
    """
    if isinstance(table, Fetched):
        picked = table.rows
        shape = jax.tree.leaves(picked)[0].shape
        if shape[:2] != index.shape:
            raise ValueError(
                f"the rows fetched from an Engram table are {shape[:2]} (rows, columns), the call "
                f"reads {index.shape}: fetch them for the tokens of this call, on one device"
            )
    elif on_host(table):
        picked = _host_rows(table, index)
    else:
        picked = divided.rows(table, index)
    if isinstance(picked, quant.Quantized):
        value = quant.dequantize(picked, numerics.dtype)
    else:
        value = picked.astype(numerics.dtype)
    return value.reshape(index.shape[0], -1)


def on_host(table: Any) -> bool:
    """Whether the table is in memory of the host (`checkpoint.load_params(engram="pinned")`)."""
    return all(
        isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host
        for leaf in jax.tree.leaves(table)
    )


def _host_rows(table: Any, index: jax.Array) -> Any:
    with compute_on("device_host"):
        there = jax.device_put(index, jax.memory.Space.Host)
        found = jax.tree.map(lambda leaf: leaf[there], table)
    return jax.device_put(found, jax.memory.Space.Device)


def gate(
    p: Any, keys: jax.Array, streams: jax.Array, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """Gate of each stream, float32 [T, C], from keys and streams [T, C, D] (docs/model.md 5.3)."""
    x, key = streams.astype(jnp.float32), keys.astype(jnp.float32)
    eps = np.float32(cfg.rms_norm_eps)
    scale = lax.rsqrt(nx.mean_square(x, numerics) + eps)
    scale = scale * lax.rsqrt(nx.mean_square(key, numerics) + eps)
    weight = p["q_weight"].astype(jnp.float32) * p["k_weight"].astype(jnp.float32)
    d = (
        nx.row_sum(nx.pin(x * weight[None] * key), numerics)
        * scale
        * np.float32(cfg.hidden_size**-0.5)
    )
    root = jnp.sqrt(jnp.maximum(jnp.abs(d), np.float32(1e-6)))
    return jax.nn.sigmoid(jnp.where(jnp.signbit(d), -root, root))


def write(
    p: Any, index: jax.Array, streams: jax.Array, dead: jax.Array, cfg: ModelConfig,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Streams [T, C, D] plus the memory of table rows `index` [T, columns]; dead rows as is.

    Also the gates [T, C], float32.
    """
    e = read_table(p["embed"], index, numerics)
    kv = nx.linear(e, p["wkv"], numerics, cfg.quantized)
    c, d = cfg.hc_mult, cfg.hidden_size
    keys, value = kv[:, : c * d].reshape(-1, c, d), kv[:, c * d :].astype(jnp.float32)
    g = jnp.where(dead[:, None], 0, gate(p, keys, streams, cfg, numerics))
    added = nx.pin(g[..., None] * value[:, None, :])
    return nx.round_to(streams.astype(jnp.float32) + added, numerics.dtype), g
