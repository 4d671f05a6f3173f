"""The operations that `numerics` runs, as entries of the registry, and the form that runs here.

A form (`Numerics.rows`) is an implementation of every one of them: their bits belong together, so
one name is chosen for all. Which one, and why each other one is not, is `kernels_bridge.registry`'s
to say (docs/kernels.md "What runs where"); `deepinfer-jax kernels` prints it.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from deepinfer_jax.numerics.settings import Form, Numerics
from kernels_bridge.building import COMPILERS, CUDA, CUDA_ARCHITECTURE
from kernels_bridge.machine import COMPILER, CUDA_COMPILER, Machine, named
from kernels_bridge.registry import (
    Capability,
    Impl,
    KernelRefusedError,
    Need,
    Op,
    Policy,
    Transport,
    explain,
    refusals,
    select,
)

_DTYPES = ("bfloat16", "float32")
_NEEDS_COMPILER = Need(
    COMPILER,
    mend="the kernels are built by a C++ compiler, and none of "
    f"{', '.join(COMPILERS)} is on the path: install one (Debian: g++)",
)
_NEEDS_NVCC = Need(
    CUDA_COMPILER, mend=f"the kernels are built by {CUDA.needed[0]}: {CUDA.needed[1]}"
)
_CAPABLE: dict[Form, Capability] = {
    "tiled": Capability(("cpu",), (), _DTYPES, batch_invariant=True, graph_safe=True),
    "ffi": Capability(("cpu",), (), _DTYPES, (_NEEDS_COMPILER,), True, graph_safe=True),
    "pallas": Capability(("cuda",), (), _DTYPES, batch_invariant=True, graph_safe=True),
    "cuda": Capability(
        ("cuda",), (CUDA_ARCHITECTURE,), _DTYPES, (_NEEDS_NVCC,), True, graph_safe=True
    ),
    "batched": Capability((), (), _DTYPES, graph_safe=True),
    "dense": Capability((), (), _DTYPES, graph_safe=True),
}
# The others promise nothing about bits.
PROMISING = tuple(form for form, can in _CAPABLE.items() if can.batch_invariant)
_SEEN = {
    "tiled": "x86 CPUs", "ffi": "x86 CPUs with AVX2", "pallas": "an H200 (sm_90)",
    "cuda": "an H200 (sm_90)", "batched": "a CPU and an H200", "dense": "a CPU and an H200",
}  # fmt: skip
_BY_NAME = {
    "ffi": 'other bits than "tiled", and a build at first use',
    "cuda": 'other bits than "pallas", and a build at first use',
    "batched": "it promises nothing about bits",
    "dense": "it promises nothing about bits",
}
_PLAIN, _SEQUENCES = "plain XLA", "plain XLA on whole sequences"


def _impl(form: Form, what: str, transport: Transport) -> Impl:
    by_name = _BY_NAME.get(form, "")
    return Impl(form, transport, _CAPABLE[form], what, seen=_SEEN[form], by_name=by_name)


def _op(
    name: str, what: str, tiled: str, ffi: str, pallas: str, cuda: str = "", *,
    handler: bool = True,
) -> Op:  # fmt: skip
    """An operation by what runs for each form.

    Without a handler "ffi" runs XLA's operations; cuda: what is no kernel of "pallas" there.
    """
    impls = (
        _impl("tiled", tiled, "xla"),
        _impl("pallas", pallas, "pallas"),
        _impl("cuda", cuda or pallas, "ffi" if cuda else "pallas"),
        _impl("ffi", ffi, "ffi" if handler else "xla"),
        _impl("batched", _PLAIN, "xla"),
        _impl("dense", _SEQUENCES, "xla"),
    )
    return Op(name, what, None, None, impls)


OPS: tuple[Op, ...] = (
    _op("row_sum", "sums over the last axis, norms and log-softmax",
        "XLA, lanes and then the lanes",
        "C++ handlers `rms_norm` and `normed`, of other sums XLA, lanes and then the lanes",
        "Pallas-Triton kernel for every row"),
    _op("row_product", "rows times weights",
        "XLA dots on whole tiles of a few heights", "C++ handlers `product`, `route`, `shared`",
        "Pallas-Triton kernels, one order for a (K, N), weights decoded tile by tile",
        "CUDA handler `product` where weights are packed, else as pallas"),
    _op("expert_product", "rows sorted by expert times the weights of their experts",
        "XLA dots on tiles of one expert, one after the other",
        "C++ handler `experts`, or `product` of decoded tiles where weights are packed",
        "Pallas-Triton kernel over tiles of one expert, weights decoded tile by tile",
        "CUDA handler `experts` where weights are packed, else as pallas"),
    _op("attention", "one query row over its slots, with a sink",
        "XLA, row after row", "C++ handlers `attend` and `attend_cache`",
        "Pallas-Triton kernel, over a cache as it is stored too"),
    _op("image_attention", "every row of an image over all of its rows",
        "XLA, tiles of rows and blocks of keys", "XLA, tiles of rows and blocks of keys",
        "Pallas-Triton kernel", handler=False),
    _op("index_scores", "scores of the indexer", "XLA, row after row",
        "C++ handlers `index_scores` and `index_cache`",
        "Pallas-Triton kernel, over a cache as it is stored too"),
    _op("mixes", "the mixes of hyper-connections, normalised in turns",
        "XLA, short sums in index order", "C++ handler `mix`, sixteen rows at once",
        "Pallas-Triton kernel, all turns in one"),
    _op("selection", "the best columns of many",
        "XLA's top_k", "C++ handler `best`", "Pallas-Triton kernel that counts digits"),
)  # fmt: skip


def machine_of(numerics: Numerics, machine: Machine) -> Machine:
    """`machine` as `numerics` use it: with an interpreter of Pallas where they ask for one."""
    return dataclasses.replace(machine, interpreter=True) if numerics.interpret else machine


def choose(machine: Machine, asked: Form | None = None) -> Form:
    """The form that runs on `machine`: `asked`, or the first that keeps the promise there.

    Raises KernelRefusedError, a ValueError, where it cannot run, or none can.
    """
    policy = Policy(batch_invariant=asked is None or asked in PROMISING)
    if asked is None and explain(OPS[0], machine).chosen is None:
        raise KernelRefusedError(
            f"no form of numerics is invariant on back end {machine.platform!r}, only on cpu and "
            'gpu: pass Numerics with rows="batched", which promises nothing about bits'
        )
    names = {select(op, machine, policy, asked=asked).name for op in OPS}
    if len(names) > 1:
        raise KernelRefusedError(f"no one form runs every operation on {machine}: {sorted(names)}")
    return cast(Form, names.pop())


def reasons(numerics: Numerics, machine: Machine) -> list[str]:
    """Why the form of `numerics` cannot run on `machine`; empty where it can."""
    policy = Policy(batch_invariant=numerics.rows in PROMISING)
    here, found = machine_of(numerics, machine), []
    for op in OPS:
        said = refusals(op.impl(numerics.rows), here, policy, asked=True)
        found += [each for each in said if each not in found]
    return found


def mend(machine: Machine) -> str:
    """What to write instead of a form that cannot run on `machine`."""
    try:
        return f'use rows="{choose(machine)}"'
    except KernelRefusedError:
        return 'use rows="batched", which promises nothing about bits'


def rows_for(backend: str) -> Form:
    """The invariant form of a back end, named as `jax.default_backend()` names it.

    Raises ValueError where there is none.
    """
    return choose(named(backend))
