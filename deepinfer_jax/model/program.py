"""The layer program: which layers run the same code, so that loops replace repetition.

A backbone is cut into units before every index source (a source and the layers that reuse it) and
wherever the compression ratio changes, as between window-only layers and others. Equal neighbouring
units become one loop, equal neighbouring layers inside a unit another. Program size then depends on
the number of different roles, hardly on depth. Forms of a CPU mostly go one further (`looped`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from deepinfer_jax.config import LayerKind, ModelConfig

Run = tuple[LayerKind, int]


@dataclasses.dataclass(frozen=True)
class Unit:
    """`repeat` copies of `runs`, the first starting at layer `first`."""

    first: int
    repeat: int
    runs: tuple[Run, ...]

    @property
    def size(self) -> int:
        """Layers of one copy."""
        return sum(count for _, count in self.runs)


@functools.lru_cache(maxsize=64)
def program(cfg: ModelConfig) -> tuple[Unit, ...]:
    """The units of a config, in layer order; together they cover every backbone layer once."""
    pieces: list[list[LayerKind]] = []
    for kind in cfg.kinds():
        if not pieces or kind.index_source or kind.ratio != pieces[-1][-1].ratio:
            pieces.append([])
        pieces[-1].append(kind)
    units, layer = [], 0
    for runs, group in itertools.groupby(pieces, key=_runs):
        repeat = len(list(group))
        units.append(Unit(layer, repeat, runs))
        layer += repeat * units[-1].size
    return tuple(units)


def _runs(kinds: list[LayerKind]) -> tuple[Run, ...]:
    return tuple((kind, len(list(group))) for kind, group in itertools.groupby(kinds))


@dataclasses.dataclass(frozen=True)
class Ordinals:
    """Per layer, its place in stacked parameters and caches: int32 [L], valid where it applies.

    source: index among all kv sources, of the source a layer reads; stored: the same within its
    ratio; pooled: the same among sources with m > 1; indexer: among index sources; tap: among
    DSpark taps.
    """

    source: np.ndarray
    stored: np.ndarray
    pooled: np.ndarray
    indexer: np.ndarray
    tap: np.ndarray


@functools.lru_cache(maxsize=64)
def ordinals(cfg: ModelConfig) -> Ordinals:
    """The ordinals of a config."""
    sources, ratios = cfg.kv_source_layer_ids, cfg.compress_ratios
    pooled = [s for s in sources if ratios[s] > 1]
    layers = range(cfg.num_hidden_layers)

    def place(items, layer: int) -> int:
        return max(sum(1 for s in items if s <= layer) - 1, 0)

    def table(items_of) -> np.ndarray:
        return np.array([place(items_of(layer), layer) for layer in layers], np.int32)

    return Ordinals(
        source=table(lambda _: sources),
        stored=table(lambda layer: [s for s in sources if ratios[s] == ratios[layer]]),
        pooled=table(lambda _: pooled),
        indexer=table(lambda _: cfg.index_source_layer_ids),
        tap=table(lambda _: cfg.dspark_target_layer_ids),
    )
