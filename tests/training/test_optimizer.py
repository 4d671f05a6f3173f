"""The optimizer's parts: rules per leaf, orthogonal steps, the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.params import by_path
from deepinfer_jax.training import optimizer
from tests.training.small_training import CONFIG


@pytest.mark.parametrize("shape", [(3, 5), (7, 4), (2, 6, 6)])
def test_orthogonal_brings_singular_values_near_one(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = np.linalg.svd(np.asarray(optimizer.orthogonal(jnp.asarray(x))), compute_uv=False)
    # Five steps of the quintic leave singular values in about [0.68, 1.13]; bfloat16 adds a little.
    assert (found > 0.5).all()
    assert (found < 1.3).all()


def test_each_stage_moves_its_own_leaves():
    first = by_path(optimizer.kinds(CONFIG, "backbone"))
    second = by_path(optimizer.kinds(CONFIG, "draft"))
    for path in first:
        moved = [rules[path] != "fixed" for rules in (first, second)]
        assert sum(moved) == (0 if path.endswith("gate.bias") else 1), path
    assert first["layers.attn.wq_a"] == "muon"
    assert first["layers.hc_attn.fn"] == "slow"
    assert first["embed"] == "adam"
    assert second["draft.markov_head"] == "adam"


def test_a_step_goes_down_and_leaves_fixed_leaves_alone():
    values = {"a": jnp.ones((3, 4)), "b": jnp.full((5,), 2.0), "c": jnp.ones((2,))}
    rules = {"a": "muon", "b": "adam", "c": "fixed"}
    grads = jax.tree.map(jnp.ones_like, values)
    moments = optimizer.init(values, rules)
    settings = optimizer.Settings()
    rate = jnp.float32(0.1)
    moved, moments = optimizer.update(values, grads, moments, rate, rules, settings)
    assert int(moments.count) == 1
    assert (np.asarray(moved["a"]) < 1).all()
    np.testing.assert_allclose(moved["b"], 1.9, rtol=1e-5)
    np.testing.assert_array_equal(moved["c"], values["c"])


def test_schedule_rises_holds_and_reaches_zero():
    rate = [optimizer.schedule(p, 2.0) for p in (0.0, 0.01, 0.02, 0.3, 0.55, 0.775, 1.0)]
    np.testing.assert_allclose(rate, [0, 1, 2, 2, 2, 1, 0], atol=1e-12)
