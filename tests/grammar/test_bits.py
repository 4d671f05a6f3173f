"""Packed masks on the device."""

import jax
import numpy as np
import pytest

from deepinfer_jax import grammar

EXPAND = jax.jit(grammar.expand, static_argnums=1)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_expand_against_numpy(dtype):
    vocab = 75
    packed = np.random.default_rng(3).integers(0, 2**32, (2, 5, 3), np.uint32)
    wanted = np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")[..., :vocab]
    got = EXPAND(packed.view(dtype), vocab)
    assert got.dtype == bool
    np.testing.assert_array_equal(got, wanted.astype(bool))


def test_what_is_packed_is_expanded_again():
    allowed = np.random.default_rng(3).random(75) < 0.5
    np.testing.assert_array_equal(EXPAND(grammar.pack(allowed), 75), allowed)
    assert grammar.pack(np.ones(75, bool)).tolist() == [2**32 - 1, 2**32 - 1, 2**11 - 1]


def test_expand_refuses_what_is_no_mask():
    with pytest.raises(TypeError, match="packed must be int32 or uint32, got float32"):
        grammar.expand(np.zeros((1, 3), np.float32), 75)
    with pytest.raises(ValueError, match=r"must end in 3 words for vocab=75, got shape \(1, 4\)"):
        grammar.expand(np.zeros((1, 4), np.int32), 75)
