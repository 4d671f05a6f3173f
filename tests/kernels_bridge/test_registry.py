"""What runs on machines that nobody has: selection, explanations, refusals and their mends."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.cli import main
from deepinfer_jax.numerics import Numerics, forms
from kernels_bridge import catalogue, machine, registry
from kernels_bridge.machine import Found, Machine, named
from kernels_bridge.registry import Capability, Impl, KernelRefusedError, Need, Op, Policy, select

TORCH = Found("torch", "torch", "2.11.0+cu130")
HOPPER_MLA = Found("flash_mla", "flash-mla", "1.0.0+9241ae3")
PIP_MLA = Found("flash_mla", "deepinfer-flashmla", "1.0.0")
GEMM = Found("deep_gemm", "deepinfer-gemm", "2.8.2")
SELECT = Found("deep_select", "deep-select", "1.0.0")
EP = Found("deep_ep", "deepinfer-ep", "2.5.0")
OPS = {op.name: op for op in catalogue.OPS}
ANY_BITS = Policy(batch_invariant=False)


def hopper(*found: Found) -> Machine:
    return Machine("cuda", (9, 0), "NVIDIA H200", found=found)


def blackwell(*found: Found) -> Machine:
    return Machine("cuda", (10, 3), "NVIDIA B300", found=found)


# -- versions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.6", True), ("2.6.0+abc", True), ("2.10", True), ("3", True), ("2.5.9", False),
     ("2", False), ("", False), ("unknown", False)],
)  # fmt: skip
def test_versions_compare_as_releases(version, fits):
    need = Need("deep_gemm", at_least="2.6")
    said = need.refusal(hopper(Found("deep_gemm", "deep-gemm", version)))
    assert (said is None) == fits


def test_a_bound_from_above_and_the_package_count():
    need = Need("flash_mla", below="2", packages=("flash-mla",), mend="build it")
    assert need.refusal(hopper(HOPPER_MLA)) is None
    assert "deepinfer-flashmla" in (need.refusal(hopper(PIP_MLA)) or "")
    later = dataclasses.replace(HOPPER_MLA, version="2.0.1")
    assert (need.refusal(hopper(later)) or "").endswith("build it")


# -- the engine's forms ----------------------------------------------------------------------------

COMPILER = Found(machine.COMPILER)


@pytest.mark.parametrize(
    ("here", "form"),
    [
        (named("cpu"), "tiled"),
        (named("cpu", (COMPILER, TORCH)), "tiled"),
        (named("gpu"), "pallas"),
        (named("sm_90"), "pallas"),
        (blackwell(PIP_MLA, TORCH, GEMM), "pallas"),
    ],
)
def test_one_form_runs_everything(here, form):
    assert forms.choose(here) == form
    assert {select(op, here).name for op in forms.OPS} == {form}


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_where_no_form_is_invariant_only_promises_are_refused(platform):
    with pytest.raises(KernelRefusedError, match='rows="batched", which promises nothing'):
        forms.choose(named(platform))
    assert forms.choose(named(platform), "batched") == "batched"
    assert not forms.reasons(Numerics(rows="dense"), named(platform))


# Operations of every module of `numerics` that calls kernels.
HELD = {
    "cuda": {"row_product", "expert_product"},
    "elements": {"selection"},
    "experts": {"expert_product"},
    "full": {"image_attention"},
    "mixing": {"mixes"},
    "products": {"row_product"},
    "scores": {"attention", "index_scores"},
    "sums": {"row_sum"},
}
# `schedule` and `stored` hold no kernel.
CALLS = re.compile(
    r"^from (kernels_bridge import (ffi|cuda)|\S+\.pallas import (?!schedule))", re.M
)


def test_every_module_with_kernels_has_its_operations():
    folder = Path(forms.__file__).parent
    found = {path.stem for path in folder.glob("*.py") if CALLS.search(path.read_text("utf-8"))}
    assert found == set(HELD)
    assert set().union(*HELD.values()) == {op.name for op in forms.OPS}
    assert set(forms.PROMISING) == {"tiled", "ffi", "pallas", "cuda"}
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text("utf-8")
    assert all(f"| `{op.name}` |" in page for op in forms.OPS)


def test_the_form_of_handlers_is_asked_for_and_needs_a_compiler():
    assert forms.choose(named("cpu", (COMPILER,)), "ffi") == "ffi"
    with pytest.raises(KernelRefusedError, match=r"install one \(Debian: g\+\+\).*tiled can"):
        forms.choose(named("cpu"), "ffi")


def test_an_interpreter_runs_the_kernels_of_a_gpu():
    numerics = Numerics(rows="pallas", interpret=True)
    assert not forms.reasons(numerics, named("cpu"))
    assert forms.reasons(dataclasses.replace(numerics, interpret=False), named("cpu"))


# -- libraries -------------------------------------------------------------------------------------

CASES = [
    ("attend_rows", hopper(TORCH, HOPPER_MLA), "flash_mla", None),
    ("attend_rows", blackwell(TORCH, PIP_MLA), "flash_mla", None),
    ("attend_rows", hopper(TORCH), "flash_mla", r"flash_mla>=1.0 is not here: build and install"),
    ("attend_rows", hopper(HOPPER_MLA), "flash_mla", r"torch>=2.3 is not here: install torch"),
    ("attend_rows", Machine("cuda", (12, 0), found=(TORCH, PIP_MLA)), "flash_mla",
     r"compiled for sm_9x or sm_10x, this is cuda sm_120"),
    ("attend_rows", Machine("cuda", None, found=(TORCH, PIP_MLA)), "flash_mla", "compiled for"),
    ("attend_pages", hopper(TORCH, HOPPER_MLA), "flash_mla_sm90", None),
    ("attend_pages", hopper(TORCH, PIP_MLA), "flash_mla_sm90", r"\(deepinfer-flashmla\) is not"),
    ("attend_pages", blackwell(TORCH, PIP_MLA), "flash_mla_sm100", None),
    ("attend_pages", hopper(TORCH, PIP_MLA), "flash_mla_sm100", r"for sm_10x, this is cuda sm_90"),
    ("select_best", hopper(TORCH, SELECT), "deep_select", None),
    ("select_best", named("cpu", (TORCH, SELECT)), "deep_select", "for cuda, this is cpu"),
    ("fp8_gemm", hopper(TORCH, GEMM), "deep_gemm_sm90", "the policy forbids it"),
    ("dispatch", hopper(TORCH, EP), "deep_ep", "no compiled program can hold: use all_to_all"),
    ("fp8_gemm", hopper(TORCH, GEMM), "cublas", "ask for deep_gemm_sm90, deep_gemm_sm100, xla"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "here", "asked", "refusal"), CASES)
def test_a_kernel_that_was_asked_for_runs_or_says_why(op, here, asked, refusal):
    if refusal is None:
        assert select(OPS[op], here, asked=asked).name == asked
    else:
        with pytest.raises(KernelRefusedError, match=refusal):
            select(OPS[op], here, asked=asked)


def test_a_kernel_that_was_never_run_is_not_chosen_by_itself():
    here = hopper(TORCH, HOPPER_MLA, GEMM, SELECT)
    for op in catalogue.OPS:
        chosen = select(op, here, ANY_BITS)
        assert chosen.transport == "xla"
    with pytest.raises(KernelRefusedError, match="flash_mla can: ask for it by name"):
        select(OPS["attend_rows"], here)


def test_a_policy_for_graphs_refuses_what_allocates():
    with pytest.raises(KernelRefusedError, match="must not record"):
        select(OPS["attend_rows"], hopper(TORCH, HOPPER_MLA), Policy(True, True), asked="flash_mla")


def test_shapes_and_dtypes_decide_too():
    op, here = OPS["attend_rows"], hopper(TORCH, HOPPER_MLA)

    def shapes(heads, dtype, width=512):
        rest = ((7, 128), jnp.int32), ((7, 512), jnp.int32), ((heads,), jnp.float32)
        given = ((7, heads, width), dtype), ((900, width), dtype), *rest
        return [jax.ShapeDtypeStruct(*each) for each in given]

    static = {"scale": 0.5}
    assert select(op, here, shapes=shapes(64, jnp.bfloat16), static=static, asked="flash_mla")
    for given, said in (
        (shapes(48, jnp.bfloat16), "64 or 128 heads, not 48"),
        (shapes(64, jnp.float32), "takes bfloat16, not float32"),
        (shapes(64, jnp.bfloat16, 576), "vectors of 512 values, not 576"),
    ):
        with pytest.raises(KernelRefusedError, match=said):
            select(op, here, shapes=given, static=static, asked="flash_mla")


def test_the_first_that_can_is_taken_and_every_other_explained():
    def impl(name, **fields):
        fields = {"batch_invariant": True, **fields}
        return Impl(name, "ffi", Capability(**fields), name, seen="a machine")

    impls = (impl("gpu", platforms=("cuda",)), impl("loose", batch_invariant=False), impl("any"))
    op = Op("op", "an operation", None, None, impls)
    told = registry.explain(op, named("cpu"))
    assert told.chosen == select(op, named("cpu")).name == "any"
    assert [bool(each.reasons) for each in told.verdicts] == [True, True, False]
    assert registry.explain(op, named("cpu"), ANY_BITS).chosen == "loose"
    assert "gpu: no" in str(told)
    assert "any: runs" in str(told)


# -- what is here ----------------------------------------------------------------------------------


def test_machines_have_names():
    assert named("sm_100") == named("sm100") == Machine("cuda", (10, 0))
    assert str(hopper()) == "cuda sm_90 (NVIDIA H200)"
    assert named("h200", (TORCH,)) == Machine("cuda", (9, 0), "NVIDIA H200", found=(TORCH,))
    assert not named("ascend950").has_xla
    assumed = named("ascend950").find("torch")
    assert assumed is not None
    assert str(assumed) == "torch (assumed)"
    assert "only assumed" in str(Need("torch", "2.3").refusal(named("ascend950")))
    assert named("ascend950", (TORCH,)).find("torch") == TORCH
    for wrong in ("sm", "sm_9", "sm_x", "h300"):
        with pytest.raises(ValueError, match=f"unknown platform '{wrong}': give cpu"):
            named(wrong)


def test_this_machine_is_described():
    here = machine.probe()
    assert here.platform == jax.devices()[0].platform.replace("gpu", "cuda")
    assert here.devices == len(jax.local_devices())


def test_devices_are_read_as_far_as_they_tell():
    def device(**fields):
        client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
        return types.SimpleNamespace(platform="gpu", device_kind="a GPU", client=client, **fields)

    told, silent = device(compute_capability="9.0"), device()
    assert machine.described([told, told]) == Machine("cuda", (9, 0), "a GPU", 2)
    assert machine.described([silent]) == Machine("cuda", None, "a GPU")
    silent.client.platform_version = "rocm 60300"
    assert machine.described([silent]).platform == "rocm"
    assert forms.choose(machine.described([told])) == "pallas"
    told.platform = "another"
    assert machine.described([told]).platform == "another"


def test_a_library_is_found_without_being_imported(tmp_path, monkeypatch):
    (tmp_path / "flash_mla.py").write_text("raise SystemExit('imported')\n")
    info = tmp_path / "deepinfer_flashmla-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepinfer-flashmla\nVersion: 1.2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert machine.find_library("flash_mla") == Found("flash_mla", "deepinfer-flashmla", "1.2")
    assert machine.find_library("deep_ep_of_nobody") is None


def test_neither_torch_nor_a_library_is_imported_for_what_needs_none():
    text = (
        "import sys\n"
        "for name in ('torch', 'flash_mla', 'deep_gemm', 'deep_select', 'deep_ep'):\n"
        "    sys.modules[name] = None\n"  # an import of it fails
        "from kernels_bridge import catalogue, dlpack, machine, registry\n"
        "from deepinfer_jax.numerics import forms\n"
        "for op in (*forms.OPS, *catalogue.OPS):\n"
        "    assert str(registry.explain(op, machine.named('sm_90')))\n"
        "try:\n"
        "    dlpack.import_torch()\n"
        "except registry.KernelRefusedError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "needed here: pip install '.[kernels]'" in done.stdout


def test_the_example_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text("utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert "attend_rows: nothing" in capsys.readouterr().out


def test_the_command_prints_what_runs_and_why(capsys):
    assert main(["kernels", "row_product", "fp8_gemm", "--platform", "sm_90"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("cuda sm_90; with ")
    assert "row_product: pallas" in said
    assert "tiled: no, XLA dots" in said
    assert "because it is for cpu, this is cuda" in said
    assert "fp8_gemm: nothing" in said
    assert "of 2 operations 1 run, 0 if asked for by name, 1 do not\n--any-bits tells" in said
    assert main(["kernels", "fp8_gemm", "--any-bits", "--platform", "cpu"]) == 0
    assert "fp8_gemm: xla" in capsys.readouterr().out
    assert main(["kernels", "matmul"]) == 2
    assert main(["kernels", "--platform", "h300"]) == 2
    said = capsys.readouterr().err
    assert "no operation is called 'matmul'" in said
    assert "unknown platform 'h300'" in said
