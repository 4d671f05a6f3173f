"""What moves between two placements, and names that keep it little."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from deepinfer_jax import eplb
from deepinfer_jax.eplb.transfers import transfer_layer
from tests.eplb import drawn

REMOTE = "remote_expert_srcrank_srcslot_dstrank_dstslot"


def two(seed, layers, experts, slots, devices):
    rng = np.random.default_rng(seed)
    return [drawn.placement(rng, layers, experts, slots, devices) for _ in range(2)]


def test_recorded_transfers(recorded):
    """Of one layer, as tables: in one case an expert is left nowhere, which is no placement."""
    for case in recorded("eplb/transfer_plan.json")["cases"]:
        shape = (-1, case["slots_per_rank"])
        old, new = (np.array(case[key]).reshape(shape) for key in ("origin", "current"))
        got, expected = transfer_layer(old, new), case["expected"]
        assert got.kept == expected["kept_slots"], case["name"]
        assert got.local.tolist() == expected["local_copies_rank_src_dst"], case["name"]
        assert got.remote.tolist() == expected[REMOTE], case["name"]


@given(drawn.SEEDS)
def test_every_slot_gets_its_expert_and_every_device_receives_it_once(seed):
    old, new = two(seed, 2, 7, 12, 4)
    for layer, moves in enumerate(eplb.transfers(old, new)):
        before, after = old.physical_to_logical[layer], new.physical_to_logical[layer]
        np.testing.assert_array_equal(before[moves.sources], after)
        assert moves.kept + len(moves.local) + len(moves.remote) == 12
        held = [set(row) for row in before.reshape(4, 3).tolist()]
        received = [(expert, to) for expert, _, _, to, _ in moves.remote.tolist()]
        assert len(set(received)) == len(received)
        assert all(expert not in held[to] for expert, to in received)


@given(drawn.SEEDS)
def test_senders_of_an_expert_share_its_receivers(seed):
    old, new = two(seed, 1, 3, 12, 4)
    (moves,) = eplb.transfers(old, new)
    for expert in range(3):
        sent = moves.remote[moves.remote[:, 0] == expert]
        owners = [d for d, row in enumerate(old.physical_to_logical.reshape(4, 3)) if expert in row]
        served = [np.count_nonzero(sent[:, 1] == owner) for owner in owners]
        assert max(served) - min(served) <= 1
        assert sum(served) == len(sent)


def test_bytes_are_those_of_experts_sent():
    old = eplb.make_placement([[0, 1, 2, 0], [0, 1, 2, 0]], 3, 2)
    new = eplb.make_placement([[0, 1, 2, 1], [1, 0, 0, 2]], 3, 2)
    got = eplb.movement(old, new, expert_bytes=100)
    assert (got.kept, got.local, got.remote, got.bytes) == (3, 4, 1, 100)
    assert eplb.movement(old, old).kept == 8


def test_placements_of_different_sizes_have_no_way_between_them():
    old, new = eplb.initial_placement(1, 3, 4, 2), eplb.initial_placement(1, 3, 6, 2)
    with pytest.raises(ValueError, match=r"got \(1, 3, 4, 2\) and \(1, 3, 6, 2\)"):
        eplb.transfers(old, new)
    with pytest.raises(ValueError, match="same"):
        eplb.relabel(old, new)
    with pytest.raises(ValueError, match="expert_bytes must be at least 1"):
        eplb.movement(old, old, 0)


# -- renaming -------------------------------------------------------------------------------------


def most_kept(old, new, allowed):
    """Over all renamings of devices that are `allowed`: slots kept, by trying each."""
    shape = (4, -1)
    counts = [
        [np.bincount(row, minlength=7) for row in p.physical_to_logical[0].reshape(shape)]
        for p in (old, new)
    ]
    return max(
        sum(int(np.minimum(counts[0][i], counts[1][j]).sum()) for i, j in enumerate(order))
        for order in itertools.permutations(range(4))
        if allowed(order)
    )


@given(drawn.SEEDS)
@settings(max_examples=40)
def test_no_renaming_keeps_more(seed):
    old, new = two(seed, 1, 7, 12, 4)
    got = eplb.relabel(old, new)
    assert eplb.movement(old, got).kept == most_kept(old, new, lambda order: True)


@given(drawn.SEEDS)
@settings(max_examples=40)
def test_no_renaming_that_leaves_nodes_whole_keeps_more(seed):
    old, new = two(seed, 1, 7, 12, 4)
    got = eplb.relabel(old, new, nodes=2)
    whole = most_kept(old, new, lambda order: order[0] // 2 == order[1] // 2)
    assert eplb.movement(old, got).kept == whole
    nodes = [
        sorted(sorted(node) for node in p.physical_to_logical.reshape(2, 6).tolist())
        for p in (new, got)
    ]
    assert nodes[0] == nodes[1]


@given(drawn.SEEDS)
@settings(max_examples=40)
def test_a_renamed_placement_has_the_same_devices(seed):
    old, new = two(seed, 2, 7, 12, 4)
    got = eplb.relabel(old, new)
    for before, after in zip(new.physical_to_logical, got.physical_to_logical, strict=True):
        devices = [sorted(map(sorted, row.reshape(4, 3).tolist())) for row in (before, after)]
        assert devices[0] == devices[1]
    assert eplb.movement(old, got).kept >= eplb.movement(old, new).kept
    assert eplb.movement(old, eplb.relabel(old, old)).remote == 0


def test_nodes_divide_the_devices():
    placement = eplb.initial_placement(1, 3, 4, 2)
    with pytest.raises(ValueError, match="nodes must divide devices=2, got 3"):
        eplb.relabel(placement, placement, nodes=3)
