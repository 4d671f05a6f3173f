"""The table of CANN's operations around attention: sparse attention, its index, rotary positions.

Pages: KV of a cache is [pages, tokens of a page, 1, width], a block table [b, pages of a request].
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend.aclnn.operations import (
    Argument,
    Bound,
    Operation,
    flag,
    integer,
    like,
    maybe,
    real,
    result,
    step_of,
    tensor,
    text,
)
from ascend.aclnn.sources import A2, A3, A5, adapter

_NO_LIMIT = 2**63 - 1
_LAYOUT_Q = text("layout_q", "BSND", choices=("BSND", "TND"))
_LAYOUT_KV = text("layout_kv", "PA_ND", choices=("PA_ND",))
_WINDOW = (
    integer("ori_win_left", 127, choices=(127,)),
    integer("ori_win_right", 0, choices=(0,)),
)
_MASKS = (
    integer("ori_mask_mode", 4, choices=(4,)),
    integer("cmp_mask_mode", 3, choices=(3,)),
)
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv", "seqused_q", "seqused_kv")


def _rows(kv_dtypes: str, q: str, kv: str) -> tuple[Argument, ...]:
    """Tensors of shared-KV attention: queries, both caches and who may see what of them."""
    return (
        tensor("q", "bfloat16" if " " not in kv_dtypes else kv_dtypes, q),
        maybe("ori_kv", kv_dtypes, kv.format("o"), gaps=True),
        maybe("cmp_kv", kv_dtypes, kv.format("c"), gaps=True),
        maybe("ori_sparse_indices", "int32", "b s 1 _ | t 1 _"),
        maybe("cmp_sparse_indices", "int32", "b s 1 m | t 1 m"),
        maybe("ori_block_table", "int32", "b _"),
        maybe("cmp_block_table", "int32", "b _"),
        maybe("cu_seqlens_q", "int32", "b+1"),
        maybe("cu_seqlens_ori_kv", "int32", "b+1"),
        maybe("cu_seqlens_cmp_kv", "int32", "b+1"),
        maybe("seqused_q", "int32", "b"),
        maybe("seqused_kv", "int32", "b"),
        tensor("sinks", "float32", "h"),
        tensor("metadata", "int32", "1024"),
    )


def _limits(bound: Bound) -> Iterator[str]:
    """What the kernels of shared-KV attention are made for, by their own description."""
    if "ori_kv" not in bound.tensors:
        yield "ori_kv must be given, with or without cmp_kv; it is left out"
    if "cmp_sparse_indices" in bound.tensors and "cmp_kv" not in bound.tensors:
        yield "cmp_sparse_indices select from cmp_kv, which is left out: give it"
    if bound.given["layout_q"] == "TND" and "cu_seqlens_q" not in bound.tensors:
        yield 'layout_q="TND" needs cu_seqlens_q, which is left out: give running sums of lengths'
    heads, picked = bound.axes["h"], bound.axes.get("m")
    if heads not in (64, 128):
        yield f"q must have 64 or 128 heads, it has {heads}: pad them"
    if picked not in (None, 512, 1024):
        yield f"cmp_sparse_indices must list 512 or 1024 entries, it lists {picked}: fill with -1"
    for name, word in (("ori_kv", "o"), ("cmp_kv", "c")):
        page = bound.axes.get(word, 16)
        if page % 16 or page > 1024:
            yield f"pages of {name} must hold a multiple of 16 tokens up to 1024, not {page}"


def _lse(bound: Bound) -> tuple[int, ...]:
    """Of what is not asked for an empty tensor comes back."""
    q = bound.tensors["q"].shape
    return (*q[:-1], 1) if bound.given["return_softmax_lse"] else (0,)


def _metadata(name: str, symbol: str, quant: tuple[Argument, ...], folder: str) -> Operation:
    """How shared-KV attention is divided among the cores, as an operand for it."""
    return Operation(
        name,
        symbol,
        "division of shared-KV attention among cores",
        (
            *(maybe(each, "int32", "_", hollow=True) for each in _LENGTHS),
            integer("num_heads_q"),
            integer("num_heads_kv", 1, choices=(1,)),
            integer("head_dim"),
            integer("batch_size"),
            integer("max_seqlen_q"),
            integer("max_seqlen_kv"),
            integer("ori_topk", 0),
            integer("cmp_topk", 0),
            *quant,
            integer("cmp_ratio"),
            *_MASKS,
            *_WINDOW,
            _LAYOUT_Q,
            _LAYOUT_KV,
            flag("has_ori_kv", True),
            flag("has_cmp_kv", True),
            result("metadata", "int32", "1024"),
        ),
        (A5,) if quant else (A2, A3, A5),
        adapter(f"attention/{folder}", "header"),
    )


SPARSE_METADATA = _metadata(
    "sparse_attn_sharedkv_metadata",
    "aclnnSparseAttnSharedkvMetadata",
    (),
    "sparse_attn_sharedkv_metadata",
)
QUANT_SPARSE_METADATA = _metadata(
    "kv_quant_sparse_attn_sharedkv_metadata",
    "aclnnKvQuantSparseAttnSharedkvMetadata",
    (
        integer("kv_quant_mode", 1, choices=(1,)),
        integer("tile_size", 64, choices=(64,)),
        integer("rope_head_dim", 64, choices=(64,)),
    ),
    "kv_quant_sparse_attn_sharedkv_metadata",
)
SPARSE = Operation(
    "sparse_attn_sharedkv",
    "aclnnSparseAttnSharedkv",
    "attention over a window and selected entries, keys are values",
    (
        *_rows("float16 bfloat16", "b s h d | t h d", "_ {} 1 d"),
        real("softmax_scale"),
        integer("cmp_ratio"),
        *_MASKS,
        step_of("ori_kv_stride", "ori_kv"),
        step_of("cmp_kv_stride", "cmp_kv"),
        *_WINDOW,
        _LAYOUT_Q,
        _LAYOUT_KV,
        flag("return_softmax_lse", False, choices=(False,)),
        result("attn_out", like("q"), "b s h d | t h d"),
        result("softmax_lse", "float32", _lse),
    ),
    (A2, A3, A5),
    adapter("attention/sparse_attn_sharedkv", "definition", "that project's build for the 950 "
            "leaves it out, although its definition names the chip"),
    form_by="layout_q",
    demands=_limits,
)  # fmt: skip
QUANT_SPARSE = Operation(
    "kv_quant_sparse_attn_sharedkv",
    "aclnnKvQuantSparseAttnSharedkv",
    "the same over caches in FP8: 64 bf16 of rope, 448 fp8 and 7 scales in 640 bytes a token",
    (
        *_rows("float8_e4m3fn", "b s h 512 | t h 512", "_ {} 1 640"),
        integer("kv_quant_mode", 1, choices=(1,)),
        integer("tile_size", 64, choices=(64,)),
        integer("rope_head_dim", 64, choices=(64,)),
        real("softmax_scale"),
        integer("cmp_ratio", choices=(1, 4, 128)),
        *_MASKS,
        *_WINDOW,
        _LAYOUT_Q,
        _LAYOUT_KV,
        step_of("ori_kv_stride0", "ori_kv"),
        step_of("cmp_kv_stride0", "cmp_kv"),
        flag("return_softmax_lse", False, choices=(False,)),
        result("attn_out", like("q"), "b s h 512 | t h 512"),
        result("softmax_lse", "float32", _lse),
    ),
    (A5,),
    adapter("attention/kv_quant_sparse_attn_sharedkv", "definition"),
    form_by="layout_q",
    demands=_limits,
)


def _values(bound: Bound) -> tuple[int, ...]:
    q, groups = bound.tensors["query"].shape, bound.tensors["key"].shape[2]
    if not bound.given["return_values"]:
        return (0,)
    return (*q[:-2], groups, bound.given["sparse_count"])


def _lengths_of_keys(bound: Bound) -> Iterator[str]:
    """What a table of pages cannot say by itself."""
    for name in ("actual_seq_lengths_key", "block_table"):
        if name not in bound.tensors:
            yield f'layout_key="PA_BSND" needs {name}, which is left out'
    if bound.given["layout_query"] == "TND" and "actual_seq_lengths_query" not in bound.tensors:
        yield 'layout_query="TND" needs actual_seq_lengths_query, which is left out'
    if bound.given["sparse_count"] < 1:
        yield f"sparse_count must be positive, it is {bound.given['sparse_count']}"


_LAYOUT_QUERY = text("layout_query", "BSND", choices=("BSND", "TND"))
_LAYOUT_KEY = text("layout_key", "PA_BSND", choices=("PA_BSND",))
_SELECTION = (
    _LAYOUT_QUERY,
    _LAYOUT_KEY,
    integer("sparse_count"),
    integer("sparse_mode", 3, choices=(0, 3)),
    integer("pre_tokens", _NO_LIMIT, choices=(_NO_LIMIT,)),
    integer("next_tokens", _NO_LIMIT, choices=(_NO_LIMIT,)),
)
_KEYS = (
    maybe("actual_seq_lengths_query", "int32", "b"),
    maybe("actual_seq_lengths_key", "int32", "b"),
    maybe("block_table", "int32", "b _"),
)
INDEXER = Operation(
    "lightning_indexer",
    "aclnnLightningIndexer",
    "scores of the index and the entries that are selected by them",
    (
        tensor("query", "bfloat16 float16 bfloat16 float16", "b s n d | t n d"),
        tensor("key", "bfloat16 float16 bfloat16 float16", "_ _ g d"),
        tensor("weights", "bfloat16 float16 float32 float32", "b s n | t n"),
        *_KEYS,
        *_SELECTION,
        flag("return_values", False),
        result("sparse_indices", "int32", "b s g sparse_count | t g sparse_count"),
        result("sparse_values", like("query"), _values),
    ),
    (A2, A3, A5),
    adapter("attention/lightning_indexer", "header"),
    form_by="layout_query",
    demands=_lengths_of_keys,
)
QUANT_INDEXER = Operation(
    "quant_lightning_indexer",
    "aclnnVllmQuantLightningIndexer",
    "the same over FP8 vectors with a scale each; on chips before the 950 over int8",
    (
        tensor("query", "int8 float8_e4m3fn", "b s 64 128 | t 64 128"),
        tensor("key", "int8 float8_e4m3fn", "p k 1 128", gaps=True),
        tensor("weights", "float16 float32", "b s 64 | t 64"),
        tensor("query_dequant_scale", "float16 float32", "b s 64 | t 64"),
        tensor("key_dequant_scale", "float16 float32", "p k 1", gaps=True),
        *_KEYS,
        tensor("metadata", "int32", "1024"),
        integer("query_quant_mode", 0, choices=(0,)),
        integer("key_quant_mode", 0, choices=(0,)),
        *_SELECTION,
        integer("cmp_ratio", 1),
        flag("return_values", False, choices=(False,)),
        step_of("stride", "key"),
        step_of("scale_stride", "key_dequant_scale"),
        result("sparse_indices", "int32", "b s 1 sparse_count | t 1 sparse_count"),
        result("sparse_values", "float32", _values),
    ),
    (A2, A3, A5),
    adapter("attention/vllm_quant_lightning_indexer", "definition"),
    form_by="layout_query",
    demands=_lengths_of_keys,
)
QUANT_INDEXER_METADATA = Operation(
    "quant_lightning_indexer_metadata",
    "aclnnVllmQuantLightningIndexerMetadata",
    "division of the index's scores among cores",
    (
        maybe("actual_seq_lengths_query", "int32", "_", hollow=True),
        maybe("actual_seq_lengths_key", "int32", "_", hollow=True),
        integer("num_heads_q"),
        integer("num_heads_k", 1),
        integer("head_dim"),
        integer("query_quant_mode", 0, choices=(0,)),
        integer("key_quant_mode", 0, choices=(0,)),
        integer("batch_size"),
        integer("max_seqlen_q"),
        integer("max_seqlen_k"),
        *_SELECTION,
        integer("cmp_ratio", 1),
        result("metadata", "int32", "1024"),
    ),
    (A2, A3, A5),
    adapter("attention/vllm_quant_lightning_indexer_metadata", "header"),
)


def _slice_fits(bound: Bound) -> Iterator[str]:
    """The turned part lies in a head and is as wide as its angles."""
    given, width, angles = bound.given["partial_slice"], bound.axes["d"], bound.axes["r"]
    if len(given) != 2 or not 0 <= given[0] < given[1] <= width:
        yield f"partial_slice must be (begin, end) within the last axis of x, {width}, not {given}"
    elif given[1] - given[0] != angles:
        yield (
            f"partial_slice covers {given[1] - given[0]} numbers and cos has {angles}: they must "
            "be as many"
        )


ROTARY = Operation(
    "inplace_partial_rotary_mul",
    "aclnnInplacePartialRotaryMul",
    "rotary positions for a part of every head, in place",
    (
        tensor("x", "float16 float32 bfloat16 float16 bfloat16", "b _ _ d", inplace=True),
        tensor("cos", "float16 float32 bfloat16 float32 float32", "b _ _ r"),
        tensor("sin", "float16 float32 bfloat16 float32 float32", "b _ _ r"),
        # half, interleave, quarter, interleave-half
        integer("mode", 0, choices=(0, 1, 2, 3)),
        Argument("partial_slice", "integers"),
    ),
    (A2, A3, A5),
    adapter("attention/inplace_partial_rotary_mul", "definition"),
    demands=_slice_fits,
)

TABLE = (
    SPARSE_METADATA,
    SPARSE,
    QUANT_SPARSE_METADATA,
    QUANT_SPARSE,
    INDEXER,
    QUANT_INDEXER_METADATA,
    QUANT_INDEXER,
    ROTARY,
)
