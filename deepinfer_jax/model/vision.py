"""The vision tower and the aligner: from patches to image rows (docs/model.md 12)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import numerics as nx
from deepinfer_jax import tables
from deepinfer_jax.config import VisionConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.tables import Rotation

NORM_EPS = 1e-6  # of the tower's norms; the rest of the model has `rms_norm_eps`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Patches:
    """B pictures in N places each, padded behind their last patch.

    pixels  [B, N, 3 p p], patches in row-major order, each (channel, y, x)
    counts  [B] int32: patches of each picture
    angle   of each place: float32 [B, N, K/2], K the size of a head
    cells   [B, C, r r] int32: the patches of each cell, row-major, -1 beyond the picture's edge
    """

    pixels: jax.Array
    counts: jax.Array
    angle: Rotation
    cells: jax.Array


# -- on the host -----------------------------------------------------------------------------------


def grid_angles(height: int, width: int, cfg: VisionConfig) -> Rotation:
    """float32 [height * width, K/2] on the host: by the row in the first half, then the column."""
    frequency = tables.image_frequencies(cfg)
    row, column = np.indices((height, width), np.float32).reshape(2, -1, 1)
    return tables.turned_by(np.concatenate([row * frequency, column * frequency], axis=1))


def grid_cells(height: int, width: int, ratio: int) -> np.ndarray:
    """int32 [cells, ratio * ratio] on the host: the patches of each cell, -1 beyond the edge."""
    rows, columns = -(-height // ratio), -(-width // ratio)
    number = np.full((rows * ratio, columns * ratio), -1, np.int32)
    number[:height, :width] = np.arange(height * width, dtype=np.int32).reshape(height, width)
    split = number.reshape(rows, ratio, columns, ratio).transpose(0, 2, 1, 3)
    return split.reshape(rows * columns, ratio * ratio)


# -- the tower -------------------------------------------------------------------------------------


def tower(vision: Any, patches: Patches, cfg: VisionConfig, numerics: Numerics) -> jax.Array:
    """Patches through the tower: [B, N, W] of the dtype of activations.

    vision: `params["vision"]`. A picture's rows depend on its own patches only, in every bit:
    neither on the pictures beside it nor on B or N. Rows behind a picture's last are arbitrary.
    """
    b, n, features = patches.pixels.shape
    pixels = patches.pixels.reshape(b * n, features)

    def step(x, block):
        return _block(block, x, patches, cfg, numerics), None

    with jax.named_scope("vision"):
        x = _biased(vision["patch_embed"], pixels, numerics)
        x, _ = lax.scan(step, x, vision["blocks"])
        return nx.rms_norm(x, vision["norm"], NORM_EPS, numerics).reshape(b, n, -1)


def _biased(p: Any, x: jax.Array, numerics: Numerics) -> jax.Array:
    return nx.linear(x, p["weight"], numerics, bias=p["bias"])


def _block(
    p: Any, x: jax.Array, patches: Patches, cfg: VisionConfig, numerics: Numerics
) -> jax.Array:
    """One block on the rows x [B N, W] of all pictures."""
    h = nx.rms_norm(x, p["norm1"], NORM_EPS, numerics)
    x = _add(x, _attention(p, h, patches, cfg, numerics), numerics)
    h = nx.rms_norm(x, p["norm2"], NORM_EPS, numerics)
    gate, up = jnp.split(nx.linear(h, p["w1"], numerics).astype(jnp.float32), 2, axis=1)
    gate = nx.round_to(gate * jax.nn.sigmoid(gate), numerics.dtype)
    h = nx.round_to(gate.astype(jnp.float32) * up, numerics.dtype)
    return _add(x, nx.linear(h, p["w2"], numerics), numerics)


def _add(x: jax.Array, y: jax.Array, numerics: Numerics) -> jax.Array:
    return nx.round_to(x.astype(jnp.float32) + y.astype(jnp.float32), numerics.dtype)


def _attention(
    p: Any, h: jax.Array, patches: Patches, cfg: VisionConfig, numerics: Numerics
) -> jax.Array:
    b, n, _ = patches.pixels.shape
    heads, size = cfg.num_attention_heads, cfg.hidden_size // cfg.num_attention_heads
    qkv = _biased(p["wqkv"], h, numerics).reshape(b, n, 3, heads, size)
    q, k = (_turn(qkv[:, :, i], patches.angle) for i in (0, 1))
    y = nx.attend_all(q, k, qkv[:, :, 2], patches.counts, size**-0.5, numerics)
    return _biased(p["wo"], y.reshape(b * n, heads * size), numerics)


def _turn(x: jax.Array, angle: Rotation) -> jax.Array:
    """Rotate x [B, N, H, K] by angle [B, N, K/2]: features i and i + K/2 form a pair."""
    cos, sin = angle.cos[:, :, None, :], angle.sin[:, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    pin = nx.pin
    turned = [pin(a * cos) - pin(b * sin), pin(a * sin) + pin(b * cos)]
    return nx.round_to(jnp.concatenate(turned, axis=-1), x.dtype)


# -- the aligner -----------------------------------------------------------------------------------


def align(vision: Any, hidden: jax.Array, cells: jax.Array, numerics: Numerics) -> jax.Array:
    """Rows of the tower [B, N, W] in cells [B, C, r r] -> image rows [B, C, D].

    The features of a cell are ordered by channel, then by place; places beyond the edge are zero.
    """
    b, c, places = cells.shape
    p, width = vision["aligner"], hidden.shape[-1]
    with jax.named_scope("aligner"):
        place = jnp.maximum(cells, 0).reshape(b, c * places, 1)
        found = jnp.take_along_axis(hidden, place, axis=1).reshape(b, c, places, width)
        found = jnp.where((cells >= 0)[..., None], found, 0)
        x = found.transpose(0, 1, 3, 2).reshape(b * c, width * places)
        x = _gelu(_biased(p["w1"], x, numerics), numerics)
        return _biased(p["w2"], x, numerics).reshape(b, c, -1)


def _gelu(x: jax.Array, numerics: Numerics) -> jax.Array:
    wide = x.astype(jnp.float32)
    share = nx.pin(lax.erf(wide * np.float32(0.5**0.5))) + 1
    return nx.round_to(wide * np.float32(0.5) * share, numerics.dtype)
