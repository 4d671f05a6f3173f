"""Replies by the executor: XLA's tokens, with drafts and without, through the same host loop."""

from __future__ import annotations

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch")

import ascend  # noqa: E402
from deepinfer_jax.planning import policies  # noqa: E402
from kernels_bridge.registry import KernelRefusedError  # noqa: E402
from tests.ascend import recorded  # noqa: E402


@functools.cache
def site(name: str, branches: str):
    return ascend.placed(recorded.model(name), "cpu", branches=branches)


def check(name: str, branches: str, drafts: int) -> list:
    """Tokens equal; log-probabilities to 2e-4, of sums in another order and five digits kept."""
    policy = policies.Fixed(drafts) if drafts else policies.OFF
    prompts = recorded.prompts(recorded.COUNTS[name])
    results = ascend.generate(site(name, branches), prompts, speculative=policy, **recorded.OPTIONS)
    for result, wanted in zip(results, recorded.read(name), strict=True):
        assert list(result.tokens) == wanted["tokens"]
        np.testing.assert_allclose(result.logprobs, wanted["logprobs"], atol=2e-4)
    return results


def test_tokens_are_those_of_xla_with_drafts_and_what_the_host_reads(monkeypatch):
    """As on an NPU, where the host reads one predicate for each round, and what came of them."""
    reads = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or item(self))
    results = check("tiny", "select", drafts=2)
    rounds = max(result.timing.rounds for result in results)
    assert any(result.timing.accepted for result in results)
    # Once before each look, for predicates of settings when these change, and no more.
    assert len(reads) <= rounds + 12


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("branches", ["read", "select"])
def test_twenty_replies_of_the_shipped_model(branches, drafts):
    check("spark-tiny", branches, drafts)


@pytest.mark.exhaustive
def test_tokens_without_drafts():
    check("tiny", "read", drafts=0)


@pytest.mark.exhaustive
def test_stored_formats_with_all_their_roundings():
    """FP8, FP4, bfloat16 and packed caches."""
    check("stored", "read", drafts=2)


@pytest.mark.exhaustive
def test_edits_and_forced_tokens():
    """What a reply is forced to say has the log-probabilities that it had when it was drawn."""
    wanted = recorded.read("tiny")[:2]
    prompts = [
        {**prompt, "temperature": 1.0, "golden_token_ids": tuple(reply["tokens"])}
        for prompt, reply in zip(recorded.prompts(2), wanted, strict=True)
    ]
    results = ascend.generate(site("tiny", "read"), prompts, **recorded.OPTIONS)
    for result, reply in zip(results, wanted, strict=True):
        assert list(result.tokens) == reply["tokens"]
        np.testing.assert_allclose(result.logprobs, reply["logprobs"], atol=2e-4)


def test_a_device_or_a_way_of_branches_that_nobody_knows_is_refused():
    for device in ("gpu", "cuda:0", 3):
        with pytest.raises(ValueError, match=r'device must be "npu".* or "cpu", got'):
            ascend.generate(recorded.model("tiny"), ["2 + 3 ="], device=device)
    with pytest.raises(ValueError, match=r"branches must be .* got 'both'"):
        ascend.placed(recorded.model("tiny"), "cpu", branches="both")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(KernelRefusedError, match=r'torch_npu cannot be imported .* device="cpu"'):
        ascend.placed(recorded.model("tiny"), "npu")


def test_what_is_no_model_or_another_device_is_refused():
    with pytest.raises(TypeError, match="got 'spark-tiny': load it"):
        ascend.placed("spark-tiny", "cpu")
    with pytest.raises(ValueError, match="'cpu:1', but the model was placed on 'cpu': leave dev"):
        ascend.generate(site("tiny", "select"), ["a"], device="cpu:1")
