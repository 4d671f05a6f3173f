"""Constant arrays beside the weights: rotation tables and the Engram token map."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import summaries
from deepinfer_jax.config import ModelConfig, VisionConfig

# Exact float32 bit patterns of the released frequencies (docs/model.md 6): libraries differ in the
# last bits of the powers, and one unit moves the angle of a far token by up to 0.06 rad.
_BASE_BITS = """
3f800000 3f3ff911 3f0ff59a 3ed7e89b 3ea1e89b 3e72d423 3e361887 3e088d77 3dcccccd 3d99940d 3d6655c2
3d2cba15 3d0186e3 3cc2434f 3c91ad39 3c5a7bf2 3c23d70a 3bf5b9b0 3bb8449c 3b8a2e77 3b4f3e38 3b1b690d
3ae91528 3aaec98e 3a83126f 3a44948c 3a136a16 39dd1725 39a5cb60 3978a815 393a7753 390bd472"""
_YARN_BITS = """
3f800000 3f300a3a 3ef21c1f 3ea67d01 3e64f92e 3e1d7475 3dd88cb4 3d94e963 3d4ccccd 3d0cd4fb 3cc1b019
3c8530ce 3c372dbf 3bfbed88 3bad3d5e 3b6e4237 3b147ae1 3ab714e0 3a5ebdb6 3a0530ce 399bb3af 39305978
38be904d 383e9b5f 37a3d70c 36b443d0 3677eba6 362a7be8 35ea77ff 35a13bdc 355dbf30 35187c4d"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """cos and sin of position x frequency: float32 [N, R/2], N positions, R features."""

    cos: jax.Array
    sin: jax.Array

    __repr__ = summaries.of_fields


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """base: window-only and DSpark layers; yarn: layers with global KV; token_map [V] int32."""

    base: Rotation
    yarn: Rotation
    token_map: jax.Array

    __repr__ = summaries.of_fields

    @property
    def positions(self) -> int:
        """Number of positions they hold: no sequence may be longer."""
        return self.base.cos.shape[0]


def _from_bits(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32).view(np.float32)


def base_frequencies(cfg: ModelConfig) -> np.ndarray:
    """float32 [R/2] of theta^(-2i/R) (docs/model.md 6)."""
    if (cfg.qk_rope_head_dim, cfg.rope_theta) == (64, 10000.0):
        return _from_bits(_BASE_BITS)
    return _powers(cfg.rope_theta, cfg.qk_rope_head_dim)


def yarn_frequencies(cfg: ModelConfig) -> np.ndarray:
    """float32 [R/2]: the compress theta with YaRN interpolation of the slow features."""
    width = cfg.qk_rope_head_dim
    released = (64, 160000.0, 16.0, 32.0, 1.0, 65536)
    if released == (
        width, cfg.compress_rope_theta, cfg.rope_factor, cfg.rope_beta_fast, cfg.rope_beta_slow,
        cfg.rope_original_length,
    ):  # fmt: skip
        return _from_bits(_YARN_BITS)
    frequency = _powers(cfg.compress_rope_theta, width)

    def dimension(rotations: float) -> float:
        turns = cfg.rope_original_length / (rotations * 2 * np.pi)
        return width * np.log(turns) / (2 * np.log(cfg.compress_rope_theta))

    low = max(np.floor(dimension(cfg.rope_beta_fast)), 0)
    high = min(np.ceil(dimension(cfg.rope_beta_slow)), width - 1)
    span = max(high - low, 0.001)  # the usual guard of YaRN against an empty ramp
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / span, 0, 1)
    smooth = np.float32(1) - ramp.astype(np.float32)
    slow = frequency / np.float32(cfg.rope_factor)
    return (slow * (np.float32(1) - smooth) + frequency * smooth).astype(np.float32)


def image_frequencies(vision: VisionConfig) -> np.ndarray:
    """float32 [K/4] of theta^(-4i/K), K the size of a head of the tower (docs/model.md 12)."""
    width = vision.hidden_size // vision.num_attention_heads // 2
    if (width, vision.rope_theta) == (32, 10000.0):
        return _from_bits(_BASE_BITS)[::2]
    return _powers(vision.rope_theta, width)


def _powers(theta: float, width: int) -> np.ndarray:
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return (np.float32(1) / np.power(np.float32(theta), exponent)).astype(np.float32)


def rotation(frequency: np.ndarray, length: int) -> Rotation:
    """The rotation of positions below `length`."""
    angle = np.arange(length, dtype=np.float32)[:, None] * frequency[None, :]
    return jax.tree.map(jnp.asarray, turned_by(angle))


def turned_by(angle: np.ndarray) -> Rotation:
    """float64 cos and sin of a float32 angle, rounded once: no range reduction on a device.

    The arrays stay on the host.
    """
    wide = angle.astype(np.float64)
    cos, sin = np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
    return Rotation(cos, sin)  # pyright: ignore[reportArgumentType]


def make_tables(cfg: ModelConfig, token_map: np.ndarray | None, length: int) -> Tables:
    """Tables for positions below `length`; `token_map` is the compressed id of every token id.

    Raises ValueError when the map does not fit the config (the hashes of every Engram row depend on
    it), or the model has no such positions.
    """
    if length < 1 or length > cfg.max_position_embeddings:
        raise ValueError(
            f"length must be in 1..{cfg.max_position_embeddings} (max_position_embeddings), "
            f"got {length}; the model has no further positions"
        )
    if token_map is None:
        if cfg.engram_layer_ids:
            raise ValueError("this model has Engram layers: pass token_map [vocab_size] int32")
        token_map = np.zeros((cfg.vocab_size,), np.int32)
    token_map = np.asarray(token_map)
    if token_map.ndim != 1 or token_map.shape[0] > cfg.vocab_size or token_map.shape[0] == 0:
        raise ValueError(
            f"token_map must be 1-D with at most vocab_size={cfg.vocab_size} entries, "
            f"got shape {token_map.shape}"
        )
    if cfg.engram_layer_ids and (
        token_map.min() < 0 or token_map.max() >= cfg.engram_compressed_vocab_size
    ):
        raise ValueError(
            f"token_map values must lie in [0, {cfg.engram_compressed_vocab_size}) "
            f"(engram_compressed_vocab_size), got {token_map.min()}..{token_map.max()}"
        )
    padded = np.zeros((cfg.vocab_size,), np.int32)
    padded[: token_map.shape[0]] = token_map
    return Tables(
        base=rotation(base_frequencies(cfg), length),
        yarn=rotation(yarn_frequencies(cfg), length),
        token_map=jnp.asarray(padded),
    )


def table_shapes(cfg: ModelConfig, length: int) -> Tables:
    """The shapes of `make_tables`, for ahead-of-time compilation."""
    half: Any = jax.ShapeDtypeStruct((length, cfg.qk_rope_head_dim // 2), jnp.float32)
    token_map: Any = jax.ShapeDtypeStruct((cfg.vocab_size,), jnp.int32)
    return Tables(Rotation(half, half), Rotation(half, half), token_map)
