"""The table of CANN's operations around experts and hyper-connections, and of drafts."""

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
    tensor,
    text,
)
from ascend.aclnn.sources import A2, A3, A5, adapter, stock
from ascend.aclnn.tensors import DTYPES

_FLOATS = "float16 float32 bfloat16"


def _same_shapes(bound: Bound) -> Iterator[str]:
    one, other = bound.tensors["self"].shape, bound.tensors["other"].shape
    if one != other:
        yield f"self and other must have one shape here, they have {one} and {other}: expand one"


ADD = Operation(
    "add",
    "aclnnAdd",
    "self + alpha * other: the smallest call there is, to try the binding with",
    (
        tensor("self", "float32 float16 bfloat16 int32", ""),
        tensor("other", "float32 float16 bfloat16 int32", ""),
        Argument("alpha", "scalar", default=1),
        result("out", like("self"), lambda bound: bound.tensors["self"].shape),
    ),
    (A2, A3, A5),
    stock("aclnnAdd"),
    demands=_same_shapes,
)


def _hc_widths(bound: Bound) -> Iterator[str]:
    if bound.axes["d"] not in (4096, 7168):
        yield f"the last axis of x must be 4096 or 7168, it is {bound.axes['d']}"


HC_PRE = Operation(
    "hc_pre",
    "aclnnHcPre",
    "streams mixed into the input of a block, and the weights for its output",
    (
        tensor("x", "bfloat16", "b s 4 d | t 4 d"),
        tensor("hc_fn", "float32", "24 4*d"),
        tensor("hc_scale", "float32", "3"),
        tensor("hc_base", "float32", "24"),
        integer("hc_mult", 4, choices=(4,)),
        integer("hc_sinkhorn_iters", 20),
        real("hc_eps", 1e-6),
        real("norm_eps", 1e-6),
        result("y", "bfloat16", "b s d | t d"),
        result("post", "float32", "b s 4 | t 4"),
        result("comb", "float32", "b s 4 4 | t 4 4"),
    ),
    (A2, A3, A5),
    adapter("moe/hc_pre", "definition"),
    demands=_hc_widths,
)
_WIDE = "float16 float16 float16 bfloat16 bfloat16 bfloat16 float32 float32 float32"
_MIXED = "float16 bfloat16 float32 float16 bfloat16 float32 float16 bfloat16 float32"
HC_POST = Operation(
    "hc_post",
    "aclnnHcPost",
    "a block's output and the streams before it mixed into the streams after it",
    (
        tensor("x", _WIDE, "b s d"),
        tensor("residual", _WIDE, "b s c d"),
        tensor("post", _MIXED, "b s c"),
        tensor("comb", _MIXED, "b s c c"),
        result("y", like("residual"), "b s c d"),
    ),
    (A2, A3, A5),
    adapter("moe/hc_post", "definition"),
)


def _gate_limits(bound: Bound) -> Iterator[str]:
    experts, k = bound.axes["e"], bound.given["k"]
    if not 1 <= k <= experts <= 2048:
        yield f"k must be from 1 to the experts of x, and those at most 2048: {k} of {experts}"
    for name in ("eps", "routed_scaling_factor"):
        if bound.given[name] <= 0:
            yield f"{name} must be positive, it is {bound.given[name]}"


_GATE_RESULTS = (
    result("y", like("x"), "r k"),
    result("expert_idx", "int32", "r k"),
    result("out", "float32", "r e"),
)
_K, _GROUPS, _COUNT = integer("k"), integer("k_group", 1), integer("group_count", 1)
_MODE = integer("group_select_mode", 0, choices=(0, 1))
_RENORM = integer("renorm", 0, choices=(0,))
_NORM = integer("norm_type", choices=(0, 1, 2))  # softmax, sigmoid, softplus
_OUT, _FACTOR, _EPS = (
    flag("out_flag", False),
    real("routed_scaling_factor", 1.0),
    real("eps", 1e-20),
)
GATE = Operation(
    "moe_gating_top_k",
    "aclnnMoeGatingTopK",
    "the best experts of every row and their weights",
    (
        tensor("x", _FLOATS, "r e"),
        maybe("bias", _FLOATS, "e"),
        *(_K, _GROUPS, _COUNT, _MODE, _RENORM, _NORM, _OUT, _FACTOR, _EPS),
        *_GATE_RESULTS,
    ),
    (A2, A3, A5),
    adapter("moe/moe_gating_top_k", "definition", "CANN brings one of the same name"),
    demands=_gate_limits,
)
HASH_GATE = Operation(
    "moe_gating_top_k_hash",
    "aclnnMoeGatingTopKHash",
    "the experts that a table gives to a token, and their weights",
    (
        tensor("x", _FLOATS + f" {_FLOATS}" * 3, "r e"),
        maybe("bias", _FLOATS + f" {_FLOATS}" * 3, "e"),
        maybe("input_ids", " ".join((["int64"] * 3 + ["int32"] * 3) * 2), "r"),
        maybe("tid2eid", " ".join(["int32"] * 6 + ["int64"] * 6), ""),
        *(_K, _GROUPS, _COUNT, _FACTOR, _EPS, _MODE, _RENORM, _NORM, _OUT),
        *_GATE_RESULTS,
    ),
    (A2, A3, A5),
    adapter("moe/moe_gating_top_k_hash", "call"),
    demands=_gate_limits,
)


