"""Formats of paged caches, as libraries read them: packed and unpacked bit for bit.

A page holds `size` tokens. In both formats of V4.1 a token's values come first and its scales
behind them, so a token is a row of bytes and the engine's own packed rows are the library's
(docs/model.md 10); they only have to be cut into pages. In the format of V4.0, which Hopper's
kernels read, the scales of a page's tokens stand together at its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import quant

WIDTH = 512  # values of a token, of which the last 64 of V4.0 stay bfloat16
_NOPE, _GROUP, _SCALES = 448, 64, 8
_LEAST = np.float32(1e-4)


@dataclasses.dataclass(frozen=True)
class Format:
    """A format: name, bytes per token, and what packs rows [..., size, 512] of whole pages."""

    name: str
    bytes: int
    pack: Callable[[jax.Array], jax.Array]
    unpack: Callable[[jax.Array], jax.Array]


def _unpack_window(rows: jax.Array) -> jax.Array:
    return quant.unpack_window(rows, WIDTH, jnp.float32)


def _unpack_main(rows: jax.Array) -> jax.Array:
    return quant.unpack_main(rows, WIDTH, jnp.float32)


def _pack_v40(x: jax.Array) -> jax.Array:
    """[..., size, 512] -> uint8 [..., size, 584]: 448 e4m3 and 64 bfloat16 of each token, then 8
    bytes for each token with its seven e8m0 scales."""
    size = x.shape[-2]
    groups = x[..., :_NOPE].astype(jnp.float32).reshape(*x.shape[:-1], -1, _GROUP)
    largest = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), _LEAST)
    scale = quant.pow2ceil(largest * np.float32(1 / 448))
    codes = quant.encode_e4m3(jnp.clip(groups / scale[..., None], -448, 448))
    tail = lax.bitcast_convert_type(x[..., _NOPE:].astype(jnp.bfloat16), jnp.uint8)
    token = [codes.reshape(*x.shape[:-1], _NOPE), tail.reshape(*x.shape[:-1], 128)]
    values = jnp.concatenate(token, axis=-1).reshape(*x.shape[:-2], -1)
    scales = jnp.pad(quant.encode_e8m0(scale), [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    page = jnp.concatenate([values, scales.reshape(*x.shape[:-2], -1)], axis=-1)
    return page.reshape(*x.shape[:-2], size, -1)


def _unpack_v40(pages: jax.Array) -> jax.Array:
    size, lead = pages.shape[-2], pages.shape[:-2]
    flat = pages.reshape(*lead, -1)
    values = flat[..., : size * (_NOPE + 128)].reshape(*lead, size, -1)
    scales = flat[..., size * (_NOPE + 128) :].reshape(*lead, size, _SCALES)[..., :-1]
    factor = jnp.repeat(quant.decode_e8m0(scales), _GROUP, axis=-1)
    pairs = values[..., _NOPE:].reshape(*lead, size, -1, 2)
    tail = lax.bitcast_convert_type(pairs, jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([quant.decode_e4m3(values[..., :_NOPE]) * factor, tail], axis=-1)


FORMATS = {
    each.bytes: each
    for each in (
        Format("V4.1 fp8", quant.window_bytes(WIDTH), quant.pack_window, _unpack_window),
        Format("V4.1 fp4", quant.main_bytes(WIDTH), quant.pack_main, _unpack_main),
        Format("V4.0 fp8", _NOPE + 128 + _SCALES, _pack_v40, _unpack_v40),
    )
}


def format_of(count: int) -> Format:
    """The format of `count` bytes per token; ValueError for none."""
    if count not in FORMATS:
        known = ", ".join(f"{number} ({each.name})" for number, each in FORMATS.items())
        raise ValueError(f"no page format has {count} bytes per token: {known}")
    return FORMATS[count]


def pack_pages(rows: jax.Array, size: int, count: int) -> jax.Array:
    """Float rows [N, 512] -> uint8 pages [N / size, size, count] in the format of `count` bytes."""
    form = format_of(count)
    if rows.ndim != 2 or rows.shape[1] != WIDTH or rows.shape[0] % size:
        raise ValueError(
            f"rows must be [N, {WIDTH}] with N a multiple of size={size}, got {list(rows.shape)}; "
            "fill the last page up with zeros"
        )
    return form.pack(rows.reshape(-1, size, WIDTH))


def unpack_pages(pages: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """uint8 pages [P, size, bytes] -> rows [P * size, 512]; exact in bfloat16."""
    form = format_of(pages.shape[-1])
    if not pages.size:
        return jnp.zeros((0, WIDTH), dtype)
    rows = form.unpack(pages)
    return rows.reshape(-1, WIDTH).astype(dtype)
