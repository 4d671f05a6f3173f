"""What an Ascend 950 would run, as the command prints it."""

from __future__ import annotations

import pytest

from ascend import implementations
from deepinfer_jax.cli import main
from deepinfer_jax.numerics import forms
from kernels_bridge import catalogue, registry
from kernels_bridge.machine import named

OPS = registry.joined((*forms.OPS, *catalogue.OPS), implementations.IMPLS)
ANY_BITS = registry.Policy(batch_invariant=False)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_nothing_runs_by_itself_and_every_reason_is_given(op):
    """No XLA, nothing that was run on a chip: what there is has to be asked for by name."""
    told = registry.explain(op, named("ascend950"), ANY_BITS)
    assert told.chosen is None
    assert all(verdict.reasons for verdict in told.verdicts)
    assert told.able == (() if op.name in ("dispatch", "combine") else ("torch",))
    for each in told.able:
        assert registry.select(op, named("ascend950"), ANY_BITS, asked=each).transport == "executor"


@pytest.mark.parametrize("platform", ["cpu", "sm_90", "b200"])
def test_elsewhere_what_runs_is_as_it_was(platform):
    here = named(platform)
    for op, plain in zip(OPS, (*forms.OPS, *catalogue.OPS), strict=True):
        told = registry.explain(op, here, ANY_BITS)
        assert told.chosen == registry.explain(plain, here, ANY_BITS).chosen
        assert "torch" not in told.able


def test_the_command_names_what_can_be_asked_for(capsys):
    assert main(["kernels", "attention", "combine", "--platform", "ascend950", "--any-bits"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ascend950; with ")
    assert "attention: nothing, by name torch (one query row" in said
    assert "because XLA runs it, and has no back end for ascend950" in said
    assert "cann_sparse_attn_sharedkv: no, CANN's aclnnSparseAttnSharedkv" in said
    assert "combine: nothing (" in said
    assert said.endswith("of 2 operations 0 run, 1 if asked for by name, 1 do not\n")
    assert main(["kernels", "attention", "--platform", "ascend950"]) == 0
    assert "attention: nothing (one" in capsys.readouterr().out


def test_implementations_for_no_operation_are_refused():
    with pytest.raises(ValueError, match="no operation is called matmul"):
        registry.joined(OPS, {"matmul": ()})