def _halves(bound: Bound) -> tuple[int, ...]:
    x = bound.tensors["x"].shape
    return (*x[:-1], x[-1] // 2)


def _scales(bound: Bound) -> tuple[int, ...]:
    """One a group of 128; in mode 2 one of 32, in pairs."""
    *rows, width = _halves(bound)
    if bound.given["quant_mode"] == 2:
        return (*rows, -(-width // 64), 2)
    return (*rows, -(-width // 128))


def _scale_dtype(bound: Bound) -> str:
    mode = bound.given["quant_mode"]
    return (
        "float8_e8m0fnu" if mode == 2 or (mode == 3 and bound.given["ue8m0_scale"]) else "float32"
    )


def _fp8_of(bound: Bound) -> str:
    codes = {dtype.code: name for name, dtype in DTYPES.items()}
    return codes[bound.given["dst_type"]]


def _swiglu_widths(bound: Bound) -> Iterator[str]:
    width, step = bound.tensors["x"].shape[-1], 128 if bound.given["quant_mode"] == 2 else 256
    if width % step:
        yield (
            f"the last axis of x must be a multiple of {step} with quant_mode="
            f"{bound.given['quant_mode']}, it is {width}"
        )


SWIGLU = Operation(
    "swiglu_group_quant",
    "aclnnSwigluGroupQuant",
    "gated activation of experts, quantized by groups",
    (
        tensor("x", "float16 bfloat16", "_ _"),
        maybe("topk_weight", "float32", ""),
        maybe("group_index", "int64", "_"),
        # aclDataType of y: float8_e5m2 or float8_e4m3fn
        integer("dst_type", 36, choices=(35, 36)),
        integer("quant_mode", 1, choices=(1, 2, 3)),
        integer("group_size", 128, choices=(32, 128)),
        flag("round_scale", True),
        flag("ue8m0_scale", True),
        flag("output_origin", False),
        integer("group_list_type", 0),
        real("clamp_value", 0.0),
        result("y", _fp8_of, _halves),
        result("scale", _scale_dtype, _scales),
        result("y_origin", like("x"), _halves),
    ),
    (A5,),
    adapter("moe/swiglu_group_quant", "definition"),
    demands=_swiglu_widths,
)


def _lists_match(bound: Bound) -> Iterator[str]:
    """One weight and one scale for each expert of this device."""
    counts = {name: len(value) for name, value in bound.given.items() if isinstance(value, tuple)}
    if len(set(counts.values())) > 1:
        yield f"lists must have one entry for each expert here, they have {counts}"


def _combine(kind: str, columns: str, weights: str, biased: bool, masked: bool) -> Operation:
    """Rows to their experts' devices, both products and the way back, in one operation."""
    folder = {"": "", "BF16": "_bf16", "W4A8": "_w4_a8"}[kind]
    lists = [("weight1", weights), ("weight2", weights)]
    scales = [("scale1", "int64"), ("scale2", "int64")]
    scales += [("bias1", "float32"), ("bias2", "float32")] if biased else []
    return Operation(
        f"dispatch_ffn_combine{'_' + kind.lower() if kind else ''}",
        f"aclnnDispatchFFNCombine{kind}",
        "rows to their experts' devices, the experts, and the way back",
        (
            tensor("x", columns, "r d"),
            *(Argument(name, "tensors", dtypes, "", gaps=True) for name, dtypes in lists),
            tensor("expert_idx", "int32", "r k"),
            *(Argument(name, "tensors", dtypes, "") for name, dtypes in scales),
            tensor("probs", "float32", "r k"),
            *((maybe("x_active_mask", "bool", "_"),) if masked else ()),
            text("group"),
            integer("max_output_size"),
            *((real("swiglu_limit", 0.0),) if masked else ()),
            tensor("out", columns, "r d", inplace=True),
            tensor("expert_token_nums", "int32", "_", inplace=True),
        ),
        (A3,) if kind else (A2, A3),
        adapter(f"mc2/dispatch_ffn_combine{folder}", "header"),
        demands=_lists_match,
    )


COMBINE = (
    _combine("", "float16 bfloat16", "int8", biased=False, masked=True),
    _combine("BF16", "float16 bfloat16", "float16 bfloat16", biased=False, masked=False),
    _combine("W4A8", "float16 bfloat16", "int32", biased=True, masked=True),
)
DRAFT_INPUTS = Operation(
    "copy_and_expand_eagle_inputs",
    "aclnnCopyAndExpandEagleInputs",
    "tokens and positions of a block of drafts",
    (
        tensor("target_token_ids", "int32", "t"),
        tensor("target_positions", "int32", "t"),
        tensor("next_token_ids", "int32", "b"),
        tensor("query_start_loc", "int32", "b+1"),
        tensor("query_end_loc", "int32", "b"),
        integer("padding_token_id"),
        integer("parallel_drafting_token_id"),
        integer("num_padding_slots_per_request"),
        flag("shift_input_ids"),
        Argument("total_input_tokens", "integer",
                 derived=lambda tensors: tensors["target_token_ids"].shape[0]),
        tensor("out_input_ids", "int32", "n", inplace=True),
        tensor("out_positions", "int32", "n", inplace=True),
        tensor("out_is_rejected_token_mask", "int8", "n", inplace=True),
        tensor("out_is_masked_token_mask", "int8", "n", inplace=True),
        result("new_token_indices", "int32", "b*num_padding_slots_per_request"),
        result("hidden_state_mapping", "int32", "t"),
    ),
    (A2, A3),
    adapter("moe/copy_and_expand_eagle_inputs", "definition"),
)  # fmt: skip

TABLE = (ADD, HC_PRE, HC_POST, GATE, HASH_GATE, SWIGLU, *COMBINE, DRAFT_INPUTS)
