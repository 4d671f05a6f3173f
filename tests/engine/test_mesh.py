"""The engine over a mesh: slots of their own for every device, experts on slots of a placement,
global KV shared along an axis "context".
"""

from __future__ import annotations

import dataclasses

import jax
import pytest

from deepinfer_jax import layout, planning
from deepinfer_jax.axes import Rules
from deepinfer_jax.engine import Engine
from deepinfer_jax.engine.balance import AS_IT_IS, Balancing
from deepinfer_jax.engine.sites import Site
from tests import tiny_model
from tests.engine import test_engine as single

COUNT = single.COUNT
MESHES = [  # data, context, expert
    (1, 2, 1), (1, 2, 2), (2, 2, 1), (1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 1, 8),
]  # fmt: skip


RULES = dataclasses.replace(
    Rules.of(expert="expert", vocab="expert", engram_rows="expert"), padded=("engram_rows", "vocab")
)


def answered(data, context, expert, balancing=AS_IT_IS, rules=RULES, **more):
    """(Results in order, records of the steps, statistics) of an engine over a mesh, with
    vocabulary and Engram rows split like experts.
    """
    model = tiny_model.model()
    devices = jax.devices()[: data * context * expert]
    mesh = layout.device_mesh(data, expert, devices, context=context)
    parts = layout.expert_parts(mesh, rules)
    site = Site(mesh, layout.initial_placements(model.cfg, parts, least=2), rules)
    sizes = dataclasses.replace(single.SIZES, slots=2).of_all(site.parts)
    records = []
    running = Engine(model, sizes, site=site, balancing=balancing, observer=records.append, **more)
    for request in single.requests():
        running.submit(request)
    running.warm_up()
    found = {update.index: update.result for update in running.updates() if update.result}
    return [found[n] for n in range(COUNT)], records, running.statistics()


pytestmark = pytest.mark.exhaustive  # every mesh compiles programs of its own


def test_experts_that_move_while_replies_are_made_change_no_bit():
    """Two devices, requests and experts on both; layer after layer moves between two calls."""
    found, records, told = answered(1, 1, 2, Balancing(interval=4, window=8))
    assert found == single.alone()
    assert told.moved_layers > 1
    assert told.recompiled == 0
    seen = [record.moe_lb for record in records if record.moe_lb is not None]
    assert len(seen) > 8
    assert 1.0 <= min(seen) <= max(seen) <= 2.0


def test_experts_that_every_device_has_change_no_bit():
    """By rules that split the vocabulary alone."""
    found, _, _ = answered(1, 1, 2, rules=Rules.of(vocab="expert"))
    assert found == single.alone()


@pytest.mark.parametrize("drafts", [2, 0])
@pytest.mark.parametrize("sizes", MESHES)
def test_no_mesh_changes_a_bit(sizes, drafts):
    """Experts move meanwhile, where there are several devices for them."""
    balancing = Balancing(interval=4, window=8)
    found, _, told = answered(*sizes, balancing, policy=planning.Fixed(drafts))
    assert found == single.alone()
    assert (told.moved_layers > 1) == (sizes[2] > 1)
    assert (told.accepted > 0) == (drafts > 0)
