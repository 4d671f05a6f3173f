"""Single-pass hyper-connections: residual streams mixed around a sub-layer (docs/model.md 4.1)."""

from dataclasses import dataclass

import numpy as np

from .basics import Params, sigmoid, softmax
from .layout import Text


@dataclass(frozen=True)
class Mix:
    """pre [C] collapses for the *next* sub-layer, post [C] spreads, comb [source, destination]."""

    pre: np.ndarray
    post: np.ndarray
    comb: np.ndarray


def split(
    mixes: np.ndarray, base: np.ndarray, scale: np.ndarray, iterations: int, eps: float
) -> Mix:
    """Raw projection [(2 + C) * C] -> the three mixes."""
    copies = round(np.sqrt(len(mixes) + 1)) - 1
    pre = sigmoid(mixes[:copies] * scale[0] + base[:copies]) + eps
    middle = slice(copies, 2 * copies)
    post = 2 * sigmoid(mixes[middle] * scale[1] + base[middle])
    comb = (mixes[2 * copies :] * scale[2] + base[2 * copies :]).reshape(copies, copies)
    comb = softmax(comb, axis=1) + eps
    comb = comb / (comb.sum(axis=0) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=0) + eps)
    return Mix(pre, post, comb)


def mix_of(params: Params, kind: str, streams: np.ndarray, text: Text) -> Mix:
    """Mixes of one sub-layer from its un-collapsed input, streams [C, D]; kind: attn or ffn."""
    flat = streams.reshape(-1)
    scale = 1 / np.sqrt(np.mean(flat * flat) + text["rms_norm_eps"])
    mixes = params[f"hc_{kind}_fn"] @ flat * scale
    base, gains = params[f"hc_{kind}_base"], params[f"hc_{kind}_scale"]
    return split(mixes, base, gains, text["hc_sinkhorn_iters"], text["hc_eps"])


def expand(mix: Mix, y: np.ndarray, streams: np.ndarray) -> np.ndarray:
    """Sub-layer output y [D] and input streams [C, D] -> streams after the sub-layer."""
    return mix.post[:, None] * y + mix.comb.T @ streams
