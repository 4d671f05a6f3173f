"""`python -m ascend.check --device npu`: what the first person with a chip should run.

Four parts: operations of the bridge against their twins, this project's kernels against the same,
CANN's operations through the binding, and replies of spark-tiny against XLA's. `--device cpu` runs
it on a CPU, with torch's CPU, an emulator for the kernels and without CANN; docs/ascend.md 5 shows
what it prints.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ascend import aclnn, cases, ops
from ascend.aclnn.errors import CallFailedError, OperandRefusedError, UnavailableError
from deepinfer_jax import generation, loading
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.planning import Fixed
from kernels_bridge.building import NoKernelsError
from kernels_bridge.registry import KernelRefusedError

PROMPTS = ("Count from one to ten.", "What is a tensor?", "Write a short poem.", "2 + 3 =")
TOKENS, DRAFTS = 24, 3
# What was looked at, whether it is well (None: it cannot be looked at here), what was seen.
Finding = tuple[str, bool | None, str]
_SHOWN = {True: "ok", False: "WRONG", None: "--"}


def operations(device: str) -> Iterator[Finding]:
    """Every operation of `cases` run by torch on `device`, against its twin on XLA's CPU."""
    from ascend.executor import Executed, fetch

    for case in cases.CASES:
        yield _against_twin(case, lambda run, given: fetch(Executed(run, device=device)(*given)))


def kernels(device: str) -> Iterator[Finding]:
    """This project's own kernels: compiled for the chip on an NPU, emulated on a CPU."""
    chip = device.startswith("npu")
    for case in cases.KERNELS:
        name = "tilelang" if chip else "emulated"
        impl = next(each for each in ops.IMPLS[case.op.name] if each.name == name)
        assert impl.run is not None, f"{name} of {case.op.name} is called through numerics"
        run = functools.partial(impl.run, **case.static)

        def launched(_: Any, given: Any, run: Callable[..., Any] = run) -> Any:
            return _on_torch(run, given, device) if chip else jax.jit(run)(*given)

        yield _against_twin(case, launched)


def _on_torch(run: Callable[..., Any], operands: Any, device: str) -> Any:
    """run(*operands) with tensors of the device, its results on the host."""
    from ascend.executor import fetch, place

    return fetch(run(*place(operands, device)))


def _against_twin(case: cases.Case, run: Callable[[Any, Any], Any]) -> Finding:
    """What `run` makes of a jitted twin and its operands, against XLA's CPU."""
    operands = case.operands()
    twin = jax.jit(functools.partial(_twin, case))
    want = jax.tree.map(np.asarray, twin(*operands))
    try:
        got = run(twin, operands)
    except NoKernelsError:  # nothing was computed, nor will be
        raise
    except Exception as error:  # of whatever kind: the others are still of interest
        return case.op.name, False, f"{type(error).__name__}: {error}"
    off = cases.difference(got, want)
    said = "equal" if not off else f"largest difference {off:.1e}, allowed {case.bound:.1e}"
    return case.op.name, off <= case.bound, said


def _twin(case: cases.Case, *operands: Any) -> Any:
    assert case.op.twin is not None, f"{case.op.name} is called through numerics"
    return case.op.twin(*operands, **case.static)


def cann(device: str) -> Iterator[Finding]:
    """The smallest call of CANN, and which of the table's operations are installed."""
    if not device.startswith("npu"):
        yield "CANN", None, f"not on {device}; tests/ascend/test_aclnn.py has a stand-in for it"
        return
    try:
        library = aclnn.Library(aclnn.search_path(os.environ))
        yield from added(library, aclnn.npu())
    except (UnavailableError, CallFailedError, OperandRefusedError) as error:
        yield "add", False, str(error)
        return
    there = [op.name for op in aclnn.OPERATIONS if library.has(op.symbol)]
    chip = [op.name for op in aclnn.OPERATIONS if "ascend950" in op.chips]
    missing = [name for name in chip if name not in there]
    yield "installed", True, ", ".join(there)
    yield "not installed", True, ", ".join(missing) or "none"


def added(library: aclnn.Library, device: Any) -> Iterator[Finding]:
    """aclnnAdd through the binding: x + 2 x is 3 x in every bit."""
    x = device.empty((3, 5), "float32")
    x[...] = 0.25
    y = aclnn.bind(aclnn.BY_NAME["add"], library, device)(self=x, other=x, alpha=2)
    yield "add", bool((y == 0.75).all()), "x + 2 x"


def tokens(device: str) -> Iterator[Finding]:
    """Replies of spark-tiny in float32, with drafts, by torch on `device` and by XLA."""
    from ascend import serving

    model = loading.load("spark-tiny", numerics=Numerics.fp32(), max_length=512)
    site = serving.placed(model, device)
    for name, options in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 1.0})):
        asked = {"max_tokens": TOKENS, "speculative": Fixed(DRAFTS), **options}
        want = generation.generate(model, PROMPTS, **asked)
        got = serving.generate(site, PROMPTS, **asked)
        yield name, *compared([each.tokens for each in got], [each.tokens for each in want])


def compared(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> tuple[bool, str]:
    """Whether all tokens are equal, and where they part."""
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        if list(one) != list(other):
            place = next(
                (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)),
            )
            return False, f"reply {number} parts from XLA's at token {place} of {len(other)}"
    return True, f"{len(want)} replies, {sum(map(len, want))} tokens, equal"


PARTS: dict[str, Callable[[str], Iterator[Finding]]] = {
    "operations": operations,
    "kernels": kernels,
    "cann": cann,
    "tokens": tokens,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns 0 where all is well, 1 where something is not, 2 without a device or,
    on a CPU, without a compiler for a part that needs one.
    """
    parser = argparse.ArgumentParser(prog="python -m ascend.check", description=__doc__)
    parser.add_argument("part", nargs="*", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--device", default="npu", help='torch\'s: "npu" (default) or "cpu"')
    args = parser.parse_args(arguments)
    strange = [name for name in args.part if name not in PARTS]
    if strange:
        parser.error(f"no part is called {strange[0]!r}: give some of {', '.join(PARTS)}")
    try:
        print(f"{described(args.device)}", flush=True)
    except (KernelRefusedError, UnavailableError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        wrong = sum(_reported(name, args.device) for name in args.part or PARTS)
    except NoKernelsError as error:
        print(error, file=sys.stderr)
        return 2
    print("all that was tried is well" if not wrong else f"{wrong} wrong")
    return int(wrong > 0)


def _reported(part: str, device: str) -> int:
    """Prints the findings of a part; how many are not well."""
    print(part, flush=True)
    wrong = 0
    for what, well, seen in PARTS[part](device):
        wrong += well is False
        print(f"  {what:<20} {_SHOWN[well]:<6} {seen}", flush=True)
    return wrong


def described(device: str) -> str:
    """The device and the versions; UnavailableError where torch cannot be imported,
    KernelRefusedError where the device cannot be had.
    """
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise UnavailableError(
            f"torch cannot be imported ({error}): install it, for an NPU of the release that "
            "torch-npu's notes name, behind CANN"
        ) from error
    from ascend.serving import torch_device

    where = torch_device(device)
    packages = ("torch", "torch-npu", "jax", "deepinfer-jax")
    found = [f"{name} {version}" for name in packages if (version := _version(name))]
    return f"{where}: {', '.join(found)}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
