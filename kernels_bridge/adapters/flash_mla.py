"""FlashMLA: sparse attention on Hopper over bfloat16 rows, on Blackwell over V4.1's pages.

Its functions make their results themselves, so they are copied into XLA's buffers, and a CUDA graph
must not record them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_bridge import dlpack
from kernels_bridge.ops import pages as formats
from kernels_bridge.ops.plan import key_blocks, unsplit
from kernels_bridge.registry import Capability, Impl, Need
from kernels_bridge.signatures import function_of, signature

_HOPPER, _BLACKWELL = ("flash-mla",), ("deepinfer-flashmla",)
_TORCH = Need("torch", at_least="2.3")
_FROM = "build and install deepseek-ai/FlashMLA of April 2026 or later"
_PIP = "install deepinfer-flashmla (SM100 only, CUDA 13.1 or later)"
HOPPER = Need("flash_mla", at_least="1.0", packages=_HOPPER, mend=_FROM)
BLACKWELL = Need("flash_mla", at_least="1.0", packages=_BLACKWELL, mend=_PIP)
EITHER = Need("flash_mla", at_least="1.0", mend=f"{_FROM}, or {_PIP}")

SPARSE = signature(
    EITHER, "flash_mla_sparse_fwd", "q kv indices sm_scale d_v attn_sink topk_length",
    "q kv indices sm_scale d_v attn_sink",
)  # fmt: skip
_KVCACHE = (
    "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
    "softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache "
    "topk_length extra_topk_length"
)
_PASSED = (
    "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata softmax_scale "
    "is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache"
)
HOPPER_PAGES = signature(HOPPER, "flash_mla_with_kvcache", _KVCACHE, _PASSED)
BLACKWELL_PAGES = signature(
    BLACKWELL, "flash_mla_with_kvcache", f"{_KVCACHE} enable_batch_invariant",
    f"{_PASSED} enable_batch_invariant",
)  # fmt: skip
METADATA = signature(EITHER, "get_mla_metadata", "args kwargs", "")
_HEADS, _STEP, _BLOCK = (64, 128), 128, 64
SEEN = "an H200 (sm_90), FlashMLA 9241ae3"


def _accepts_heads(heads: int, width: int) -> list[str]:
    said = [] if heads in _HEADS else [f"it takes 64 or 128 heads, not {heads}"]
    return said if width == 512 else [*said, f"it takes vectors of 512 values, not {width}"]


def accepts_rows(q: Any, rows: Any, ids: Any, extra: Any, sink: Any, **static: Any) -> list[str]:
    """What `flash_mla_sparse_fwd` demands of shapes."""
    said = _accepts_heads(*q.shape[1:])
    if not q.shape[0] or not rows.shape[0]:
        said.append("it takes no empty arrays of queries or rows")
    return said


def run_rows(q, rows, ids, extra, sink, *, scale: float):
    """`attend_rows` by `flash_mla_sparse_fwd`: one list of ids in whole steps of 128."""
    both = jnp.concatenate([ids, extra], axis=1)
    both = jnp.pad(both, ((0, 0), (0, -both.shape[1] % _STEP)), constant_values=-1)
    attend = function_of(SPARSE)

    def kernel(results, q, rows, ids, sink):
        out, _, lse = attend(
            q=q, kv=rows[:, None], indices=ids[:, None], sm_scale=scale, d_v=512, attn_sink=sink
        )
        results[0].copy_(out)
        results[1].copy_(lse)

    shapes = (q, jax.ShapeDtypeStruct(q.shape[:2], jnp.float32))
    out, lse = dlpack.call(kernel, f"{SPARSE.path}[{scale}]", shapes, q, rows, both, sink)
    return out, _without_infinity(lse)


def _without_infinity(lse: jax.Array) -> jax.Array:
    """The library marks a query that sees nothing with +inf."""
    return jnp.where(lse == jnp.inf, -jnp.inf, lse)


def _accepts_pages(
    own: tuple[int, ...], other: tuple[int, ...], q, pages, ids, extra_pages, extra
) -> list[str]:
    said, kind = _accepts_heads(q.shape[2], q.shape[3]), "bytes per token"
    if pages.shape[-1] not in own:
        said.append(f"it reads pages of {_either(own)} {kind}, not {pages.shape[-1]}")
    if not q.size or not pages.size or not ids.size:
        said.append("it takes no empty arrays of queries, pages or ids")
    if ids.shape[-1] % _BLOCK:
        said.append(f"it takes ids in blocks of {_BLOCK}, not {ids.shape[-1]}: pad with -1")
    if bool(extra_pages.size) != bool(extra.size):
        said.append("it takes extra and extra_pages together, or neither")
    if not extra_pages.size:
        return said
    if extra_pages.shape[-1] not in other:
        last = extra_pages.shape[-1]
        said.append(f"it reads further pages of {_either(other)} {kind}, not {last}")
    if extra.shape[-1] % _BLOCK:
        said.append(f"it takes extra in blocks of {_BLOCK}, not {extra.shape[-1]}: pad with -1")
    return said


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))


def accepts_blackwell(q, pages, ids, extra_pages, extra, sink, **static: Any) -> list[str]:
    """What the kernels of deepinfer-flashmla demand: V4.1's formats, FP4 only beside FP8."""
    return _accepts_pages((528,), (528, 288), q, pages, ids, extra_pages, extra)


