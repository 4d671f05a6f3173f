"""Long-range KV: compressor, index keys, index scores and the two-level selection (8.3 to 8.5)."""

from dataclasses import dataclass

import numpy as np

from . import quant, rope
from .basics import Params, best, gap, norm, softmax
from .layout import Text

Pending = list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Compressor:
    """Makes compressed KV rows and index keys from the rows of a Full layer; `params`: attn."""

    params: Params
    text: Text
    frequencies: np.ndarray
    ratio: int
    quantize_kv: bool

    def latent(self, x: np.ndarray, pending: Pending) -> np.ndarray | None:
        """Pool x [D] into its group: the latent [head_dim] when the group is full, else None.

        `pending` holds (values, gates) of the unfinished group and is updated in place.
        """
        params = self.params.under("compressor")
        pooled = params.linear("wkv", x)
        if self.ratio > 1:
            pending.append((pooled, params.linear("wgate", x)))
            if len(pending) < self.ratio:
                return None
            values, gates = (np.stack(part) for part in zip(*pending, strict=True))
            pending.clear()
            pooled = (softmax(gates, axis=0) * values).sum(axis=0)
        return norm(pooled, params["norm.weight"], self.text["rms_norm_eps"])

    def entry(self, latent: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Latent of a group -> (compressed KV row, index key), rotated as the group's first token.

        The index key is made from the latent before rotation and quantization.
        """
        params, position = self.params.under("indexer"), group * self.ratio
        key = norm(params.linear("wk", latent), params["k_norm.weight"], self.text["rms_norm_eps"])
        key = rope.rotate(key, position, self.frequencies)
        row = rope.rotate(latent, position, self.frequencies)
        if self.quantize_kv:
            row, key = (
                quant.main_fp4(row).astype(np.float64),
                quant.index_fp4(key).astype(np.float64),
            )
        return row, key


@dataclass(frozen=True)
class Indexer:
    """Scores compressed entries for one row of an index source; `params`: attn.indexer."""

    params: Params
    text: Text
    frequencies: np.ndarray
    quantize_kv: bool

    def scores(
        self, x: np.ndarray, latent: np.ndarray, keys: list[np.ndarray], position: int
    ) -> np.ndarray:
        """x [D], query latent, keys of the KV source -> scores [len(keys)]."""
        heads, width = self.text["index_n_heads"], self.text["index_head_dim"]
        query = self.params.quantized_linear("wq_b", latent).reshape(heads, width)
        query = rope.rotate(query, position, self.frequencies)
        if self.quantize_kv:
            query = quant.index_fp4(query).astype(np.float64)
        weights = self.params.linear("weights_proj", x) / np.sqrt(heads * width)
        if not keys:
            return np.zeros(0)
        return np.sum(np.maximum(query @ np.stack(keys).T, 0) * weights[:, None], axis=0)


@dataclass(frozen=True)
class Selection:
    """positions: kept entries, ascending; gap: last kept minus first rejected score."""

    positions: np.ndarray
    gap: float


def select(scores: np.ndarray, count: int) -> Selection:
    """The `count` best entries that are not masked (-inf)."""
    kept = best(scores, count)
    return Selection(np.sort(kept[scores[kept] > -np.inf]), gap(scores, count))


def candidate_blocks(scores: np.ndarray, blocks: int, size: int) -> tuple[np.ndarray, float]:
    """Marks [ceil(n / size)] of the kept blocks, and the gap of that choice.

    A block scores as its best entry; the block of the newest entry is always kept.
    """
    count = -(-len(scores) // size)
    padded = np.full(count * size, -np.inf)
    padded[: len(scores)] = scores
    block_scores = padded.reshape(count, size).max(axis=1)
    if count:
        block_scores[-1] = np.inf
    marks = np.zeros(count, bool)
    kept = best(block_scores, blocks)
    marks[kept] = block_scores[kept] > -np.inf
    return marks, gap(block_scores, blocks)


def restrict(scores: np.ndarray, marks: np.ndarray, size: int) -> np.ndarray:
    """Scores with every entry outside the marked blocks set to -inf."""
    return np.where(np.repeat(marks, size)[: len(scores)], scores, -np.inf)
