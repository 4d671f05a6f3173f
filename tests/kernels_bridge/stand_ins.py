"""Stand-ins for libraries of kernels, on torch's CPU: their names, their demands, plain arithmetic.

Each refuses what the library refuses (types, shapes, strides), so that an adapter that lays an
operand out in another way is seen without a GPU.
"""

from __future__ import annotations

import types
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="stand-ins of libraries are written in torch")

FP8 = torch.float8_e4m3fn


def need(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"the library would refuse this: {what}")


# -- flash_mla -------------------------------------------------------------------------------------


def attend(q, keys, seen, sink, scale):
    """q [T, H, D], keys [T, S, D], seen [T, S] -> out, lse (+inf where nothing is seen)."""
    s = torch.einsum("thd,tsd->ths", q.float(), keys.float()) * scale
    s = torch.where(seen[:, None], s, -torch.inf)
    lse = torch.logsumexp(s, -1)
    none = torch.isinf(lse)
    p = torch.where(none[..., None], 0, torch.exp(s - lse[..., None]))
    share = 1 / (1 + torch.exp(sink[None] - lse))
    out = torch.einsum("ths,tsd->thd", p, torch.where(seen[..., None], keys.float(), 0))
    out = torch.where(none[..., None], 0, out * share[..., None])
    return out.to(torch.bfloat16), torch.where(none, torch.inf, lse)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    t, heads, width = q.shape
    need(q.dtype == kv.dtype == torch.bfloat16, "bfloat16")
    need(heads in (64, 128) and width == d_v == 512, "64 or 128 heads of 512")
    need(indices.dtype == torch.int32 and indices.shape[:2] == (t, 1), "ids [T, 1, S]")
    need(indices.shape[2] % 128 == 0, "ids in steps of 128")
    need(kv.shape[1:] == (1, 512) and attn_sink.shape == (heads,), "rows [N, 1, 512], sink [H]")
    ids = indices[:, 0].long()
    seen = (ids >= 0) & (ids < len(kv))
    keys = kv[:, 0][torch.where(seen, ids, 0)]
    out, lse = attend(q, keys, seen, attn_sink, sm_scale)
    return out, torch.zeros_like(lse), lse


def e8m0(codes):
    return torch.exp2(codes.float() - 127)


def unpack(pages):
    """Pages of 528, 288 or 584 bytes -> rows of float32, as the formats are published."""
    size, count = pages.shape[1], pages.shape[-1]
    flat = pages.reshape(-1, count)
    if count == 528:
        return flat[:, :512].view(FP8).float() * e8m0(flat[:, 512:]).repeat_interleave(32, 1)
    if count == 288:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.cat([values, -values])
        codes = torch.stack([flat[:, :256] & 15, flat[:, :256] >> 4], -1).reshape(-1, 512)
        return values[codes.long()] * flat[:, 256:].view(FP8).float().repeat_interleave(16, 1)
    whole = pages.reshape(len(pages), -1)
    tokens, scales = whole[:, : size * 576], whole[:, size * 576 :].reshape(-1, 8)
    tokens = tokens.reshape(-1, 576)
    nope = tokens[:, :448].view(FP8).float() * e8m0(scales[:, :7]).repeat_interleave(64, 1)
    return torch.cat([nope, tokens[:, 448:].contiguous().view(torch.bfloat16).float()], 1)


class SchedMeta:
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


def get_mla_metadata(*args, **kwargs):
    return SchedMeta(), None


def _with_kvcache(own, other, q, pages, meta, indices, sink, extra, extra_ids, scale):
    b, t, heads, _ = q.shape
    need(pages.dtype == torch.uint8 and pages.shape[2:] == (1, own), f"pages of {own} bytes")
    need(indices.dtype == torch.int32 and indices.shape[-1] % 64 == 0, "ids in blocks of 64")
    rows, ids = unpack(pages[:, :, 0]), indices
    need(int(ids.max()) < len(rows), "an id beyond the pages is read from foreign memory")
    if extra is not None:
        need(extra.shape[-1] in other and extra_ids.shape[-1] % 64 == 0, "further pages")
        more = unpack(extra[:, :, 0])
        need(int(extra_ids.max()) < len(more), "an id beyond the further pages")
        ids = torch.cat([ids, torch.where(extra_ids >= 0, extra_ids + len(rows), -1)], -1)
        rows = torch.cat([rows, more])
    ids = ids.reshape(b * t, -1).long()
    need(int(ids.min()) >= -1, "an invalid id is -1")
    keys = rows[torch.where(ids >= 0, ids, 0)]
    out, lse = attend(q.reshape(b * t, heads, -1), keys, ids >= 0, sink, scale)
    return out.reshape(q.shape), lse.reshape(b, t, heads).transpose(1, 2)


