"""The table of CANN's operations on caches: pooling of rows into entries, and storing them."""

from __future__ import annotations

from collections.abc import Iterator

from ascend.aclnn.operations import (
    Argument,
    Bound,
    Operation,
    integer,
    like,
    maybe,
    real,
    result,
    step_of,
    tensor,
)
from ascend.aclnn.sources import A2, A3, A5, adapter


def _slots_fit(bound: Bound) -> Iterator[str]:
    """Format 1 is a flat list of slots, 2 one of pages and places in them."""
    rank, form = len(bound.tensors["slot_mapping"].shape), bound.given["slot_mapping_format"]
    if rank != form:
        wanted = "[n]" if form == 1 else "[n, 2]"
        yield f"slot_mapping_format={form} writes slot_mapping {wanted}, it has {rank} axes"
    for name in ("cu_seqlens", "start_pos", "kv_block_table"):
        most = bound.tensors[name].shape[0] - (name == "cu_seqlens")
        if not 0 < bound.given["actual_num_reqs"] <= most:
            yield (
                f"actual_num_reqs must be from 1 to the {most} requests of {name}, it is "
                f"{bound.given['actual_num_reqs']}"
            )


COMPRESSOR_METADATA = Operation(
    "compressor_metadata",
    "aclnnCompressorMetadata",
    "angles and slots of the entries that a step completes",
    (
        tensor("rope_cos", "float32 float16 bfloat16", "p r"),
        tensor("rope_sin", "float32 float16 bfloat16", "p r"),
        tensor("cu_seqlens", "int32", "_"),
        tensor("start_pos", "int32", "_"),
        tensor("kv_block_table", "int32", "_ _"),
        integer("kv_block_size"),
        integer("slot_mapping_format", choices=(1, 2)),
        integer("cmp_ratio"),
        integer("actual_num_reqs"),
        tensor("compress_cos", "float32 float16 bfloat16", "n 1 1 r", inplace=True),
        tensor("compress_sin", "float32 float16 bfloat16", "n 1 1 r", inplace=True),
        tensor("slot_mapping", "int32", "", inplace=True),
    ),
    (A2, A3, A5),
    adapter("attention/compressor_metadata", "definition"),
    demands=_slots_fit,
)


def _kinds_of_compressor(bound: Bound) -> Iterator[str]:
    """The three uses that its kernel is made for, by its own description."""
    use = bound.axes["d"], bound.given["coff"], bound.given["cmp_ratio"]
    if use not in ((512, 2, 4), (128, 2, 4), (512, 1, 128)):
        yield (
            "width, coff and cmp_ratio must be (512, 2, 4), (128, 2, 4) or (512, 1, 128), they "
            f"are {use}"
        )
    if bound.axes["h"] % 512 or not 1024 <= bound.axes["h"] <= 10240:
        yield f"the last axis of x must be a multiple of 512 up to 10240, it is {bound.axes['h']}"


COMPRESSOR = Operation(
    "compressor",
    "aclnnCompressor",
    "rows pooled into entries of the cache, with what is pending kept in state_cache",
    (
        tensor("x", "bfloat16 float16", "b s h | t h"),
        tensor("wkv", "bfloat16 float16", "coff*d h"),
        tensor("wgate", "bfloat16 float16", "coff*d h"),
        tensor("state_cache", "float32", "_ _ _", inplace=True, gaps=True),
        tensor("ape", "float32", "cmp_ratio coff*d"),
        tensor("norm_weight", "float32", "d"),
        tensor("rope_sin", "float32", "b c rope_head_dim | c rope_head_dim"),
        tensor("rope_cos", "float32", "b c rope_head_dim | c rope_head_dim"),
        maybe("state_block_table", "int32", "_ _"),
        maybe("cu_seqlens", "int32", "_"),
        maybe("seqused", "int32", "_"),
        maybe("start_pos", "int32", "_"),
        integer("rope_head_dim", 64, choices=(64,)),
        integer("cmp_ratio", choices=(4, 128)),
        integer("coff", choices=(1, 2)),
        real("norm_eps", 1e-6),
        integer("rotary_mode", 2, choices=(2,)),  # interleaved; 1 would be halves
        integer("cache_mode", 1),
        step_of("state_cache_stride_dim0", "state_cache"),
        result("cmp_kv", like("x"), "b c d | c d"),
    ),
    (A2, A3, A5),
    adapter("attention/compressor", "definition", "dtypes of the 950"),
    demands=_kinds_of_compressor,
)
KV_EPILOG = Operation(
    "kv_compress_epilog",
    "aclnnKvCompressEpilog",
    "rows quantized and stored into slots of a cache",
    (
        tensor("kv_compress_cache", "float8_e5m2 float8_e5m2 float8_e4m3fn float8_e4m3fn",
               "_ _ _", inplace=True, gaps=True),
        tensor("x", "bfloat16", "t d"),
        tensor("slot_mapping", "int32 int64 int32 int64", "t"),
        integer("quant_group_size", 64),
        integer("quant_mode", 2),
        integer("round_scale", 1, choices=(0, 1)),
        integer("layout", 1),
        step_of("block_stride", "kv_compress_cache"),
    ),
    (A5,),
    adapter("attention/kv_compress_epilog", "definition"),
)  # fmt: skip
INDEX_EPILOG = Operation(
    "indexer_compress_epilog",
    "aclnnIndexerCompressEpilogV2",
    "index vectors quantized and stored into slots of a cache",
    (
        tensor("indexer_compress_cache", "uint8", "", inplace=True, gaps=True),
        tensor("x", "float16 bfloat16", ""),
        tensor("slot_mapping", "int32", "_"),
        integer("layout", 2),
        step_of("block_stride", "indexer_compress_cache"),
    ),
    (A5,),
    adapter("attention/indexer_compress_epilog_v2", "definition"),
)
_STORED = "float16 float32 bfloat16 bool int64 int32 int16 int8"
SCATTER = Operation(
    "scatter_nd_update",
    "aclnnScatterNdUpdateV2",
    "rows written to places of a tensor",
    (
        tensor("var", f"{_STORED} {_STORED}", "", inplace=True, gaps=True),
        tensor("indices", " ".join(["int32"] * 8 + ["int64"] * 8), ""),
        tensor("updates", f"{_STORED} {_STORED}", ""),
        Argument("strides", "integers", derived=lambda tensors: tensors["var"].strides),
    ),
    (A2, A3),
    adapter("moe/scatter_nd_update_v2", "header"),
)

TABLE = (COMPRESSOR_METADATA, COMPRESSOR, KV_EPILOG, INDEX_EPILOG, SCATTER)
