"""Stage 1: dense forms equal the gathered ones, the loss falls, the indexer learns apart."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import rows as row_sets
from deepinfer_jax.model import forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.params import by_path
from deepinfer_jax.training import masters, optimizer, pretrain
from tests.training.small_training import CONFIG, LENGTH, batch, table, values

TOKENS = batch()
WEIGHTS = pretrain.target_weights(TOKENS)


def test_prompts_weigh_less_than_answers_and_padding_nothing():
    tokens = np.array([[0, 4, 9, 9, 5, 7, 8, 1, 0, 6, 1, 2]], np.int32)
    low = pretrain.PROMPT_WEIGHT
    expected = [low, low, low, low, low, 1, 1, low, 1, 1, 0]
    np.testing.assert_allclose(pretrain.target_weights(tokens)[0], expected)


@functools.partial(jax.jit, static_argnames="rows")
def _outputs(weights, tables, rows):
    numerics = dataclasses.replace(Numerics.fp32_kvq(), rows=rows)
    lengths = jnp.count_nonzero(jnp.asarray(TOKENS) != 2, axis=1)
    call = row_sets.batch_rows(TOKENS, lengths)
    hidden, _ = forward.forward(weights, tables, call, None, CONFIG, numerics, length=LENGTH)
    return hidden.output, hidden.routed


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_compile")
def test_dense_forms_equal_the_serving_forms():
    weights = jax.jit(masters.released, static_argnums=1)(values(), CONFIG)
    dense, serving = (_outputs(weights, table(), rows) for rows in ("dense", "tiled"))
    real = (TOKENS != 2).reshape(-1)
    np.testing.assert_array_equal(dense[1][:, real], serving[1][:, real])
    # float32 sums in another order, through three layers.
    np.testing.assert_allclose(dense[0][real], serving[0][real], atol=2e-4)


def test_dense_rows_refuse_what_is_not_whole_sequences():
    numerics = pretrain.training_numerics(CONFIG)
    call = row_sets.batch_rows(TOKENS[:, :6], jnp.array([6, 6]))
    with pytest.raises(ValueError, match="multiple of the window"):
        forward.forward(values(), table(), call, None, CONFIG, numerics, length=6)


@jax.jit
def _gradients(weights, tables):
    numerics = pretrain.training_numerics(CONFIG)
    loss = functools.partial(pretrain.batch_loss, cfg=CONFIG, numerics=numerics)
    return jax.value_and_grad(loss, has_aux=True)(
        weights, tables, jnp.asarray(TOKENS), jnp.asarray(WEIGHTS), jnp.float32(1)
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_compile")
def test_loss_falls_and_every_leaf_of_the_stage_learns():
    rules = optimizer.kinds(CONFIG, "backbone")
    step = jax.jit(
        lambda v, g, m: optimizer.update(v, g, m, jnp.float32(3e-3), rules, optimizer.Settings())
    )
    weights, moments = values(), optimizer.init(values(), rules)
    (_, first), grads = _gradients(weights, table())
    for path, grad in by_path(grads).items():
        still = path.startswith("draft.") or path.endswith("gate.bias")
        assert bool(jnp.any(grad != 0)) != still, path
    for _ in range(8):
        weights, moments = step(weights, grads, moments)
        (_, report), grads = _gradients(weights, table())
    assert float(report.loss) < 0.8 * float(first.loss)
    assert float(report.indexer) < float(first.indexer)
    used = (TOKENS != 2).sum() * CONFIG.num_experts_per_tok
    np.testing.assert_array_equal(report.load.sum(axis=1), np.full(3, used))


def test_router_biases_move_towards_the_idle():
    moved = pretrain.balanced_bias(
        jnp.zeros((1, 3)), jnp.array([[5.0, 1.0, 3.0]]), jnp.float32(0.1)
    )
    np.testing.assert_allclose(moved, [[-0.1, 0.1, 0.0]])


def test_all_entries_selects_everything_visible():
    wide = pretrain.all_entries(CONFIG, LENGTH)
    assert wide.index_topk >= LENGTH
    assert wide.candidate_topk_blocks * wide.candidate_block_size >= LENGTH