def flash_mla_pip(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, is_fp8_kvcache=True, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
    enable_batch_invariant=False,
):  # fmt: skip
    need(enable_batch_invariant and head_dim_v == 512 and is_fp8_kvcache, "the switches")
    need(tile_scheduler_metadata.num_splits is None, "a plan of its own")
    return _with_kvcache(528, (528, 288), q, k_cache, tile_scheduler_metadata, indices, attn_sink,
                         extra_k_cache, extra_indices_in_kvcache, softmax_scale)  # fmt: skip


def flash_mla_hopper(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
):  # fmt: skip
    plan, splits = (
        tile_scheduler_metadata.tile_scheduler_metadata,
        tile_scheduler_metadata.num_splits,
    )
    need(plan.dtype == torch.int32 and plan.shape[1] == 8, "a plan [parts, 8]")
    need(splits.tolist() == list(range(len(q) + 1)), "one split of each sequence")
    need(is_fp8_kvcache and head_dim_v == 512, "the switches")
    return _with_kvcache(584, (584,), q, k_cache, tile_scheduler_metadata, indices, attn_sink,
                         extra_k_cache, extra_indices_in_kvcache, softmax_scale)  # fmt: skip


def flash_mla(decode) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        flash_mla_sparse_fwd=flash_mla_sparse_fwd, flash_mla_with_kvcache=decode,
        get_mla_metadata=get_mla_metadata,
    )  # fmt: skip


# -- deep_gemm -------------------------------------------------------------------------------------


