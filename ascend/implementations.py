"""What may run each operation on an Ascend 950, for `deepinfer-jax kernels --platform ascend950`.

XLA has no back end for the chip, so nothing that XLA runs is there: `ascend.executor` evaluates the
program with torch on it, and may put a kernel in an operation's place. None of it was run on an
NPU, so everything has to be asked for by name (docs/ascend.md).
"""

from __future__ import annotations

from ascend import ops
from ascend.aclnn.table import BY_NAME
from kernels_bridge.machine import ASCEND
from kernels_bridge.registry import Capability, Impl, Need

_NPU = Need(
    "torch_npu",
    mend="install CANN, then torch-npu of the release that its notes name, both by hand",
)
_TORCH = Impl(
    "torch",
    "executor",
    Capability((ASCEND,), needs=(_NPU,)),
    "torch functions for the primitives of plain XLA, by ascend.executor",
)
# Operations of CANN that do what an operation does, and why they cannot take its place as it is.
_CANN = {
    "attention": (
        "sparse_attn_sharedkv",
        "it takes pages and a window of 128 tokens by position, here are rows by id",
    ),
    "attend_rows": (
        "sparse_attn_sharedkv",
        "it takes pages and a window of 128 tokens by position, here are rows by id",
    ),
    "attend_pages": (
        "kv_quant_sparse_attn_sharedkv",
        "its pages have 640 bytes a token, here they have 528 and 288, or V4.0's 584",
    ),
    "index_scores": ("lightning_indexer", "it returns selected entries, here scores are asked for"),
    "index_logits": (
        "quant_lightning_indexer",
        "it returns selected entries, here scores are asked for",
    ),
    "mixes": (
        "hc_pre",
        "it mixes streams of 4096 or 7168 values in the same call, here are weights alone",
    ),
    "dispatch": ("dispatch_ffn_combine", "its definition has no kernel for the 950"),
}
_PLAIN = (
    "row_sum", "row_product", "expert_product", "attention", "image_attention", "index_scores",
    "mixes", "selection", "index_logits", "index_logits_packed", "select_best", "attend_rows",
    "attend_pages", "fp8_gemm", "fp4_gemm", "grouped_contiguous", "grouped_masked", "norm_rope",
    "stream_mixes", "choose_token",
)  # fmt: skip


def _cann(name: str, why_not: str) -> Impl:
    op = BY_NAME[name]
    can = Capability((ASCEND,), needs=(_NPU,))
    return Impl(f"cann_{name}", "executor", can, f"CANN's {op.symbol}: {op.what}", never=why_not)


IMPLS: dict[str, tuple[Impl, ...]] = {
    name: (
        *((_TORCH,) if name in _PLAIN else ()),
        *ops.IMPLS.get(name, ()),
        *((_cann(*_CANN[name]),) if name in _CANN else ()),
    )
    for name in dict.fromkeys((*_PLAIN, *ops.IMPLS, *_CANN))
}
