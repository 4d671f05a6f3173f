"""Attention of one row over an explicit list of keys (docs/model.md 7.1, 7.5)."""

from dataclasses import dataclass

import numpy as np

from . import quant, rope
from .basics import Params, norm
from .layout import Text


@dataclass(frozen=True)
class Attention:
    """The parts of one attention layer that every layer owns, whatever its role."""

    params: Params
    text: Text
    frequencies: np.ndarray
    quantize_kv: bool

    def query_latent(self, x: np.ndarray) -> np.ndarray:
        """x [D] -> the low-rank query [q_rank], which the indexer reads too."""
        latent = self.params.quantized_linear("wq_a", x)
        return norm(latent, self.params["q_norm.weight"], self.text["rms_norm_eps"])

    def queries(self, latent: np.ndarray, position: int) -> np.ndarray:
        """[q_rank] -> rotated queries [heads, head_dim]."""
        flat = self.params.quantized_linear("wq_b", latent)
        heads = flat.reshape(self.text["num_attention_heads"], self.text["head_dim"])
        return rope.rotate(heads, position, self.frequencies)

    def window_row(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [D] -> the row [head_dim] that is key and value of the sliding window."""
        latent = self.params.quantized_linear("wkv", x)
        row = norm(latent, self.params["kv_norm.weight"], self.text["rms_norm_eps"])
        row = rope.rotate(row, position, self.frequencies)
        return quant.fp8(row).astype(np.float64) if self.quantize_kv else row

    def output(self, values: np.ndarray, position: int) -> np.ndarray:
        """Attended values [heads, head_dim] -> [D]: rotate back, project by groups, join."""
        values = rope.rotate(values, position, self.frequencies, sign=-1)
        groups = values.reshape(self.text["o_groups"], -1)
        weight = self.params["wo_a.weight"].reshape(len(groups), -1, groups.shape[1])
        low = np.concatenate([weight[g] @ group for g, group in enumerate(groups)])
        return self.params.quantized_linear("wo_b", low)

    def __call__(self, latent: np.ndarray, keys: list[np.ndarray], position: int) -> np.ndarray:
        """Attend from the query latent over `keys`, window rows first, -> [D]."""
        query = self.queries(latent, position)
        return self.output(attend(query, keys, self.params["attn_sink"]), position)


def attend(query: np.ndarray, keys: list[np.ndarray], sink: np.ndarray) -> np.ndarray:
    """query [H, n], keys (also the values) [n] each, sink [H] -> [H, n]; no key gives zeros."""
    if not len(keys):
        return np.zeros_like(query)
    stacked = np.stack(keys)
    scores = query @ stacked.T / np.sqrt(query.shape[-1])
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=1) + np.exp(sink - largest[:, 0])
    return weights @ stacked / total[:, None]
