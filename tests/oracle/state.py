"""What the oracle remembers of a sequence, and what it says about a row."""

import copy
from dataclasses import dataclass, field

import numpy as np

from .memory import Pending


@dataclass
class State:
    """Everything kept between rows, by layer, with no ring and no capacity: only positions.

    `window` and `context` map layer -> position -> row [head_dim]; `context` is the window of the
    draft layers. `compressed` and `index_keys` list the entries of every KV source by group, and
    `pending` its unfinished group. `ids` and `dead` are the compressed id and the image mark of
    every position. Windows of truncated layers never reach below `clip`.
    """

    window: dict[int, dict[int, np.ndarray]]
    context: dict[int, dict[int, np.ndarray]]
    compressed: dict[int, list[np.ndarray]]
    index_keys: dict[int, list[np.ndarray]]
    pending: dict[int, Pending]
    ids: list[int] = field(default_factory=list)
    dead: list[bool] = field(default_factory=list)
    clip: int = 0

    @property
    def length(self) -> int:
        """Number of tokens seen, and so the position of the next one."""
        return len(self.ids)

    def copy(self) -> "State":
        """An independent copy: the way back from tokens that turn out to be wrong."""
        return copy.deepcopy(self)


@dataclass
class Record:
    """Everything one row computed. Per-layer lists end early when replay dropped the row.

    block_in [D]; after_engram[layer], block_out [layer][C, D]; attn_out, ffn_out [layer][D];
    pre_mix [layer][C]; router_ids, router_weights [layer][k] best first; index_scores[layer]
    [entries] and index_topk[layer] (ascending) of every index source; candidate_blocks[layer]
    marks [blocks]; engram_rows[layer]. main_hidden [taps * D], final_norm [D] and logits [V] are
    None in a dropped row. The gaps are last kept minus first rejected score.
    """

    position: int
    block_in: np.ndarray
    after_engram: dict[int, np.ndarray] = field(default_factory=dict)
    engram_rows: dict[int, list[int]] = field(default_factory=dict)
    block_out: list[np.ndarray] = field(default_factory=list)
    pre_mix: list[np.ndarray] = field(default_factory=list)
    attn_out: list[np.ndarray] = field(default_factory=list)
    ffn_out: list[np.ndarray] = field(default_factory=list)
    router_ids: list[np.ndarray] = field(default_factory=list)
    router_weights: list[np.ndarray] = field(default_factory=list)
    router_gap: list[float] = field(default_factory=list)
    index_scores: dict[int, np.ndarray] = field(default_factory=dict)
    index_topk: dict[int, np.ndarray] = field(default_factory=dict)
    index_gap: dict[int, float] = field(default_factory=dict)
    candidate_blocks: dict[int, np.ndarray] = field(default_factory=dict)
    block_gap: dict[int, float] = field(default_factory=dict)
    main_hidden: np.ndarray | None = None
    final_norm: np.ndarray | None = None
    logits: np.ndarray | None = None


@dataclass(frozen=True)
class Draft:
    """One greedy draft block after an anchor token; `ids` [block] does not hold the anchor.

    base_logits, logits [block, V] before and after the Markov bias; confidence [block], raw;
    block_out [draft layers, block, C, D]; router_ids [draft layers, block, k].
    """

    ids: np.ndarray
    base_logits: np.ndarray
    logits: np.ndarray
    confidence: np.ndarray
    block_out: np.ndarray
    router_ids: np.ndarray
