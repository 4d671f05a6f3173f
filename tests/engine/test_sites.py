"""An engine over a mesh, as far as no program is needed: refusals, balance, calls, splits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import axes, eplb, layout
from deepinfer_jax.axes import Rules
from deepinfer_jax.cache import Cache
from deepinfer_jax.engine import Engine, balance, memory, sizes, spread
from deepinfer_jax.engine.balance import Balance, Balancing
from deepinfer_jax.engine.calls import joint_calls
from deepinfer_jax.engine.sites import ONE, Site
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.images.spans_in_prompt import ImageSpan
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.requests import Options, Request
from deepinfer_jax.snapshots import Snapshots
from tests import small

CFG = small.CONFIG
SIZES = Sizes(slots=3, capacity=96, pages=6, page_tokens=16, prefill=(8, 32))
PARTS = 4


def mesh(data: int = 1, expert: int = 2, context: int = 1):
    devices = jax.devices()[: data * expert * context]
    return layout.device_mesh(data, expert, devices, context=context)


def asking(images: tuple[Any, ...] = (), **options) -> Request:
    return Request("r7", (5, 6), (5, 6), 0, Options(**options), images=images)


# -- what is refused -------------------------------------------------------------------------------


def test_a_mesh_with_other_axes_is_refused():
    other = axes.make_mesh({"data": 1, "tensor": 2}, jax.devices()[:2])
    with pytest.raises(ValueError, match=r"got \['tensor'\] too: make it with `layout"):
        Site(other)
    with pytest.raises(ValueError, match="rules of the mesh: steps do not split heads"):
        Site(mesh(), rules=Rules.of(heads="data"))
    assert Site(mesh(data=2)).parts == 4
    assert (ONE.parts, ONE.ranks, ONE.processes) == (1, 1, 1)


def test_experts_that_every_device_has_do_not_move():
    whole = Rules.of(vocab="expert")
    with pytest.raises(ValueError, match=r"'layers' is on 2 devices, .* split experts over 1"):
        Site(mesh(), layout.initial_placements(CFG, 2), whole)
    with pytest.raises(ValueError, match=r"'layers' is on 1 devices, .* split experts over 2"):
        Site(mesh(), layout.initial_placements(CFG, 1))
    site = Site(mesh(), layout.initial_placements(CFG, 1), whole)
    balance.check(site, Balancing())
    model: Any = None
    with pytest.raises(ValueError, match=r"experts cannot move .* have none for"):
        Engine(model, SIZES, site=site, balancing=Balancing(interval=3))


def test_devices_along_context_have_the_same_slots():
    shared = Site(mesh(context=2, expert=2))
    assert (shared.parts, shared.ranks) == (2, 2)
    slots = shared.slots(np.arange(6, dtype=np.int32))
    held = {each.device.id: np.asarray(each.data).tolist() for each in slots.addressable_shards}
    grid = shared.mesh.devices[0]  # context, expert
    for expert, want in enumerate(([0, 1, 2], [3, 4, 5])):
        assert [held[device.id] for device in grid[:, expert]] == [want, want]


def test_pages_shared_by_devices_take_a_share_of_each():
    """And are cut so that every device has as many of their entries."""
    numerics = Numerics.native()
    made = sizes.make_sizes(2, 200, CFG, ranks=3)
    assert made.page_tokens % (3 * 2) == 0
    one = memory.need(CFG, numerics, made)
    shared = memory.need(CFG, numerics, made, ranks=3)
    assert (3 * shared.page, shared.slot) == (one.page, one.slot)
    few = int((2 * shared.slot + 5 * shared.page) / memory.SHARE) + 1
    assert memory.fitted(made, CFG, numerics, few, ranks=3).pages == 5
    with pytest.raises(ValueError, match="one sequence of 200 tokens needs 4 pages"):
        memory.fitted(made, CFG, numerics, few)


class OfTwoProcesses(Site):
    """A site whose devices belong to two processes."""

    @property
    def processes(self) -> int:
        return 2


def test_requests_that_only_one_device_can_answer_are_refused():
    picture: Any = None  # not looked at
    shown = asking(images=(ImageSpan(0, picture),))
    ruled = asking(grammar={"kind": "regex", "schema": "a+"})
    for site in (ONE, Site(mesh())):
        site.check(asking())
        site.check(ruled)
    ONE.check(shown)
    with pytest.raises(ValueError, match=r"'r7' has images, .* run it on one device"):
        Site(mesh()).check(shown)
    with pytest.raises(ValueError, match=r"'r7' has a grammar, .* run it in one process"):
        OfTwoProcesses(mesh()).check(ruled)


# -- balance ---------------------------------------------------------------------------------------


def noted(balance: Balance, placements: layout.Placements, loads) -> float | None:
    """The balance of a call whose one round gave experts these loads, in every layer."""
    made: Any = type("Made", (), {})()
    made.loads = None
    if loads is not None:
        made.loads = {
            name: np.tile(np.asarray(loads(p.experts), np.int32), (1, p.layers, 1))
            for name, p in placements.items()
        }
    return balance.note(made)


def skewed(experts: int) -> list[int]:
    return [100 if 0 < expert <= experts // 2 else 1 for expert in range(experts)]


def test_every_layer_is_planned_once_after_each_interval():
    placements = layout.initial_placements(CFG, 2)
    balance = Balance(placements, Balancing(interval=3, window=3), CFG)
    every = [(name, n) for name, p in placements.items() for n in range(p.layers)]
    for call in range(3):
        assert balance.next() is None, call
        assert noted(balance, placements, skewed) > 1.0
    now, moved = dict(placements), []
    for _ in every:
        found = balance.next()
        if found is None:
            continue
        name, layer, old, new = found
        assert old is now[name]
        same = (new.physical_to_logical == old.physical_to_logical).all(axis=1)
        assert [*np.flatnonzero(~same)] == [layer]
        now[name] = new
        moved.append((name, layer))
    assert moved == [each for each in every if each in moved]
    assert moved, "so lopsided a load moves something"
    assert balance.next() is None, "no layer is due twice"
    counts = np.array([skewed(CFG.n_routed_experts)] * CFG.num_hidden_layers)
    slowest = [eplb.device_loads(p["layers"], counts).max() for p in (placements, now)]
    assert slowest[1] < slowest[0]
    assert balance.site(Site(mesh(), placements)).placements == now


def test_the_balance_of_a_call_is_its_slowest_device_over_the_mean():
    """Of two devices with two experts each."""
    placements = {"layers": eplb.initial_placement(CFG.num_hidden_layers, 4, 4, 2)}
    cfg = dataclasses.replace(CFG, n_routed_experts=4)
    balance = Balance(placements, Balancing(), cfg)
    assert noted(balance, placements, None) is None
    first = set(np.asarray(placements["layers"].physical_to_logical)[0, :2].tolist())
    one_sided = [6 if expert in first else 0 for expert in range(4)]
    assert noted(balance, placements, lambda _: one_sided) == 2.0
    assert noted(balance, placements, lambda _: [3] * 4) == 1.0
    assert noted(balance, placements, lambda _: [0] * 4) == 1.0
    assert balance.next() is None, "without an interval experts stay"


# -- calls -----------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.integers(0, 70), min_size=PARTS, max_size=PARTS))
def test_every_row_runs_once_on_its_own_device(counts):
    """Each device has as many rows in a call as any other, the rest of them padding."""
    local = SIZES.slots
    every = [
        (7, part * local + n % local, n // local) for part, k in enumerate(counts) for n in range(k)
    ]
    seen = []
    for call in joint_calls(every, SIZES, PARTS):
        own = call.size // PARTS
        assert own in SIZES.prefill
        assert len(call.part) == call.size
        for part in range(PARTS):
            rows = [row for row in call.part[part * own : (part + 1) * own] if row[1] >= 0]
            assert all(row[1] // local == part for row in rows)
            seen += rows
        assert call.count == sum(row[1] >= 0 for row in call.part) > 0
        slots = np.asarray(call.rows(CFG, Numerics.native()).slots)
        given_slots = np.array([row[1] for row in call.part])
        assert slots.tolist() == np.where(given_slots < 0, -1, given_slots % local).tolist()
    assert sorted(seen) == sorted(every)
    for part in range(PARTS):
        mine = [row for row in every if row[1] // local == part]
        assert [row for row in seen if row[1] // local == part] == mine


# -- splits ----------------------------------------------------------------------------------------


def test_state_is_split_where_its_slots_are():
    every = ("data", "expert")
    cache = spread.cache_specs(mesh())
    names = [field.name for field in dataclasses.fields(Cache) if field.name != "ranks"]
    found = {name: [*getattr(cache, name)].index(every) for name in names}
    second = ("window", "draft", "kv", "keys", "pending")
    assert found == {name: int(name in second) for name in found}
    kept = spread.snapshot_specs(mesh())
    for field in dataclasses.fields(Snapshots):
        assert getattr(kept, field.name) == getattr(cache, field.name)
