"""Local search: a placement that misses its balance, a few moves better each time.

On the host. Loads are integers, so that neither a sum nor a tie depends on the machine: processes
that see the same counts find the same placement (docs/eplb.md 5). Legend: S bins of steps, E
experts, P slots, G devices, N moves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepinfer_jax.eplb.loads import check_counts
from deepinfer_jax.eplb.placement import Placement, check_at_least, make_placement
from deepinfer_jax.eplb.relabel import check_nodes, held
from deepinfer_jax.eplb.repack import replica_counts
from deepinfer_jax.eplb.transfers import by_device

TARGET = 1.05  # slowest over mean that is good enough to stop at
BINS = 8  # at most as many sums of consecutive steps
QUIET = 1 << 14  # tokens of the mean device in a bin: below that most of a peak is noise
_TRIES = 4  # busiest devices to look at for a move worth making
_MEAN = 1 << 16  # load of the mean device of a bin: squares of all loads fit an int64, up to
_DEVICES = 1 << 10  # as many devices
_LEAST = (_MEAN >> 8) ** 2  # a changed slot that gains less is not worth its bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer during the search; made by `_layer` and `_changed`.

    table [G, P / G] experts of devices; allowed [G, E] whether a device may hold an expert; weights
    [S, E] loads of experts, in units of which the mean device of the mean bin has _MEAN. What
    follows from them: held [G, E] how often each device has each expert, count [E] replicas, share
    [S, E] load of one, loads [S, G] of devices.
    """

    table: np.ndarray
    allowed: np.ndarray
    weights: np.ndarray
    held: np.ndarray
    count: np.ndarray
    share: np.ndarray
    loads: np.ndarray

    @property
    def lb(self) -> float:
        """Busiest device over mean one, both summed over bins; 1 without tokens."""
        mean = int(np.sum(self.weights)) / len(self.table)
        return int(np.sum(self.loads.max(axis=1))) / mean if mean else 1.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """`experts` [1 or 2] go to the slots `cells` of the flat table; gain per slot of it."""

    gain: float
    cells: np.ndarray
    experts: np.ndarray


def improve(
    placement: Placement, counts: Any, *, target: float = TARGET, nodes: int = 1,
    changes: int | None = None,
) -> Placement:  # fmt: skip
    """`placement` with a few slots changed, so that it balances `counts` [S, L, E].

    Layer by layer: from the busiest device, exchange two slots or give a replica to another expert,
    whichever gains the most per changed slot, until the slowest device is at most `target` times
    the mean one. It ends earlier where no move gains anything worth having, or at what one expert
    alone weighs with all the replicas it can get (`least_lb`), if that is above `target`: the best
    placement found is returned, in no layer worse than the given one.

    Args:
      target: at least 1. Judged on sums of consecutive steps (`binned`), not on single ones.
      nodes: experts stay in the nodes that hold them; 1 lets them go anywhere.
      changes: slots that may change in a layer; None takes as many as it has.
    """
    given = check_window(placement, counts)
    check_target(target)
    check_nodes(nodes, placement.devices)
    changes = placement.slots if changes is None else changes
    check_at_least("changes", changes, 0)
    rows = [
        improve_layer(table, binned(given[:, layer], placement.devices), target, changes, nodes)
        for layer, table in enumerate(by_device(placement))
    ]
    table = np.stack(rows).reshape(placement.layers, placement.slots)
    return make_placement(table, placement.experts, placement.devices)


def least_lb(counts: Any, slots: int, devices: int) -> np.ndarray:
    """[L] float64: no placement has a slowest device below this many times the mean, in any layer.

    The heaviest replica lies on some device; replicas are at their best when each goes to whichever
    expert has the heaviest, up to one per device.
    """
    given = check_counts("counts", counts, 3)
    return np.array(
        [_least(np.sum(layer, axis=0), slots, devices) for layer in given.swapaxes(0, 1)]
    )


