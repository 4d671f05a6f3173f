"""Rounding of masters is rounding by export, and what is exported loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import checkpoint, params
from deepinfer_jax.training import export, masters
from tests import small
from tests.training.small_training import CONFIG, values

RELEASED = jax.jit(masters.released, static_argnames=("cfg", "part"))


def test_rounded_weights_are_the_exported_ones_and_stay_as_they_are(tmp_path):
    rounded = RELEASED(values(), CONFIG, 1.0)
    export.write(values(), CONFIG, tmp_path)
    loaded = jax.jit(params.widen)(checkpoint.load_params(tmp_path, CONFIG))
    small.same_tree(rounded, loaded)
    small.same_tree(RELEASED(rounded, CONFIG, 1.0), rounded)
    with pytest.raises(FileExistsError):
        export.write(values(), CONFIG, tmp_path)


def test_gradients_pass_straight_through():
    def total(draft):
        rounded = masters.released(draft, CONFIG, part="draft")
        return sum(jnp.sum(leaf) * 3 for leaf in jax.tree.leaves(rounded))

    for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(values()["draft"])):
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, 3, np.float32))


def test_early_in_training_only_bfloat16_rounding_applies():
    soft = RELEASED(values(), CONFIG, 0.0)["layers"]["attn"]["wq_a"]
    exact = values()["layers"]["attn"]["wq_a"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(soft, exact)


def test_saved_masters_come_back_as_bfloat16(tmp_path):
    masters.save(values(), tmp_path)
    loaded = masters.load(tmp_path, CONFIG)
    rounded = jax.tree.map(lambda v: v.astype(jnp.bfloat16).astype(jnp.float32), values())
    small.same_tree(loaded, rounded)


def test_init_is_a_function_of_the_seed():
    small.same_tree(masters.init(3, CONFIG), values())
    other = masters.init(4, CONFIG)
    assert not np.array_equal(other["embed"], values()["embed"])