def scales_of(scale, rows, columns, group, packed):
    """Scales of a first operand, checked as the library checks that it has nothing to copy."""
    need(scale.dtype == (torch.int32 if packed else torch.float32), "type of the scales")
    need(scale.shape[-2:] == (rows, -(-columns // (group * (4 if packed else 1)))), "their number")
    aligned = -(-rows // 4) * 4
    need(scale.stride(-2) == 1 and scale.stride(-1) == aligned, "columns of 16 bytes")
    if scale.dim() == 3:
        need(scale.stride(0) == aligned * scale.shape[-1], "groups one after the other")
    if packed:
        scale = e8m0(scale.contiguous().view(torch.uint8))
    return scale.repeat_interleave(group, -1)[..., :columns]


def second(b, scale, recipe):
    """The second operand decoded, and its layout checked."""
    need(b.dtype == FP8 and b.is_contiguous(), "e4m3, K after K")
    *_, n, k = b.shape
    if recipe == (1, 128, 128):
        need(scale.is_contiguous() and scale.shape[-2:] == (-(-n // 128), -(-k // 128)), "scales")
        wide = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
        return b.float() * wide[..., :n, :k]
    return b.float() * scales_of(scale, n, k, recipe[2], True)


def first(a, scale, recipe):
    need(a.dtype == FP8 and a.is_contiguous(), "e4m3, K after K")
    return a.float() * scales_of(scale, *a.shape[-2:], recipe[2], recipe[1] == 1)


def fp8_gemm_nt(a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
                disable_ue8m0_cast=False):  # fmt: skip
    need(d.dtype == torch.bfloat16, "bfloat16 results")
    d.copy_(first(*a, recipe) @ second(*b, recipe).mT)


def m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout, recipe=None, compiled_dims="nk"):
    rows = first(*a, recipe)
    need(grouped_layout.dtype == torch.int32 and len(grouped_layout) == len(rows), "a group a row")
    tiles = grouped_layout.reshape(-1, 128)
    need(bool(((tiles == tiles[:, :1]) | (tiles == -1)).all()), "tiles of one group")
    every = torch.einsum("mk,gnk->gmn", rows, second(*b, recipe))
    d.copy_(every[grouped_layout.clamp(0).long(), torch.arange(len(rows))])


def m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m, recipe=None, recipe_a=None,
                                 recipe_b=None, compiled_dims="nk"):  # fmt: skip
    need(masked_m.dtype == torch.int32 and expected_m > 0, "counts")
    d.copy_(first(*a, recipe) @ second(*b, recipe).mT)


def fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k,
                       schedule_meta=None):  # fmt: skip
    (q, q_scale), (keys, key_scale) = q, kv
    if q_scale is None:
        need(q.dtype == keys.dtype == FP8 and weights.dtype == torch.float32, "types of Hopper")
        q, keys, result = q.float(), keys.float() * key_scale[:, None], torch.float32
    else:
        need(q.dtype == keys.dtype == torch.int8 and weights.dtype == torch.bfloat16, "types")
        need(q_scale.dtype == key_scale.dtype == torch.int32, "words of scales")
        need(q_scale.shape == q.shape[:-1] and key_scale.shape == keys.shape[:-1], "one a vector")
        q, keys, result = nibbles(q, q_scale), nibbles(keys, key_scale), torch.bfloat16
    every = torch.einsum("thk,nk->thn", q, keys).clamp(0) * weights.float()[:, :, None]
    made = torch.full((len(q), max_seqlen_k), 7e7, dtype=torch.float32)
    for t, (start, end) in enumerate(zip(cu_seq_len_k_start, cu_seq_len_k_end, strict=True)):
        made[t, : max(int(end - start), 0)] = every[t].sum(0)[int(start) : int(end)]
    return made.to(result)


def fp8_fp4_mqa_logits_upstream(
    q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0,
    logits_dtype=torch.float32,
):  # fmt: skip
    need(max_seqlen_k > 0 and not clean_logits, "rows of their own length, not cleaned")
    need(weights.dtype != torch.bfloat16 or logits_dtype == weights.dtype, "the type of scores")
    made = fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k)
    return made.to(logits_dtype)


def nibbles(codes, scale):
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = codes.view(torch.uint8)
    wide = torch.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    scale = e8m0(scale.contiguous().view(torch.uint8).reshape(*scale.shape, 4))
    return values[wide.long()] * scale.repeat_interleave(32, -1)


def deep_gemm(scores=fp8_fp4_mqa_logits) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        fp8_gemm_nt=fp8_gemm_nt,
        m_grouped_fp8_gemm_nt_contiguous=m_grouped_fp8_gemm_nt_contiguous,
        m_grouped_fp8_gemm_nt_masked=m_grouped_fp8_gemm_nt_masked,
        fp8_fp4_mqa_logits=scores,
    )


# -- deep_select -----------------------------------------------------------------------------------


def topk(
    input, topk, sorted=False, begin=None, end=None, indices_type=None, sorted_index=False,
    hint=None, output_idx=None, output_idx_offset=None, idx_oob_fill_value=2147483647,
    value_oob_fill_value=float("-inf"), return_value=True, abort_when_nan_found=True,
):  # fmt: skip
    """Of equal values it takes the higher columns: allowed, and not what our order says."""
    need(input.stride(0) * input.element_size() % 1024 == 0 and input.stride(1) == 1, "strides")
    need(output_idx.stride(0) * 4 % 32 == 0 and output_idx.dtype == indices_type, "of results")
    need(sorted_index and not return_value and not abort_when_nan_found, "the switches")
    for row, out, stop in zip(input.float(), output_idx, end.tolist(), strict=True):
        taken = torch.sort(row[:stop].flip(0), descending=True, stable=True).indices[:topk]
        columns = torch.sort(stop - 1 - taken).values
        out.fill_(idx_oob_fill_value)
        out[: len(columns)] = columns
        if row[:stop].isnan().any():
            out[0] = 0x3F3F3F3F
    return None, output_idx


def deep_select() -> types.SimpleNamespace:
    return types.SimpleNamespace(topk=topk)
