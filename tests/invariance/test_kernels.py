"""The promise with C++ kernels (`rows="ffi"`), on the model with every role."""

from __future__ import annotations

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import determinism, load, scoring
from deepinfer_jax.determinism import reference
from deepinfer_jax.determinism.equality import bits
from kernels_bridge.building import NoKernelsError, find_compiler
from tests import every_role, tiny_model
from tests.invariance import setups

try:
    find_compiler()
except NoKernelsError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def model():
    return load(tiny_model.folder(), rows="ffi")


@pytest.mark.exhaustive
def test_scores_are_the_samplers_bits_and_close_to_those_of_xla(model):
    """Sampler and scorer read their keys in different places: a cache, and the call itself."""
    prompts = [{"tokens": [(13 * i) % 2048 for i in range(n)], "id": n} for n in (1, 7, 33)]
    replies = di.generate(model, prompts, max_tokens=9, seed=4, batch_size=1)
    sequences = [tuple(reply.prompt) + reply.tokens for reply in replies]
    other = scoring.score_sequences(tiny_model.model(), sequences)
    for reply, own, xla in zip(
        replies, scoring.score_sequences(model, sequences), other, strict=True
    ):
        sampled = np.float32(reply.logprobs)
        np.testing.assert_array_equal(bits(own.logprobs[reply.prompt_tokens - 1 :]), bits(sampled))
        np.testing.assert_allclose(own.logprobs, xla.logprobs, atol=0.1)
    assert {reply.numerics for reply in replies} == {model.numerics.fingerprint()}
    assert model.numerics.fingerprint() != tiny_model.model().numerics.fingerprint()


@pytest.fixture(scope="module", params=setups.DTYPES)
def setup(request):
    model = every_role.model(request.param, "ffi")
    return reference.make_setup(model, tokens=setups.TOKENS, seed=1, count=setups.COUNT)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("check", determinism.CHECKS, ids=lambda check: check.name)
def test_nothing_changes_a_bit(check, setup):
    finding = determinism.run_check(check, setup)
    assert finding.first is None
    assert finding.differing == 0
