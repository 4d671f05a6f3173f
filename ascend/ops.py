"""Operations of `kernels_bridge` on Ascend 950: our kernels, and the published engine's.

Names, rules for shapes and twins are the bridge's; here is only who else runs them. `tilelang` is a
kernel of `ascend.kernels` on an NPU, never run; `emulated` is the same generated source on a CPU,
for tests; names in `asc_` are kernels that the published engine has for the chip, listed with
their limits. `torch_ops` are the first of these, for the executor
(docs/ascend_kernels.md 4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ascend import limits
from ascend.kernels import ATTEND_ROWS, NORM_ROPE, SELECT_BEST, STREAM_MIXES, Kernel
from ascend.launching import Emulated, Launcher, OnDevice, tuned
from ascend.lower import RELEASE
from kernels_bridge.machine import ASCEND, COMPILER, NPU_COMPILER
from kernels_bridge.registry import Capability, Impl, Need

_NPU = Need(
    "torch_npu",
    mend="install CANN, then torch-npu of the release that its notes name, both by hand",
)
_TILELANG = Need("tilelang", at_least=RELEASE, mend=f"install tilelang=={RELEASE}")
_BISHENG = Need(NPU_COMPILER, mend="put bisheng of CANN 9.2 or later on the path")
_CPP = Need(COMPILER, mend="install a C++ compiler (Debian: g++)")


# -- operands of our kernels -----------------------------------------------------------------------


def _norm_rope(by: Launcher, x, weight, cos, sin, *, eps: float):
    return by.launch(NORM_ROPE, x, weight, cos, sin, eps=eps)


def _attend_rows(by: Launcher, q, rows, ids, extra, sink, *, scale: float):
    return by.launch(ATTEND_ROWS, q, rows, by.joined(ids, extra), sink, scale=scale)


def _stream_mixes(by: Launcher, raw, scale, base, *, streams: int, iterations: int, eps: float):
    static = {"streams": streams, "iterations": iterations, "eps": eps}
    pre, post, comb = by.launch(STREAM_MIXES, raw, scale, base, **static)
    return pre, post, comb.reshape(-1, streams, streams)


def _select_best(by: Launcher, x, end, *, k: int):
    return by.launch(SELECT_BEST, by.bits(x), end, k=k)


_RUN: dict[str, Callable[..., Any]] = {
    "norm_rope": _norm_rope, "attend_rows": _attend_rows, "stream_mixes": _stream_mixes,
    "select_best": _select_best,
}  # fmt: skip


# -- what they demand ------------------------------------------------------------------------------


def _norm_rope_accepts(x, weight, cos, sin, **static: Any) -> list[str]:
    width, angles = x.shape[1], cos.shape[1]
    need = 4 * width + 2 * width + 8 * angles + 4 * limits.LANE
    return [
        *limits.rows(x.shape[0]), *limits.whole("columns", width), *limits.buffer(need),
    ]  # fmt: skip


def _attend_rows_accepts(q, rows, ids, extra, sink, **static: Any) -> list[str]:
    group, keys = tuned(ATTEND_ROWS)["group"], tuned(ATTEND_ROWS)["keys"]
    (t, heads, width), listed = q.shape, ids.shape[1] + extra.shape[1]
    need = group * (width * (2 + 4 + 2) + 4 * (listed + 4)) + keys * width * 2 + 4 * listed
    return [
        *limits.rows(t * rows.shape[0] * listed), *limits.whole("heads", heads, group),
        *limits.whole("vectors", width), *limits.buffer(need),
    ]  # fmt: skip


def _stream_mixes_accepts(raw, scale, base, *, streams: int, **static: Any) -> list[str]:
    said = limits.rows(raw.shape[0])
    if streams > 8:
        said.append(f"it keeps up to 8 x 8 numbers of a row in registers, not {streams} squared")
    return said


def _select_best_accepts(x, end, *, k: int, **static: Any) -> list[str]:
    return limits.rows(x.shape[0] * x.shape[1])


_ACCEPTS: dict[str, Callable[..., list[str]]] = {
    "norm_rope": _norm_rope_accepts, "attend_rows": _attend_rows_accepts,
    "stream_mixes": _stream_mixes_accepts, "select_best": _select_best_accepts,
}  # fmt: skip


class _Asking(Emulated):
    """Launches nothing: says of shapes whether a committed form fits."""

    def launch(self, kernel: Kernel, *operands: Any, **static: Any) -> Any:
        raise _AnsweredError(self.form(kernel, operands, static))


class _AnsweredError(Exception):
    """Carries the answer out of the tracing of an operation."""


def _emulated_accepts(name: str, *shapes: Any, **static: Any) -> list[str]:
    try:
        jax.eval_shape(functools.partial(_RUN[name], _Asking(), **static), *shapes)
    except _AnsweredError as answered:
        (form,) = answered.args
        return [form] if isinstance(form, str) else []
    raise AssertionError(f"{name} launches nothing")


# -- implementations -------------------------------------------------------------------------------

_DTYPES = {
    "norm_rope": ("bfloat16",), "attend_rows": ("bfloat16",), "stream_mixes": ("float32",),
    "select_best": ("bfloat16", "float32"),
}  # fmt: skip
_WHAT = {
    "norm_rope": "a row in the unified buffer, sums in the twin's order",
    "attend_rows": "16 heads of a query at once, keys gathered by SIMT and never split",
    "stream_mixes": "a row in the registers of a thread",
    "select_best": "four bits of a key a pass, counted in integers",
}


def _ours(name: str) -> tuple[Impl, Impl]:
    """The kernel of our own on the chip, and its generated source on a CPU."""
    run, needs = _RUN[name], (_NPU, _TILELANG, _BISHENG)
    chip = Capability((ASCEND,), dtypes=_DTYPES[name], needs=needs, batch_invariant=True)
    cpu = Capability(("cpu",), dtypes=_DTYPES[name], needs=(_CPP,), batch_invariant=True)
    return (
        Impl(
            "tilelang", "executor", chip, f"TileLang, vector cores: {_WHAT[name]}",
            functools.partial(run, OnDevice()), _ACCEPTS[name],
        ),
        Impl(
            "emulated", "ffi", cpu, "the AscendC of tilelang, emulated",
            functools.partial(run, Emulated()), functools.partial(_emulated_accepts, name),
            seen="a CPU", by_name="it is slow, and there to test the kernel",
        ),
    )  # fmt: skip


_UNBOUND = (
    "the published engine builds it with bisheng for torch tensors, and nothing here calls it: ask "
    "for another, or let the executor run the twin"
)


def _published(name: str, what: str, accepts: Callable[..., list[str]]) -> Impl:
    can = Capability((ASCEND,), needs=(_NPU,))
    return Impl(f"asc_{name}", "executor", can, what, accepts=accepts, never=_UNBOUND)


def _of_pages(q, *others: Any, **static: Any) -> list[str]:
    return limits.heads(q.shape[2])


def _of_rows(q, *others: Any, **static: Any) -> list[str]:
    return limits.heads(q.shape[1])


def _of_scores(q, *others: Any, **static: Any) -> list[str]:
    return limits.index_vectors(str(q.dtype))


def _of_selection(x, end, *, k: int, **static: Any) -> list[str]:
    return limits.selected(k)


def _of_products(a, a_scale, *others: Any, **static: Any) -> list[str]:
    return limits.scales(a_scale)


_ATTEND = "sparse attention, keys never split"
_INDEX = "scores of the indexer"
_GEMM = "FP8 products, scales two to an int16"
IMPLS: Mapping[str, tuple[Impl, ...]] = {
    "stream_mixes": _ours("stream_mixes"),
    "norm_rope": _ours("norm_rope"),
    "index_logits": (_published("index", _INDEX, _of_scores),),
    "index_logits_packed": (_published("index", _INDEX, _of_scores),),
    "select_best": (
        *_ours("select_best"),
        _published("select", "the largest values of every row", _of_selection),
    ),
    "attend_rows": (*_ours("attend_rows"), _published("attend", _ATTEND, _of_rows)),
    "attend_pages": (_published("attend", _ATTEND, _of_pages),),
    "fp8_gemm": (_published("gemm", _GEMM, _of_products),),
    "fp4_gemm": (_published("gemm", _GEMM, _of_products),),
    "grouped_contiguous": (_published("gemm", _GEMM, _of_products),),
    "grouped_masked": (_published("gemm", _GEMM, _of_products),),
}


def torch_ops() -> dict[str, Callable[..., Any]]:
    """Our kernels by the names of their operations, on tensors of torch_npu.

    The executor takes functions by the names of the model's (`ascend.functions.NAMES`), as in
    ``ops={"mixes": functools.partial(torch_ops()["stream_mixes"], streams=4, ...)}``.
    """
    return {name: functools.partial(run, OnDevice()) for name, run in _RUN.items()}
