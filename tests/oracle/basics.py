"""What every part of the oracle stands on: named parameters, norm, softmax and the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from . import quant


@dataclass(frozen=True)
class Params:
    """The tensors under one name prefix, in float64.

    `quantize_inputs` rounds the input of every linear that the release stores in fp8 or fp4.
    """

    tensors: Mapping[str, np.ndarray]
    quantize_inputs: bool = False
    prefix: str = ""

    def under(self, name: str) -> "Params":
        return replace(self, prefix=f"{self.prefix}{name}.")

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x [n] -> [out], for weights the release keeps in bf16 or f32."""
        return self[name + ".weight"] @ x

    def quantized_linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x [n] -> [out], for weights the release keeps in fp8 or fp4 (docs/model.md 3.3)."""
        return self.linear(name, quant.fp8(x).astype(np.float64) if self.quantize_inputs else x)


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm over the last axis (docs/model.md 1)."""
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """Softmax with the largest value subtracted first."""
    weight = np.exp(x - x.max(axis=axis, keepdims=True))
    return weight / weight.sum(axis=axis, keepdims=True)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` largest scores, best first; equal scores: lower position first."""
    return np.argsort(-scores, kind="stable")[:count]


def gap(scores: np.ndarray, count: int) -> float:
    """Last kept minus first rejected score of a top-`count`; inf when nothing is rejected."""
    order = best(scores, count + 1)
    if len(order) <= count or scores[order[-1]] == -np.inf:
        return np.inf
    return float(scores[order[-2]]) - float(scores[order[-1]])
