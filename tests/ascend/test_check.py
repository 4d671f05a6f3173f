"""The command for the first person with a chip: what it compares, says and returns."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from ascend import aclnn, cases, check
from kernels_bridge import catalogue, direct, handlers
from tests.ascend import stand_in


@pytest.mark.parametrize("case", [*cases.CASES, *cases.KERNELS], ids=lambda case: case.op.name)
def test_operands_fit_the_rule_of_their_operation(case):
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in case.operands()]
    assert case.op.abstract is not None
    made = case.op.abstract(*shapes, **case.static)
    exact = all(each.dtype.kind == "i" for each in jax.tree.leaves(made))
    assert (case.bound == cases.EXACT) == exact


def test_every_operation_that_needs_one_device_has_a_case():
    alone = {op.name for op in catalogue.OPS} - {"dispatch", "combine"}
    assert {case.op.name for case in cases.CASES} == alone


@pytest.mark.parametrize(
    ("got", "want", "off"),
    [
        (np.float32([1, 2]), np.float32([1, 2]), 0),
        (np.float32([1, 2.5]), np.float32([1, 2]), 0.25),
        (np.float32([1, np.nan]), np.float32([1, np.nan]), 0),
        (np.float32([1, np.nan]), np.float32([1, 2]), np.inf),
        (np.float32([-np.inf, 2]), np.float32([-np.inf, 2]), 0),
        (np.float32([np.inf, 2]), np.float32([-np.inf, 2]), np.inf),
        (np.float32([1, 2]), np.float64([1, 2]), np.inf),
        (np.float32([1, 2]), np.float32([[1, 2]]), np.inf),
        (np.int32([1, 3]), np.int32([1, 2]), np.inf),
        (np.int32([1, 2]), np.int32([1, 2]), 0),
        ((np.int32([1]), np.float32([3.0])), (np.int32([1]), np.float32([2.0])), 0.5),
        (np.float32([]), np.float32([]), 0),
    ],
)
def test_differences_are_relative_to_the_largest_number(got, want, off):
    assert cases.difference(got, want) == off


def test_replies_that_part_are_named():
    want = [[1, 2, 3], [4, 5]]
    assert check.compared(want, want) == (True, "2 replies, 5 tokens, equal")
    for got, place in (([[1, 2, 3], [4, 6]], 1), ([[1, 2, 3], [4]], 1), ([[1, 2, 3], []], 0)):
        said = f"reply 1 parts from XLA's at token {place} of 2"
        assert check.compared(got, want) == (False, said)


def test_a_device_that_adds_nothing_is_found(tmp_path):
    """The stand-in for CANN records aclnnAdd and computes nothing."""
    stub = stand_in.build(tmp_path)
    stub.reset()
    ((what, well, _),) = check.added(aclnn.Library([str(stub.base)]), stand_in.Host())
    assert (what, well) == ("add", False)
    assert "  alpha = scalar 9 2" in stub.log()


def test_the_command_prints_findings_and_returns_whether_all_is_well(monkeypatch, capsys):
    monkeypatch.setattr(check, "described", lambda device: f"{device}: torch 1")
    good, bad = [("one", True, "equal")], [("two", True, "equal"), ("three", False, "it differs")]
    monkeypatch.setattr(check, "PARTS", {"good": lambda _: good, "bad": lambda _: bad})
    assert check.main(["--device", "cpu", "good"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cpu: torch 1", "good", f"  {'one':<20} ok     equal", "all that was tried is well",
    ]  # fmt: skip
    assert check.main([]) == 1
    said = capsys.readouterr().out
    assert f"  {'three':<20} WRONG  it differs" in said
    assert said.startswith("npu: torch 1")
    assert said.endswith("1 wrong\n")
    with pytest.raises(SystemExit):
        check.main(["worse"])
    assert "no part is called 'worse': give some of good, bad" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "mend"), [("kernels", "operation's twin"), ("tokens", 'kernels="torch"')]
)
def test_without_a_compiler_it_says_so_in_a_line(monkeypatch, capsys, tmp_path, part, mend):
    pytest.importorskip("torch", reason="the executor is torch's")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module, name in ((direct, "load"), (handlers, "_register")):  # nothing was loaded before
        fresh = functools.cache(getattr(module, name).__wrapped__)
        monkeypatch.setattr(module, name, fresh)
    assert check.main(["--device", "cpu", part]) == 2
    said = capsys.readouterr()
    assert "well" not in said.out
    assert said.err.count("\n") == 1
    assert "install one (Debian: g++)" in said.err
    assert mend in said.err


def test_on_a_cpu_cann_is_left_out(monkeypatch):
    ((what, well, said),) = check.cann("cpu")
    assert (what, well) == ("CANN", None)
    assert "not on cpu" in said


def test_operations_run_by_torch_agree_with_their_twins():
    pytest.importorskip("torch", reason="the executor is torch's")
    found = list(check.operations("cpu"))
    assert [name for name, well, _ in found if not well] == []
    assert len(found) == len(cases.CASES)


@pytest.mark.exhaustive
def test_kernels_emulated_in_the_sizes_of_the_model_agree_with_their_twins():
    found = list(check.kernels("cpu"))
    assert [name for name, well, _ in found if not well] == []
    assert len(found) == len(cases.KERNELS)


@pytest.mark.exhaustive
def test_replies_by_torch_are_those_of_xla():
    pytest.importorskip("torch", reason="the executor is torch's")
    assert all(well for _, well, _ in check.tokens("cpu"))