def improve_layer(
    table: np.ndarray, tokens: np.ndarray, target: float, changes: int, nodes: int = 1
) -> np.ndarray:
    """`improve` of one layer: experts of devices [G, P / G], tokens [S, E]."""
    bound = max(target, _least(np.sum(tokens, axis=0), table.size, len(table)))
    layer = best = _layer(table, tokens, nodes)
    while layer.lb > bound:
        move = _best_move(layer)
        changes -= 0 if move is None else len(move.cells)
        if move is None or changes < 0:
            break
        layer = _changed(layer, move)
        if layer.lb < best.lb:  # evener on the whole may be a higher peak on the way
            best = layer
    return best.table


def layer_lb(table: np.ndarray, tokens: np.ndarray) -> float:
    """Slowest over mean of one layer in the bins that `improve_layer` sees; 1 without tokens."""
    return _layer(table, tokens, 1).lb


def _layer(table: np.ndarray, tokens: np.ndarray, nodes: int) -> _Layer:
    """The start of a search, from experts of devices [G, P / G] and tokens [S, E]."""
    near = held(table, tokens.shape[1]).reshape(nodes, -1, tokens.shape[1]).any(axis=1)
    allowed = np.repeat(near, len(table) // nodes, axis=0)
    total = max(1, int(np.sum(tokens)))
    return _derived(table, allowed, tokens * (_MEAN * len(table) * len(tokens)) // total)


def _derived(table: np.ndarray, allowed: np.ndarray, weights: np.ndarray) -> _Layer:
    now = held(table, weights.shape[1])
    count = np.sum(now, axis=0)
    share = weights // count
    return _Layer(table, allowed, weights, now, count, share, np.sum(share[:, table], axis=2))


def _changed(layer: _Layer, move: _Move) -> _Layer:
    """The layer after a move."""
    table = layer.table.copy()
    table.reshape(-1)[move.cells] = move.experts
    return _derived(table, layer.allowed, layer.weights)


def binned(counts: np.ndarray, devices: int) -> np.ndarray:
    """Counts [S, E] of steps summed into bins of consecutive ones: [bins, E].

    As many bins, at most BINS, as leave a mean of QUIET tokens to a device: who is busy when is
    worth knowing as long as it is not chance.
    """
    steps = len(counts)
    bins = int(np.sum(counts)) // (QUIET * devices)
    parts = np.array_split(counts, max(1, min(BINS, bins, steps)))
    return np.stack([np.sum(part, axis=0) for part in parts])


def check_window(placement: Placement, counts: Any) -> np.ndarray:
    """The counts [S, L, E] as int64; ValueError where they are not those of the placement."""
    given = check_counts("counts", counts, 3)
    if given.shape[1:] != (placement.layers, placement.experts):
        raise ValueError(
            f"counts must have shape [steps, {placement.layers}, {placement.experts}], as the "
            f"placement has layers and experts, got {list(given.shape)}"
        )
    if placement.devices > _DEVICES:
        raise ValueError(
            f"the search counts loads in 64 bits, enough for {_DEVICES} devices, got "
            f"{placement.devices}; `rebalance` has no limit"
        )
    return given


def check_target(target: float) -> None:
    """Raise a ValueError unless `target` is a factor of at least 1."""
    if not 1 <= target < np.inf:
        raise ValueError(f"target must be at least 1 (slowest device over mean), got {target}")


def _least(tokens: np.ndarray, slots: int, devices: int) -> float:
    """`least_lb` of one layer, tokens [E]."""
    mean = int(np.sum(tokens)) / devices
    heaviest = (tokens / replica_counts(tokens, slots, devices)).max()
    return max(1.0, float(heaviest) / mean) if mean else 1.0


def _best_move(layer: _Layer) -> _Move | None:
    """The best move off the busiest device, or the next busy one; None if none is worth it."""
    loads = layer.loads
    above = np.sum(np.maximum(loads * len(layer.table) - np.sum(loads, axis=1)[:, None], 0), axis=0)
    busy = min(_TRIES, np.count_nonzero(above))
    for device in np.argsort(-above, kind="stable")[:busy].tolist():
        found = [_best_exchange(layer, device), _best_gift(layer, device)]
        best = max(found, key=lambda move: move.gain)
        if best.gain > _LEAST:
            return best
    return None


def _best(gain: np.ndarray, cells: np.ndarray, experts: np.ndarray) -> _Move:
    """The first of the moves [N] with the most `gain` for each of the slots that they change."""
    if not len(gain):
        return _Move(-1.0, cells, experts)
    best = int(np.argmax(gain))
    return _Move(int(gain[best]) / cells.shape[1], cells[best], experts[best])


def _best_exchange(layer: _Layer, device: int) -> _Move:
    """Of the exchanges of a slot of `device` for one elsewhere."""
    devices, size = layer.table.shape
    mine, other = np.meshgrid(np.arange(size) + device * size, np.arange(devices * size))
    cells = np.stack([mine.ravel(), other.ravel()], axis=1)
    gives, takes = layer.table.reshape(-1)[cells].T
    there = cells[:, 1] // size
    fits = (there != device) & _free(layer, there, gives) & _free(layer, device, takes)
    cells, gives, takes, there = cells[fits], gives[fits], takes[fits], there[fits]
    share, loads = layer.share, layer.loads
    moved = share[:, gives] - share[:, takes]  # [S, N]
    gain = np.sum(2 * moved * (loads[:, [device]] - loads[:, there] - moved), axis=0)
    return _best(gain, cells, np.stack([takes, gives], axis=1))


def _best_gift(layer: _Layer, device: int) -> _Move:
    """Of the ways in which an expert with several replicas gives one to another expert.

    An expert of `device` gains a replica elsewhere, or a slot of `device` changes its expert.
    """
    size = layer.table.shape[1]
    flat = layer.table.reshape(-1)
    spare = np.flatnonzero(layer.count[flat] > 1)
    inside = spare[spare // size == device]
    to_hot = np.stack(np.meshgrid(spare, np.unique(layer.table[device])), -1).reshape(-1, 2)
    from_hot = np.stack(np.meshgrid(inside, np.arange(len(layer.count))), -1).reshape(-1, 2)
    pairs = np.concatenate([to_hot, from_hot])
    pairs = pairs[_free(layer, pairs[:, 0] // size, pairs[:, 1])]
    cells, gains = pairs.T
    return _best(_gift_gain(layer, cells, gains), cells[:, None], gains[:, None])


def _gift_gain(layer: _Layer, cells: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """By how much the sum of squared loads falls when experts `gains` [N] take the slots `cells`.

    The loads change by down * held of the expert that gains, up * held of the one that loses, and
    swap on the device of the slot; the sum of (load + change)^2 is multiplied out, so that nothing
    has a dimension of devices.
    """
    there, loses = cells // layer.table.shape[1], layer.table.reshape(-1)[cells]
    loads, share, count = layer.loads, layer.share, layer.count
    more = layer.weights[:, gains] // (count[gains] + 1)  # [S, N]
    less = layer.weights[:, loses] // (count[loses] - 1)
    down, up, swap = more - share[:, gains], less - share[:, loses], more - less
    with_load = np.dot(loads, layer.held)  # [S, E]
    has = layer.held.T
    square = np.sum(has * has, axis=1)
    both = np.sum(has[gains] * has[loses], axis=1)
    linear = down * with_load[:, gains] + up * with_load[:, loses] + swap * loads[:, there]
    bent = down * down * square[gains] + up * up * square[loses] + 2 * down * up * both
    bent += swap * (swap + 2 * up * layer.held[there, loses])
    return -np.sum(2 * linear + bent, axis=0)


def _free(layer: _Layer, device: Any, expert: np.ndarray) -> np.ndarray:
    """Whether each device may hold the expert and does not yet: two on one device share nothing."""
    return layer.allowed[device, expert] & (layer.held[device, expert] == 0)
