"""Engram: rows of a hashed n-gram table, gated into every stream (docs/model.md 5)."""

from dataclasses import dataclass

import numpy as np

from .basics import Params, sigmoid
from .layout import Text


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


@dataclass(frozen=True)
class Hash:
    """Constants of one Engram layer; `primes` has one tuple of heads for every n-gram size."""

    primes: tuple[tuple[int, ...], ...]
    multipliers: tuple[int, ...]

    def rows(self, ids: list[int], dead: list[bool], position: int, pad: int) -> list[int]:
        """Table rows of the token at `position`, ordered by n-gram size, then head.

        `ids` and `dead` hold the compressed id and the image mark of every position so far. The
        first look-back that leaves the sequence or meets a dead token hides all farther ones.
        """
        seen, hidden = [], False
        for shift in range(len(self.multipliers)):
            at = position - shift
            hidden = hidden or at < 0 or dead[at]
            seen.append(pad if hidden else ids[at])
        rows, offset, mixed = [], 0, seen[0] * self.multipliers[0]
        for heads, token, multiplier in zip(
            self.primes, seen[1:], self.multipliers[1:], strict=True
        ):
            mixed ^= token * multiplier
            for prime in heads:
                rows.append(mixed % prime + offset)
                offset += prime
        return rows


def hashes(text: Text) -> dict[int, Hash]:
    """Constants of every Engram layer; all layers draw from one pool of primes."""
    used: set[int] = set()
    sizes = text["engram_max_ngram_size"]
    bound = max(1, (2**63 - 1) // text["engram_compressed_vocab_size"] // 2)
    result = {}
    for layer in text["engram_layer_ids"]:
        primes = []
        for _ in range(sizes - 1):
            heads, candidate = [], text["engram_vocab_size"]
            while len(heads) < text["engram_n_heads"]:
                if candidate not in used and _is_prime(candidate):
                    heads.append(candidate)
                    used.add(candidate)
                candidate += 1
            primes.append(tuple(heads))
        draws = np.random.default_rng(10007 * layer).integers(0, bound, size=sizes, dtype=np.int64)
        result[layer] = Hash(tuple(primes), tuple(int(draw) * 2 + 1 for draw in draws))
    return result


def write(
    params: Params, streams: np.ndarray, rows: list[int], dead: bool, eps: float
) -> np.ndarray:
    """Add the gated memory of table `rows` to streams [C, D]; a dead token gets nothing."""
    copies, width = streams.shape
    memory = params["embed.weight"][rows].reshape(-1)
    projected = params.quantized_linear("wkv", memory)
    keys, value = projected[:-width].reshape(copies, width), projected[-width:]
    weight = params["q_weight"] * params["k_weight"]
    sizes = (np.mean(streams**2, axis=1) + eps) * (np.mean(keys**2, axis=1) + eps)
    match = np.sum(streams * weight * keys, axis=1) / np.sqrt(sizes * width)
    gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(match), 1e-6)), match))
    return streams if dead else streams + gate[:, None] * value
