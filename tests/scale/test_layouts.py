"""Layouts: the shipped ones hold the released model; others are refused by the leaf."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from deepinfer_jax import axes, cache, layout, params, scale
from deepinfer_jax.axes import Rules
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.scale import memory
from deepinfer_jax.scale.layouts import Layout
from tests.scale import released
from tests.small import CONFIG


def changed(layout: Layout, **rules) -> Layout:
    table = dict(layout.rules.table) | rules
    rules = dataclasses.replace(layout.rules, table=tuple(sorted(table.items())))
    return dataclasses.replace(layout, rules=rules)


@pytest.mark.parametrize("name", scale.layout_names())
def test_the_shipped_ones_hold_the_released_model(name):
    """As an engine loads it: the same bytes of a device as in the plan, leaves where they say."""
    made, cfg = scale.load_layout(name), released.config()
    made.check(cfg)
    assert made.hardware in scale.hardware_names()
    assert made.about
    assert str(made.devices) in name.split("-")
    assert layout.why_not(made.rules) == ""
    mesh = axes.abstract_mesh(dict(made.mesh))
    tree = axes.padded(layout.described(cfg, {}), mesh, made.rules)
    specs, found = params.by_path(tree), params.by_path(axes.shardings(tree, mesh, made.rules))
    held = {
        path: math.prod(how.shard_shape(specs[path].shape)) * specs[path].dtype.itemsize
        for path, how in found.items()
        if not made.off_device(specs[path])
    }
    assert sum(held.values()) == sum(part.device for part in memory.weights(cfg, made))
    split = {path: tuple(how.spec) for path, how in found.items() if how.spec}
    tables = {"engram.0.embed", "engram.1.embed"} if made.engram == "device" else set()
    heads = {"head", "embed", "draft.markov_head", "draft.markov_embed"}
    ends = (".codes", ".scale")
    weights = {next((p.removesuffix(e) for e in ends if p.endswith(e)), p) for p in split}
    experts = {f"{at}layers.ffn.experts.w{n}" for at in ("", "draft.") for n in (1, 2, 3)}
    assert weights == experts | tables | (heads if made.parts("vocab") > 1 else set())
    assert set(split.values()) <= {("expert",), (None, "expert")}


def test_the_numbers_of_devices_that_are_shipped():
    devices = {scale.load_layout(name).devices for name in scale.layout_names()}
    assert devices == {8, 16, 64, 128}


def test_experts_that_cannot_be_split_evenly():
    with pytest.raises(ValueError, match=r"experts\.\{\}\.w1.*'expert' of size .* 7 parts"):
        scale.over_experts(7).check(released.config())


def test_rows_of_tables_need_padding_to_be_split():
    layout = dataclasses.replace(
        scale.over_experts(8), rules=dataclasses.replace(scale.over_experts(8).rules, padded=())
    )
    with pytest.raises(
        ValueError, match=r"layers\.14\.engram\.embed\.weight: .*384016682.* 8 parts"
    ):
        layout.check(released.config())
    mesh = axes.abstract_mesh({"expert": 8})
    leaf = axes.Leaf((10, 3), float, ("engram_rows", None), "table")
    rules = dataclasses.replace(Rules.of(engram_rows="expert"), padded=("engram_rows",))
    assert axes.padded_shape(leaf, mesh, rules) == (16, 3)
    assert axes.shard_shape(leaf, mesh, rules) == (2, 3)


def test_two_dimensions_on_one_mesh_axis():
    layout = changed(scale.over_experts(8), expert_mlp="expert")
    with pytest.raises(ValueError, match=r"w1.*two dimensions on one mesh axis"):
        layout.check(released.config())


def test_a_slot_is_where_its_pages_are():
    layout = changed(scale.over_experts(8), page=None)
    with pytest.raises(ValueError, match=r"slots are split over .* pages over \(\)"):
        layout.check(released.config())


def test_every_leaf_of_a_cache_has_axes_and_they_are_checked():
    shapes = cache.cache_shapes(CONFIG, Numerics(), 3, 64, paging=cache.Paging(16, 12))
    for leaf in (*cache.cache_leaves(shapes).kv, cache.cache_leaves(shapes).window):
        assert len(leaf.axes) == len(leaf.shape)
    mesh = axes.abstract_mesh({"data": 2})
    rules = Rules.of(slot="data", page="data")
    with pytest.raises(ValueError, match=r"cache\.window: dimension 'slot' of size 3 .* 2 parts"):
        cache.cache_shardings(shapes, mesh, rules)
    even = cache.cache_shapes(CONFIG, Numerics(), 4, 64, paging=cache.Paging(16, 12))
    made = cache.cache_shardings(even, mesh, rules)
    assert made.window.spec[1] == "data"
    assert made.lengths.spec == axes.PartitionSpec("data")


def test_products_are_not_cut_over_devices():
    mesh = (("data", 1), ("context", 1), ("expert", 4), ("tensor", 2))
    with pytest.raises(ValueError, match=r"mesh.tensor must be 1, got 2: .* another order"):
        Layout("mine", mesh, Rules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": {"data": 8}}, "mesh must have the axes"),
        ({"rules": {"entry": "expert"}}, r"split entry over 'context', .* got \('expert',\)"),
        ({"rules": {"entry": "context", "slot": ["data", "context"]}}, "slot over other axes"),
        (
            {"mesh": {"data": 0, "context": 1, "expert": 1, "tensor": 1}},
            "mesh.data must be at least",
        ),
        (
            {"mesh": {"data": 2**20, "context": 1, "expert": 2**20, "tensor": 1}},
            "at most 2147483647 devices, got 1099511627776",
        ),
        ({"rules": {"expert": 3}}, "rules.expert must be names of axes, got 3"),
        ({"rules": {"slot": [["data"]]}}, r"rules.slot must be names of axes, got \[\['data'\]\]"),
        ({"padded": "vocab"}, "padded must be names of axes, got 'vocab'"),
        ({"rules": {"experts": "expert"}}, "unknown logical axes experts"),
        ({"rules": {"expert": "model"}}, r"rules name mesh axes \['model'\]"),
        ({"padded": ["rows"]}, "unknown logical axes rows"),
        ({"engram": "disk"}, "engram must be device or host, got 'disk'"),
        ({"more": 1}, "keys must be about, engram"),
    ],
)
def test_a_file_that_is_no_layout(tmp_path, change, message):
    sizes = {"data": 2, "context": 1, "expert": 4, "tensor": 1}
    data = {"about": "", "hardware": "h200", "mesh": sizes, "rules": {"expert": "expert"}}
    data |= {"padded": [], "engram": "device"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data), "utf-8")
    assert scale.load_layout(path).devices == 8
    path.write_text(json.dumps(data | change), "utf-8")
    with pytest.raises(ValueError, match=message):
        scale.load_layout(path)


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown layout 'h200-9': give one of .*h200-8"):
        scale.load_layout("h200-9")
