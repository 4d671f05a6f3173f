"""Replies by the executor: XLA's tokens, with drafts and without, through the same host loop."""

from __future__ import annotations

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch")

import ascend  # noqa: E402
from ascend import functions  # noqa: E402
from deepinfer_jax.planning import policies  # noqa: E402
from kernels_bridge.registry import KernelRefusedError  # noqa: E402
from tests.ascend import recorded  # noqa: E402


@functools.cache
def site(name: str, branches: str, kernels: str = "built"):
    return ascend.placed(recorded.model(name), "cpu", branches=branches, kernels=kernels)


def check(name: str, branches: str, drafts: int, kernels: str = "built") -> list:
    """Tokens equal; log-probabilities to 2e-4, of sums in another order and five digits kept."""
    policy = policies.Fixed(drafts) if drafts else policies.OFF
    prompts = recorded.prompts(recorded.COUNTS[name])
    place = site(name, branches, kernels)
    results = ascend.generate(place, prompts, speculative=policy, **recorded.OPTIONS)
    for result, wanted in zip(results, recorded.read(name), strict=True):
        assert list(result.tokens) == wanted["tokens"]
        np.testing.assert_allclose(result.logprobs, wanted["logprobs"], atol=2e-4)
    return results


def test_tokens_are_those_of_xla_with_drafts_and_what_the_host_reads(monkeypatch):
    """As on an NPU, where the host reads one predicate for each round, and what came of them."""
    reads = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or item(self))
    results = check("tiny", "select", drafts=2, kernels="torch")
    rounds = max(result.timing.rounds for result in results)
    assert any(result.timing.accepted for result in results)
    # Once before each look, for predicates of settings when these change, and no more.
    assert len(reads) <= rounds + 12


def test_twenty_replies_of_the_shipped_model_with_drafts():
    """As on a CPU by default: single operations of the compiler, one thread, branches read."""
    results = check("spark-tiny", "read", drafts=5)
    assert any(result.timing.accepted for result in results)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("branches", "drafts", "kernels"),
    [("read", 0, "built"), ("select", 0, "torch"), ("select", 5, "built"), ("read", 5, "torch")],
)
def test_twenty_replies_of_the_shipped_model(branches, drafts, kernels):
    check("spark-tiny", branches, drafts, kernels)


@pytest.mark.exhaustive
def test_tokens_without_drafts():
    check("tiny", "read", drafts=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", ["built", "torch"])
def test_stored_formats_with_all_their_roundings(kernels):
    """FP8, FP4, bfloat16 and packed caches."""
    check("stored", "read", drafts=2, kernels=kernels)


@pytest.mark.exhaustive
def test_every_name_that_may_be_replaced_is_called():
    """By the programs of one model or another."""
    called = set()
    for name in recorded.COUNTS:
        check(name, "read", drafts=2, kernels="torch")
        programs = vars(site(name, "read", "torch").run).values()
        called |= {each for executed in programs for each in executed.called}
    assert set(functions.NAMES) <= called


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


def test_a_name_that_no_program_calls_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"ops: no program calls 'mixs'; the names are .* mixes,"):
        ascend.placed(recorded.model("tiny"), "cpu", ops={"mixs": torch.add, "pin": torch.abs})


@pytest.mark.parametrize("threads", [0, True, 1.5])
def test_kernels_and_threads_that_nobody_knows_are_refused(threads):
    with pytest.raises(ValueError, match=r"threads must be a positive int or None, got"):
        ascend.placed(recorded.model("tiny"), "cpu", threads=threads)
    with pytest.raises(ValueError, match=r'kernels must be "built", "torch" or None, got \'xla\''):
        ascend.placed(recorded.model("tiny"), "cpu", kernels="xla")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(KernelRefusedError, match=r'torch_npu cannot be imported .* device="cpu"'):
        ascend.placed(recorded.model("tiny"), "npu")


def test_what_is_no_model_or_another_device_is_refused():
    with pytest.raises(TypeError, match="got 'spark-tiny': load it"):
        ascend.placed("spark-tiny", "cpu")
    with pytest.raises(ValueError, match="'cpu:1', but the model was placed on 'cpu': leave dev"):
        ascend.generate(site("tiny", "select"), ["a"], device="cpu:1")
