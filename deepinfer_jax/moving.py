"""Moving weights of experts to a new placement, one layer at a time, between two steps.

One compiled program serves every layer and every rearrangement: what is moved where is data. It
works on donated stacks, so that beside them only one layer is held twice (docs/parallel.md 3).
Legend: G devices of the axis, S slots of a device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax import eplb
from deepinfer_jax.eplb import Placement
from deepinfer_jax.layout import WEIGHTS, experts_of, with_experts
from deepinfer_jax.model.exchange import AXIS
from deepinfer_jax.params import Params

Array = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moves:
    """One layer's way to its new placement, a row for each device.

    before  [G, S]     the old slot of the same device that a slot takes its weights from
    sent    [G, S, G]  slot that is sent to device j in round r
    to      [G, S, G]  slot that takes what comes from device j in round r; S: none does
    after   [G, S]     in the end, the slot of the same device that a slot is a copy of
    rounds  int32: rounds there are; in each a device sends at most one expert to each other one
    """

    before: Array
    sent: Array
    to: Array
    after: Array
    rounds: Array


def moves_of(old: Placement, new: Placement, layer: int) -> Moves:
    """The way from `old` to `new` in one layer, as `eplb.transfers` pairs senders and receivers.

    Raises ValueError for placements of different sizes.
    """
    one = [only(placement, layer) for placement in (old, new)]
    way = eplb.transfers(*one)[0]
    devices, size = old.devices, old.slots_per_device
    own = np.tile(np.arange(size, dtype=np.int32), (devices, 1))
    before, after = own.copy(), own.copy()
    sent = np.zeros((devices, size, devices), np.int32)
    to = np.full((devices, size, devices), size, np.int32)
    count = np.zeros((devices, devices), np.int32)
    received: dict[tuple[int, int], int] = {}  # (receiver, old slot) -> slot that received it
    for _, sender, source, receiver, slot in way.remote.tolist():
        number = count[sender, receiver]
        sent[sender, number, receiver] = source
        to[receiver, number, sender] = slot
        count[sender, receiver] += 1
        received[receiver, sender * size + source] = slot
    for place, source in enumerate(way.sources.tolist()):
        device, slot = divmod(place, size)
        if source // size == device:
            before[device, slot] = source % size
        else:
            after[device, slot] = received[device, source]
    return Moves(before, sent, to, after, np.asarray(count.max(), np.int32))


def only(placement: Placement, layer: int) -> Placement:
    """A placement of one layer alone."""
    table = np.asarray(placement.physical_to_logical)[layer : layer + 1]
    return eplb.make_placement(table, placement.experts, placement.devices)


def with_layer(placement: Placement, layer: int, new: Placement) -> Placement:
    """`placement` whose `layer` is that of `new`, which has all layers or that one alone."""
    table = np.array(placement.physical_to_logical)
    given = np.asarray(new.physical_to_logical)
    table[layer] = given[layer if len(given) == len(table) else 0]
    return eplb.make_placement(table, placement.experts, placement.devices)


# How a layer's number and its `Moves` are split.
_EVERYWHERE: Any = PartitionSpec()
_BY_DEVICE: Any = PartitionSpec(AXIS)
_SPLIT = _EVERYWHERE, Moves(_BY_DEVICE, _BY_DEVICE, _BY_DEVICE, _BY_DEVICE, _EVERYWHERE)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="stacks")
def _moved(stacks: Params, layer: jax.Array, moves: Moves, mesh: Mesh) -> Params:
    """The stacks with one layer's weights moved."""
    split = PartitionSpec(None, AXIS)
    return jax.shard_map(
        _moved_here, mesh=mesh, in_specs=(split, *_SPLIT), out_specs=split, check_vma=False
    )(stacks, layer, moves)


def _moved_here(stacks: Params, layer: jax.Array, moves: Moves) -> Params:
    """`_moved` on one device."""
    before, sent, to, after = (a[0] for a in (moves.before, moves.sent, moves.to, moves.after))

    def one(stack: jax.Array) -> jax.Array:
        old = stack[layer]

        def once(number: jax.Array, new: jax.Array) -> jax.Array:
            came = lax.all_to_all(old[sent[number]], AXIS, 0, 0)
            return new.at[to[number]].set(came, mode="drop")

        new = lax.fori_loop(0, moves.rounds, once, old[before])
        return stack.at[layer].set(new[after])

    return jax.tree.map(one, stacks)


def moving_call(
    params: Params, name: str, layer: int, old: Placement, new: Placement, mesh: Mesh
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted program that moves a layer, and what it is called with: the moved stack `name`.

    Arguments as of `move`. Of one stack and mesh it is the same program for all of them.
    """
    experts = experts_of(params, name)
    stacks = {key: experts[key] for key in WEIGHTS}
    given = np.int32(layer), moves_of(old, new, layer)
    number, moves = (_laid(*each, mesh) for each in zip(given, _SPLIT, strict=True))
    return _moved, (stacks, number, moves, mesh)


def move(params: Params, name: str, layer: int, old: Placement, new: Placement, mesh: Mesh):
    """`params` with one layer of the stack `name` moved from its place in `old` to that in `new`.

    The old stack is donated: `params` must not be used any more. `old` is what the stack has now;
    the new placement has `layer` of `new` and the other layers of `old`.

    Returns (params, placement).
    """
    after = with_layer(old, layer, new)
    program, args = moving_call(params, name, layer, old, after, mesh)
    stacks = program(*args)
    return with_experts(params, name, {**stacks, "placement": placed(after, mesh)}), after


def placed(placement: Placement, mesh: Mesh) -> Any:
    """The placement on every device."""
    return _laid(placement, jax.tree.map(lambda _: _EVERYWHERE, placement), mesh)


def _laid(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Arrays of the host, the same in every process, on the devices that they are of.

    Each process gives its devices their parts. Arrays that were on one device first would be cut
    by programs of their own, which would be compiled in the middle of a run.
    """

    def one(value: Any, spec: PartitionSpec) -> jax.Array:
        value = np.asarray(value)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(one, tree, specs)
