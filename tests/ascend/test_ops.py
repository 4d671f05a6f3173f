"""Operations on Ascend 950: the bridge's names, rules and twins; limits and refusals."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from ascend import implementations, limits, ops
from deepinfer_jax.numerics import forms
from kernels_bridge import building, catalogue, registry
from kernels_bridge.calling import call
from kernels_bridge.machine import COMPILER, Found, named
from kernels_bridge.registry import KernelRefusedError, select
from tests.ascend.emulated import OPERANDS

OPS = {
    op.name: op
    for op in registry.joined((*forms.OPS, *catalogue.OPS), implementations.IMPLS)
}  # fmt: skip
CHIP = named("ascend950", (Found("tilelang", "tilelang", "0.1.15"), Found("bisheng")))
CPU = named("cpu", (Found(COMPILER),))


def shapes(*given):
    return [jax.ShapeDtypeStruct(sizes, dtype) for dtype, *sizes in given]


def attention(heads=64, width=512, listed=512, dtype="bfloat16"):
    return shapes(
        (dtype, 5, heads, width), (dtype, 900, width), ("int32", 5, 128), ("int32", 5, listed),
        ("float32", heads),
    )  # fmt: skip


FITTING = {
    "norm_rope": (
        shapes(("bfloat16", 5, 512), ("float32", 512), ("float32", 5, 32), ("float32", 5, 32)),
        {"eps": 1e-20},
    ),
    "attend_rows": (attention(), {"scale": 512**-0.5}),
    "stream_mixes": (
        shapes(("float32", 5, 24), ("float32", 3), ("float32", 24)),
        {"streams": 4, "iterations": 20, "eps": 1e-6},
    ),
    "select_best": (shapes(("float32", 5, 4096), ("int32", 5)), {"k": 512}),
}  # fmt: skip


@pytest.mark.parametrize("name", FITTING)
def test_kernels_of_the_model_run_where_everything_is_there_and_are_asked_for(name):
    given, static = FITTING[name]
    assert select(OPS[name], CHIP, shapes=given, static=static, asked="tilelang")
    assert select(OPS[name], CPU, shapes=given, static=static, asked="emulated")
    assert name in ops.torch_ops()
    with pytest.raises(KernelRefusedError, match=r"tilelang can.*ask for it by name"):
        select(OPS[name], CHIP, shapes=given, static=static)
    with pytest.raises(KernelRefusedError, match="bisheng is not here: put bisheng of CANN"):
        select(OPS[name], named("ascend950"), asked="tilelang")


def test_rules_and_twins_are_those_of_the_bridge():
    assert set(ops.IMPLS) <= {op.name for op in catalogue.OPS}
    for op in catalogue.OPS:
        assert OPS[op.name].twin is op.twin
        assert OPS[op.name].abstract is op.abstract


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_without_a_lowering_there_is_a_refusal(name):
    with pytest.raises(KernelRefusedError, match="no back end for ascend950"):
        select(OPS[name], CHIP)


REFUSED = [
    ("attend_rows", "asc_attend", attention(48), {"scale": 1.0},
     "takes 64 heads, not 48: pad with heads"),
    ("attend_rows", "tilelang", attention(49), {"scale": 1.0}, "heads in multiples of 16, not 49"),
    ("attend_rows", "tilelang", attention(listed=4096), {"scale": 1.0},
     "bytes of the unified buffer, which has 221184: shorten the lists"),
    ("attend_rows", "tilelang", attention(dtype="float32"), {"scale": 1.0},
     "takes bfloat16, not float32"),
    ("attend_pages", "asc_attend",
     shapes(("bfloat16", 1, 1, 128, 512), ("uint8", 3, 4, 528), ("int32", 1, 1, 64),
            ("uint8", 3, 4, 288), ("int32", 1, 1, 64), ("float32", 128)), {"scale": 1.0},
     "takes 64 heads, not 128"),
    ("select_best", "asc_select", shapes(("float32", 5, 9000), ("int32", 5)), {"k": 5000},
     "k up to 4096, not 5000: select in parts"),
    ("index_logits", "asc_index",
     shapes(("float8_e4m3fn", 3, 4, 128), ("float8_e4m3fn", 9, 128), ("float32", 9),
            ("float32", 3, 4), ("int32", 3), ("int32", 3)), {},
     "no float8_e4m3fn vectors with a float32 scale: use index_logits_packed"),
    ("fp8_gemm", "asc_gemm",
     shapes(("float8_e4m3fn", 5, 96), ("float32", 5, 3), ("float8_e4m3fn", 8, 96),
            ("float32", 1, 3)), {"group": 32, "block": 32},
     r"two packed to an int16\), not float32.*in pairs, not 3"),
    ("norm_rope", "tilelang",
     shapes(("bfloat16", 5, 90), ("float32", 90), ("float32", 5, 8), ("float32", 5, 8)),
     {"eps": 1e-6}, "columns in multiples of 16, not 90: pad"),
    ("stream_mixes", "tilelang",
     shapes(("float32", 5, 99), ("float32", 3), ("float32", 99)),
     {"streams": 9, "iterations": 2, "eps": 1e-6}, "not 9 squared"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "asked", "given", "static", "said"), REFUSED)
def test_limits_are_checked_before_anything_runs(name, asked, given, static, said):
    OPS[name].abstract(*given, **static)
    with pytest.raises(KernelRefusedError, match=said):
        select(OPS[name], CHIP, shapes=given, static=static, asked=asked)


def test_a_plan_that_the_buffer_does_not_hold_is_named():
    assert limits.planner(1024, 8) == []
    (said,) = limits.planner(1025, 8)
    assert "not 32800: plan for at most 1024 requests" in said


def test_a_form_that_is_not_committed_is_named():
    given = shapes(("float32", 5, 40), ("int32", 5))
    with pytest.raises(KernelRefusedError, match="no form of select_best for M=5, N=40, k=7 is"):
        select(OPS["select_best"], CPU, shapes=given, static={"k": 7}, asked="emulated")


def test_without_tilelang_the_kernel_on_the_device_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tilelang", None)
    with pytest.raises(KernelRefusedError, match="norm_rope needs tilelang"):
        ops.torch_ops()["norm_rope"](None, None, None, None, eps=1e-6)


@pytest.mark.exhaustive  # builds a library of its own; test_emulator.py has the same kernels
def test_an_operation_runs_emulated_inside_a_program(tmp_path_factory, monkeypatch):
    """The whole way: rule, choice, operands, generated source; the gradient is the twin's."""
    try:
        building.find_compiler()
    except building.NoKernelsError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.getbasetemp() / "operations"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    bits, end = OPERANDS["select_best"]
    ask = functools.partial(call, OPS["select_best"], machine=CPU, k=5)
    x = bits.view(np.float32)
    got = jax.jit(functools.partial(ask, asked="emulated"))(x, end)
    np.testing.assert_array_equal(got, jax.jit(ask)(x, end))
