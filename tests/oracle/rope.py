"""Rotary positions on the last features of a vector, adjacent pairs (docs/model.md 6)."""

import numpy as np

from .layout import Text

# float32 bit patterns of the released frequencies; libraries disagree in the last bit of a power.
_BASE_BITS = """
3f800000 3f3ff911 3f0ff59a 3ed7e89b 3ea1e89b 3e72d423 3e361887 3e088d77
3dcccccd 3d99940d 3d6655c2 3d2cba15 3d0186e3 3cc2434f 3c91ad39 3c5a7bf2
3c23d70a 3bf5b9b0 3bb8449c 3b8a2e77 3b4f3e38 3b1b690d 3ae91528 3aaec98e
3a83126f 3a44948c 3a136a16 39dd1725 39a5cb60 3978a815 393a7753 390bd472
"""
_YARN_BITS = """
3f800000 3f300a3a 3ef21c1f 3ea67d01 3e64f92e 3e1d7475 3dd88cb4 3d94e963
3d4ccccd 3d0cd4fb 3cc1b019 3c8530ce 3c372dbf 3bfbed88 3bad3d5e 3b6e4237
3b147ae1 3ab714e0 3a5ebdb6 3a0530ce 399bb3af 39305978 38be904d 383e9b5f
37a3d70c 36b443d0 3677eba6 362a7be8 35ea77ff 35a13bdc 355dbf30 35187c4d
"""
_RELEASED_YARN = (64, 160000, 16, 32, 1, 65536)


def _from_bits(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32).view(np.float32)


def _powers(theta: float, width: int) -> np.ndarray:
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1) / np.power(np.float32(theta), exponent)


def base_frequencies(text: Text) -> np.ndarray:
    """float32 [rope/2] for window-only layers and the draft head."""
    width, theta = text["qk_rope_head_dim"], text["rope_theta"]
    return _from_bits(_BASE_BITS) if (width, theta) == (64, 10000) else _powers(theta, width)


def yarn_frequencies(text: Text) -> np.ndarray:
    """float32 [rope/2] for layers with compressed KV: high ones kept, low ones divided."""
    width, theta, scaling = (
        text["qk_rope_head_dim"],
        text["compress_rope_theta"],
        text["rope_scaling"],
    )
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]
    fast, slow = scaling["beta_fast"], scaling["beta_slow"]
    if (width, theta, factor, fast, slow, length) == _RELEASED_YARN:
        return _from_bits(_YARN_BITS)

    def dimension(turns: float) -> float:
        return width * np.log(length / (2 * np.pi * turns)) / (2 * np.log(theta))

    low = max(int(np.floor(dimension(fast))), 0)
    high = min(int(np.ceil(dimension(slow))), width - 1)
    if low >= high:
        raise ValueError(f"YaRN needs low < high, got {low} and {high} from {scaling}")
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    plain = _powers(theta, width)
    return plain / np.float32(factor) * (np.float32(1) - keep) + plain * keep


def rotate(x: np.ndarray, position: int, frequencies: np.ndarray, sign: int = 1) -> np.ndarray:
    """Rotate the last 2*len(frequencies) features of x [..., n]; sign -1 rotates back.

    The angle is a float32 product: at large positions its rounding is part of the model.
    """
    angle = (np.float32(position) * frequencies).astype(np.float64)
    cosine = np.cos(angle).astype(np.float32).astype(np.float64)
    sine = sign * np.sin(angle).astype(np.float32).astype(np.float64)
    plain = x.shape[-1] - 2 * len(frequencies)
    even, odd = x[..., plain::2], x[..., plain + 1 :: 2]
    turned = np.array(x, np.float64)
    turned[..., plain::2] = even * cosine - odd * sine
    turned[..., plain + 1 :: 2] = even * sine + odd * cosine
    return turned
