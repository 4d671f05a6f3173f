"""Stage 2: the training form is the serving draft, its label the coupled acceptance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import cache as caches
from deepinfer_jax import rows as row_sets
from deepinfer_jax.model import draft as serving
from deepinfer_jax.model import forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.training import draft, masters
from tests.training.small_training import CONFIG, LENGTH, batch, table, values

TOKENS = batch()
NUMERICS = dataclasses.replace(Numerics.fp32_kvq(), rows="dense")


@jax.jit
def _both(weights, tables, tokens, positions):
    """(training form, serving form) of the draft logits and confidences at anchors [B, A]."""
    batch_size, count = positions.shape
    rows = row_sets.batch_rows(tokens, jnp.full((batch_size,), LENGTH))
    hidden, _ = forward.forward(weights, tables, rows, None, CONFIG, NUMERICS, length=LENGTH)
    valid = jnp.ones((*positions.shape, CONFIG.dspark_block_size), bool)
    anchors = draft.Anchors(positions, valid)
    trained = draft.heads(weights, tables, hidden.taps, tokens, anchors, CONFIG, NUMERICS)

    plain = dataclasses.replace(NUMERICS, rows="tiled")
    cache = caches.init_cache(CONFIG, plain, batch_size, LENGTH, slack=LENGTH)
    cache = serving.store_context(weights, tables, hidden, cache, CONFIG, plain)
    slots = jnp.repeat(jnp.arange(batch_size, dtype=jnp.int32), count)

    def forced(_, index, before):
        return tokens[slots, jnp.minimum(index, LENGTH - 1)]

    place = positions.reshape(-1)
    made = serving.draft(
        weights, tables, cache, slots, place, tokens[slots, place], forced, CONFIG, plain
    )
    return (trained.logits, trained.confidence), (made.logits, made.confidence)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_compile")
def test_training_form_equals_the_serving_draft():
    positions = jnp.array([[2, 9, 15], [1, 12, 18]], jnp.int32)
    weights = jax.jit(masters.released, static_argnums=1)(values(), CONFIG)
    trained, served = _both(weights, table(), jnp.asarray(TOKENS), positions)
    # float32 sums in another order.
    np.testing.assert_allclose(trained[0], served[0], atol=1e-4)
    np.testing.assert_allclose(trained[1], served[1], atol=1e-4)


def test_anchors_stand_before_answers_and_count_an_unbroken_run():
    answer = np.zeros((2, 12), bool)
    answer[0, 4:9] = True
    answer[1, 10:] = True
    made = draft.choose_anchors(jax.random.key(0), jnp.asarray(answer), 5, 3)
    for row, positions, valid in zip(answer, made.positions, made.valid, strict=True):
        padded = np.concatenate([row, np.zeros(4, bool)])
        for position, counts in zip(positions, valid, strict=True):
            if counts[0]:
                ahead = padded[int(position) + 1 : int(position) + 4]
                np.testing.assert_array_equal(counts, np.cumprod(ahead) > 0)
    assert int(made.valid[0, :, 0].sum()) == 5
    assert int(made.valid[1, :, 0].sum()) == 2
