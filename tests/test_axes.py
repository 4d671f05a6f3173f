"""Rules and meshes: which dimension is split over what, and what is refused."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from deepinfer_jax import axes, params
from deepinfer_jax.axes import Rules
from deepinfer_jax.params import Spec
from tests.small import CONFIG

SPEC = Spec((6, 8, 5), "BF16", ("layer", "expert", None), "layers.{}.w")


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return axes.make_mesh({"data": 2, "model": 2}, jax.devices()[:4])


def test_names_go_through_the_rules(mesh: jax.sharding.Mesh) -> None:
    def spec_of(**rules):
        return axes.sharding_of(SPEC, mesh, Rules.of(**rules)).spec

    assert spec_of() == PartitionSpec()
    assert spec_of(expert="model") == PartitionSpec(None, "model")
    assert spec_of(expert=("data", "model")) == PartitionSpec(None, ("data", "model"))
    assert spec_of(layer="data", expert="model", vocab="data")[:2] == ("data", "model")
    assert spec_of(expert=None, layer=()) == PartitionSpec()


def test_rules_are_values() -> None:
    assert Rules.of(vocab="data", expert="model") == Rules.of(expert="model", vocab="data")
    assert hash(Rules.of(vocab="data")) == hash(Rules((("vocab", "data"),)))


def test_unknown_logical_axes_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown logical axes experts; known: .*expert"):
        Rules.of(experts="model")


def test_one_rule_per_axis() -> None:
    with pytest.raises(ValueError, match="may have one rule"):
        Rules((("vocab", "data"), ("vocab", "model")))


def test_a_mesh_axis_that_is_not_there(mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(ValueError, match=r"rules use mesh axes \['tensor'\], the mesh has"):
        axes.sharding_of(SPEC, mesh, Rules.of(expert="tensor"))


def test_two_dimensions_on_one_mesh_axis(mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(ValueError, match=r"layers\.\{\}\.w: .* two dimensions on one mesh axis"):
        axes.sharding_of(SPEC, mesh, Rules.of(layer="model", expert=("data", "model")))


def test_an_indivisible_dimension(mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(ValueError, match=r"w: dimension 'layer' of size 6 .* 4 parts"):
        axes.sharding_of(SPEC, mesh, Rules.of(layer=("data", "model")))


def test_a_tree_of_shardings_names_the_leaf_that_does_not_fit(mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(ValueError, match=r"\.w1\.weight: dimension 'expert' of size 7"):
        axes.shardings(params.abstract(CONFIG), mesh, Rules.of(expert="model"))


def test_a_tree_of_shardings_has_the_structure_of_the_parameters(mesh: jax.sharding.Mesh) -> None:
    tree = axes.shardings(params.abstract(CONFIG), mesh, Rules.of(embed="data"))
    assert jax.tree.structure(tree) == jax.tree.structure(params.shapes(CONFIG))
    assert tree["head"].spec == PartitionSpec(None, "data")
    assert tree["layers"]["attn"]["wq_a"].scale.spec == PartitionSpec(None, None, "data")


def test_a_mesh_needs_its_devices() -> None:
    with pytest.raises(ValueError, match=r"mesh \{'data': 3\} needs 3 devices, got 2"):
        axes.make_mesh({"data": 3}, jax.devices()[:2])
