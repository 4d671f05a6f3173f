"""What the checks of the trainer's pass leave open: stored weights, and gradients themselves."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_jax import params as parameters
from deepinfer_jax.determinism import equality, training
from tests.invariance import setups


@pytest.mark.exhaustive
def test_decoded_weights_give_the_same_bits():
    """What a small model keeps in memory to save the decoding at every step."""
    setup = setups.setup("bfloat16")
    model, numbers = setup.model, [0, 1, 2, 3, 0, 1, 2, 3]
    tokens, lengths = training.padded(setup, numbers, setup.capacity + 3)
    decoded = parameters.decode(model.params)
    scores = training.scored(
        decoded, model.tables, tokens, lengths, model.cfg, model.numerics,
        sampling=training.sampling_of(setup, numbers),
    )  # fmt: skip
    for pair in training.score_pairs(setup, numbers, scores):
        assert not equality.different(pair.got, pair.want), pair.where


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", setups.DTYPES)
def test_a_gradient_is_finite_and_reaches_every_part(dtype):
    """The backward pass that the equal log-probabilities came with is not an empty one."""
    setup = setups.setup(dtype)
    model = setup.model
    tokens, lengths = training.padded(setup, [0], setup.capacity + 1)
    masters = parameters.widen(model.params)
    sampling = training.sampling_of(setup, [0])
    (loss, _), slope = training.trained(
        masters, model.tables, tokens, lengths, sampling, model.cfg, model.numerics, False
    )
    assert np.isfinite(loss)
    leaves = parameters.by_path(slope)
    for path, leaf in leaves.items():
        assert np.isfinite(np.asarray(leaf)).all(), path
    moved = [path for path, leaf in leaves.items() if np.any(np.asarray(leaf))]
    assert any("experts" in path for path in moved)
    assert any("compressor" in path for path in moved)
