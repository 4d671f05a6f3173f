"""From a window of loads to the next placement: balanced, with little to move (docs/eplb.md 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from deepinfer_jax.eplb.loads import device_loads, moe_lb
from deepinfer_jax.eplb.placement import Placement, make_placement
from deepinfer_jax.eplb.rebalance import rebalance_window
from deepinfer_jax.eplb.relabel import check_nodes, relabel_layer
from deepinfer_jax.eplb.repack import repack_layer
from deepinfer_jax.eplb.search import (
    TARGET,
    binned,
    check_target,
    check_window,
    improve_layer,
    layer_lb,
)
from deepinfer_jax.eplb.transfers import (
    Movement,
    by_device,
    check_same,
    movement,
    transfer_layer,
)

_WORTH = 0.05  # of balance: what filling all slots of a layer anew must bring


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rearrangement:
    """The next placement and what it brings.

    placement: the new one. moved: what it costs. naive: what the published plan would have cost.
    before, after, published: `moe_lb` of the window under the old, the new and the published one.
    """

    placement: Placement
    moved: Movement
    naive: Movement
    before: float
    after: float
    published: float


def rearrange(
    old: Placement, counts: Any, *, published: Placement | None = None,
    target: float = TARGET, nodes: int = 1, expert_bytes: int = 1,
) -> Rearrangement:  # fmt: skip
    """The placement to go to from `old` after steps with counts [S, L, E].

    Per layer there are three ways, tried in this order until one reaches `target`: a few moves away
    from `old`; all replicas packed anew, staying where they can; the published plan. The last two
    are improved by moves, all are renamed to keep what they can. If none reaches it, the one that
    comes closest is taken, experts sent counted against it. A layer in balance stays as it is.

    Args:
      published: the plan to compare with and to start from; None asks `rebalance_window`.
      nodes: above 1 the nodes of `published` are kept, and only it is a way.
      expert_bytes: bytes of one expert of one layer, for the report.
    """
    given = check_window(old, counts)
    check_target(target)
    check_nodes(nodes, old.devices)
    if published is None:
        published = rebalance_window(given, old.slots, old.devices)
    check_same(old, published)
    rows = [
        _layer(before, after, binned(given[:, layer], old.devices), target, nodes)
        for layer, (before, after) in enumerate(
            zip(by_device(old), by_device(published), strict=True)
        )
    ]
    table = np.stack(rows).reshape(old.layers, old.slots)
    new = make_placement(table, old.experts, old.devices)
    balances = [moe_lb(device_loads(p, given)) for p in (old, new, published)]
    return Rearrangement(
        new,
        movement(old, new, expert_bytes),
        movement(old, published, expert_bytes),
        *balances,
    )


def _layer(
    old: np.ndarray, published: np.ndarray, tokens: np.ndarray, target: float, nodes: int
) -> np.ndarray:
    """`rearrange` of one layer, experts of devices [G, P / G], tokens [S, E]."""
    ways = []
    for start, changes in _starts(old, published, tokens, target, nodes):
        found = improve_layer(start, tokens, target, changes, nodes)
        ways.append(relabel_layer(old, found, tokens.shape[1], nodes))
        if layer_lb(ways[-1], tokens) <= target:
            break
    return min(ways, key=lambda way: _cost(old, way, tokens, target))


def _starts(
    old: np.ndarray, published: np.ndarray, tokens: np.ndarray, target: float, nodes: int
) -> Iterator[tuple[np.ndarray, int]]:
    """(where a search begins, slots it may change), the way that moves least first."""
    if nodes == 1:
        yield old, old.size // 2  # beyond that it is cheaper to pack anew
        yield repack_layer(old, np.sum(tokens, axis=0), target), old.size
    yield published, old.size


def _cost(old: np.ndarray, way: np.ndarray, tokens: np.ndarray, target: float) -> float:
    sent = len(transfer_layer(old, way).remote)
    return max(target, layer_lb(way, tokens)) + _WORTH * sent / way.size