def accepts_hopper(q, pages, ids, extra_pages, extra, sink, **static: Any) -> list[str]:
    """What Hopper's kernels demand: V4.0's format in both tables."""
    return _accepts_pages((584,), (584,), q, pages, ids, extra_pages, extra)


def _inside(ids: jax.Array, pages: jax.Array) -> jax.Array:
    """-1 for what is outside: the kernels read whatever address another number names."""
    count = pages.shape[0] * pages.shape[1]
    return jnp.where((ids >= 0) & (ids < count), ids, -1)


def run_blackwell(q, pages, ids, extra_pages, extra, sink, *, scale: float):
    """`attend_pages` by deepinfer-flashmla, with its switch against split sequences."""
    return _run_pages(
        BLACKWELL_PAGES, {"enable_batch_invariant": True}, None, q, pages, ids, extra_pages, extra,
        sink, scale,
    )  # fmt: skip


def run_hopper(q, pages, ids, extra_pages, extra, sink, *, scale: float):
    """`attend_pages` by FlashMLA, which has no such switch and takes the plan of `ops.plan`."""
    b, t, heads, _ = q.shape
    own = jnp.full((b,), ids.shape[-1], jnp.int32)
    blocks = key_blocks(own, jnp.full((b,), extra.shape[-1], jnp.int32), _BLOCK)
    plan = unsplit(blocks, max(dlpack.multiprocessors() // t // (heads // _BLOCK), 1))
    return _run_pages(
        HOPPER_PAGES, {}, plan, q, pages, ids, extra_pages, extra, sink, scale
    )  # fmt: skip


def _run_pages(published, switches, plan, q, pages, ids, extra_pages, extra, sink, scale):
    attend, metadata = function_of(published), function_of(METADATA)
    more = bool(extra_pages.shape[0])

    def kernel(results, q, pages, ids, extra_pages, extra, sink, *plan):
        state, _ = metadata()
        if plan:
            state.tile_scheduler_metadata, state.num_splits = plan
        out, lse = attend(
            q=q, k_cache=pages[:, :, None], block_table=None, cache_seqlens=None, head_dim_v=512,
            tile_scheduler_metadata=state, softmax_scale=scale, is_fp8_kvcache=True, indices=ids,
            attn_sink=sink, extra_k_cache=extra_pages[:, :, None] if more else None,
            extra_indices_in_kvcache=extra if more else None, **switches,
        )  # fmt: skip
        results[0].copy_(out)
        results[1].copy_(lse.transpose(1, 2))

    shapes = (q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    ids, extra = _inside(ids, pages), _inside(extra, extra_pages)
    name = f"{published.need.packages[0]} {published.path}[{scale}]"
    operands = (q, pages, ids, extra_pages, extra, sink, *(plan or ()))
    out, lse = dlpack.call(kernel, name, shapes, *operands)
    return out, _without_infinity(lse)


ROWS = (
    Impl(
        "flash_mla", "dlpack",
        Capability(("cuda",), (9, 10), ("bfloat16",), (_TORCH, EITHER), batch_invariant=True),
        "flash_mla_sparse_fwd, one block of the chip for each query and 64 heads",
        run_rows, accepts_rows, seen=SEEN, by_name=dlpack.UNRECORDED,
    ),
)  # fmt: skip
PAGES = (
    Impl(
        "flash_mla_sm100", "dlpack",
        Capability(("cuda",), (10,), ("bfloat16",), (_TORCH, BLACKWELL), batch_invariant=True),
        f"flash_mla_with_kvcache over pages of {_either(tuple(formats.FORMATS)[:2])} bytes a token",
        run_blackwell, accepts_blackwell,
    ),
    Impl(
        "flash_mla_sm90", "dlpack",
        Capability(("cuda",), (9,), ("bfloat16",), (_TORCH, HOPPER), batch_invariant=True),
        "flash_mla_with_kvcache over V4.0's pages of 584 bytes a token, no sequence split",
        run_hopper, accepts_hopper, seen=SEEN, by_name=dlpack.UNRECORDED,
    ),
)  # fmt: skip
