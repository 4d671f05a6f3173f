"""The vision tower and the aligner (docs/model.md 12), one patch and one head at a time."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .basics import Params, norm, silu, softmax

EPS = 1e-6


def image_rows(
    config: Mapping[str, Any], weights: Params, patches: np.ndarray, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """(rows of the tower [h * w, W], image rows [cells, D]) of patches [h * w, 3, p, p]."""
    seen = _tower(config, weights.under("vision"), patches, height, width)
    return seen, _aligned(config, weights.under("aligner"), seen, height, width)


def _biased(weights: Params, name: str, x: np.ndarray) -> np.ndarray:
    return weights.linear(name, x) + weights[f"{name}.bias"]


def _tower(
    config: Mapping[str, Any], weights: Params, patches: np.ndarray, height: int, width: int
) -> np.ndarray:
    heads = config["num_attention_heads"]
    size = config["hidden_size"] // heads
    places = [(row, column) for row in range(height) for column in range(width)]
    x = [_biased(weights, "patch_embed.proj", patch.reshape(-1)) for patch in patches]
    for number in range(config["num_hidden_layers"]):
        block = weights.under(f"blocks.{number}")
        qkv = [_biased(block, "attn.wqkv", norm(each, block["norm1.weight"], EPS)) for each in x]
        q, k, v = np.array(qkv).reshape(len(x), 3, heads, size).swapaxes(0, 1)
        for turned in (q, k):
            for own, place in zip(turned, places, strict=True):
                own[:] = [_turn(head, place, config["rope_theta"]) for head in own]
        for i in range(len(x)):
            seen = []
            for head in range(heads):
                share = softmax(k[:, head] @ q[i, head] / math.sqrt(size), 0)
                seen.append(share @ v[:, head])
            x[i] = x[i] + _biased(block, "attn.wo", np.concatenate(seen))
            gate, up = np.split(block.linear("mlp.w1", norm(x[i], block["norm2.weight"], EPS)), 2)
            x[i] = x[i] + block.linear("mlp.w2", silu(gate) * up)
    return np.array([norm(each, weights["norm.weight"], EPS) for each in x])


def _turn(head: np.ndarray, place: tuple[int, int], theta: float) -> np.ndarray:
    """Features i and i + K/2 as a complex number, turned by row or by column."""
    size = len(head)
    pair = head[: size // 2] + 1j * head[size // 2 :]
    for i in range(size // 2):
        axis, number = divmod(i, size // 4)
        pair[i] *= np.exp(1j * place[axis] * theta ** (-4 * number / size))
    return np.concatenate([pair.real, pair.imag])


def _aligned(
    config: Mapping[str, Any], weights: Params, seen: np.ndarray, height: int, width: int
) -> np.ndarray:
    side, rows = config["downsample_ratio"], []
    for top in range(0, height, side):
        for left in range(0, width, side):
            cell = np.zeros((seen.shape[1], side, side))
            for y in range(top, min(top + side, height)):
                for x in range(left, min(left + side, width)):
                    cell[:, y - top, x - left] = seen[y * width + x]
            inner = _biased(weights, "w1", cell.reshape(-1))
            rows.append(_biased(weights, "w2", np.array([_gelu(each) for each in inner])))
    return np.array(rows)


def _gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))
