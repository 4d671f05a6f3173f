"""Random placements and loads for the tests of this folder."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from deepinfer_jax import eplb

SEEDS = st.integers(0, 9999)


def placement(rng: np.random.Generator, layers: int, experts: int, slots: int, devices: int):
    """Every expert once, the other slots anyhow, all in random order."""
    rest = rng.integers(0, experts, (layers, slots - experts))
    table = np.concatenate([np.tile(np.arange(experts), (layers, 1)), rest], axis=1)
    return eplb.make_placement(rng.permuted(table, axis=1), experts, devices)


def zipf_counts(rng: np.random.Generator, steps: int, layers: int, experts: int, tokens: int):
    """[S, L, E]: tokens by Zipf's law with exponent 1, over experts in another order per layer."""
    chance = 1 / np.arange(1, experts + 1)
    chance /= np.sum(chance)
    orders = [rng.permutation(experts) for _ in range(layers)]
    return np.stack([[rng.multinomial(tokens, chance[o]) for o in orders] for _ in range(steps)])
