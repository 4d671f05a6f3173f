"""The binding of CANN's operations against libraries that record what they are called with."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from ascend import aclnn
from ascend.aclnn import devices, operations
from tests.ascend import stand_in
from tests.ascend.stand_in import STREAM, Host, zeros

FP8, BF16, F32, I32 = "float8_e4m3fn", "bfloat16", "float32", "int32"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return stand_in.build(tmp_path_factory.mktemp("cann"))


@pytest.fixture
def stub(built):
    """The libraries, with nothing recorded; after a test nothing is left and nothing was wrong."""
    built.reset()
    yield built
    assert (built.living(), built.executors(), built.wrong()) == (0, 0, 0)


@pytest.fixture
def library(stub):
    return aclnn.Library([str(stub.half), str(stub.custom), str(stub.base)])


def run(name, library, device=None, **given):
    return aclnn.call(aclnn.BY_NAME[name], library, device or Host(), given)


def at(array):
    return hex(array.__array_interface__["data"][0])


def described(array, code, form, step=()):
    """The stub's line for a dense array; step: strides, where it is not dense."""
    shape = ",".join(map(str, array.shape))
    strides = step or aclnn.tensors.contiguous_strides(array.shape)
    count = ",".join(map(str, strides))
    storage = sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) + 1
    return f"tensor {code} ({shape})({count})+0 f{form} of ({storage}) at {at(array)}"


def attention(tokens=3):
    """Arguments of paged attention over FP8 caches with padded pages, for rows of two requests."""
    pages = zeros((5, 2 * 16 * 640), FP8)
    cache = pages[:, : 16 * 640].reshape(5, 16, 640)[:, :, None, :]
    return {
        "q": zeros((tokens, 64, 512), BF16),
        "ori_kv": cache,
        "ori_block_table": zeros((2, 4), I32),
        "cu_seqlens_q": zeros((3,), I32),
        "seqused_kv": zeros((2,), I32),
        "sinks": zeros((64,), F32),
        "metadata": zeros((1024,), I32),
        "softmax_scale": 0.25,
        "cmp_ratio": 1,
        "layout_q": "TND",
    }


# --- calls -------------------------------------------------------------------------------------


def test_the_smallest_call_is_recorded_whole(stub, library):
    x, y = zeros((3, 5), F32), zeros((3, 5), F32)
    out = run("add", library, self=x, other=y, alpha=0.5)
    assert (out.shape, out.dtype.name) == ((3, 5), F32)
    assert stub.log() == [
        "aclnnAdd",
        f"  self = {described(x, 0, 2)}",
        f"  other = {described(y, 0, 2)}",
        "  alpha = scalar 11 0.5",
        f"  out = {described(out, 0, 2)}",
        "aclnnAdd workspace null size 0 executor aclnnAddGetWorkspaceSize "
        f"stream {STREAM:#x} alive 4",
        *["aclDestroyTensor", "aclDestroyScalar", "aclDestroyTensor", "aclDestroyTensor"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("alpha", "text"), [(2, "9 2"), (True, "12 1"), (-1.5, "11 -1.5"), (None, "9 1")]
)
def test_a_scalar_has_the_dtype_of_its_value(stub, library, alpha, text):
    run("add", library, self=zeros((3,), BF16), other=zeros((3,), BF16), alpha=alpha)
    assert f"  alpha = scalar {text}" in stub.log()


def test_thirty_arguments_arrive_in_the_order_of_the_header(stub, library):
    device, given = Host(), attention()
    out, lse = run("kv_quant_sparse_attn_sharedkv", library, device, **given)
    assert (out.shape, out.dtype.name, lse.shape) == ((3, 64, 512), BF16, (0,))
    log = stub.log()
    expected = {
        "q": described(given["q"], 27, 47),
        "ori_kv": described(given["ori_kv"], 36, 0, (20480, 640, 640, 1)),
        **dict.fromkeys(("cmp_kv", "ori_sparse_indices", "cmp_sparse_indices"), "null"),
        "ori_block_table": described(given["ori_block_table"], 3, 2),
        "cmp_block_table": "null",
        "cu_seqlens_q": described(given["cu_seqlens_q"], 3, 2),
        **dict.fromkeys(("cu_seqlens_ori_kv", "cu_seqlens_cmp_kv", "seqused_q"), "null"),
        "seqused_kv": described(given["seqused_kv"], 3, 2),
        "sinks": described(given["sinks"], 0, 2),
        "metadata": described(given["metadata"], 3, 2),
        "kv_quant_mode": "1",
        "tile_size": "64",
        "rope_head_dim": "64",
        "softmax_scale": "0.25",
        "cmp_ratio": "1",
        "ori_mask_mode": "4",
        "cmp_mask_mode": "3",
        "ori_win_left": "127",
        "ori_win_right": "0",
        "layout_q": "'TND'",
        "layout_kv": "'PA_ND'",
        "ori_kv_stride0": "20480",
        "cmp_kv_stride0": "0",
        "return_softmax_lse": "0",
        "attn_out": described(out, 27, 47),
    }
    assert log[0] == "aclnnKvQuantSparseAttnSharedkv"
    assert log[1:30] == [f"  {name} = {value}" for name, value in expected.items()]
    assert log[30].startswith("  softmax_lse = tensor 0 (0)(1)+0 f2 of (0)")
    assert "workspace given size 4096" in log[31]
    assert f"stream {STREAM:#x} alive 9" in log[31]
    assert device.made == [((3, 64, 512), BF16), ((0,), F32), ((4096,), "uint8")]


def test_what_is_left_out_may_have_to_be_an_empty_tensor(stub, library):
    given = {"num_heads_q": 64, "head_dim": 128, "batch_size": 2, "max_seqlen_q": 1,
             "max_seqlen_k": 9, "sparse_count": 512, "cmp_ratio": 4}  # fmt: skip
    out = run("quant_lightning_indexer_metadata", library, **given)
    assert out.shape == (1024,)
    log = [line.partition(" of ")[0] for line in stub.log()]
    assert log[1:3] == [
        f"  actual_seq_lengths_{of} = tensor 3 (0)(1)+0 f2" for of in ("query", "key")
    ]
    numbers = [line.partition(" = ")[2] for line in log[3:18]]
    limit = str(2**63 - 1)
    assert numbers == ["64", "1", "128", "0", "0", "2", "1", "9", "'BSND'", "'PA_BSND'", "512",
                       "3", limit, limit, "4"]  # fmt: skip


def test_in_place_arguments_are_passed_and_not_returned(stub, library):
    x = zeros((3, 1, 5, 128), BF16)
    angles = zeros((3, 1, 1, 64), F32)
    assert run("inplace_partial_rotary_mul", library, x=x, cos=angles, sin=angles, mode=1,
               partial_slice=[64, 128]) is None  # fmt: skip
    log = stub.log()
    assert log[1] == f"  x = {described(x, 27, 0)}"
    assert log[4:6] == ["  mode = 1", "  partial_slice = ints (64,128)"]
    assert "alive 4" in log[6]


def test_a_list_owns_its_tensors(stub, library):
    def each(shape, dtype, count=2):
        return [zeros(shape, dtype) for _ in range(count)]

    given = {
        "x": zeros((3, 32), BF16), "expert_idx": zeros((3, 7), I32), "probs": zeros((3, 7), F32),
        "weight1": each((32, 96), "int8"), "weight2": each((96, 32), "int8"),
        "scale1": each((96,), "int64"), "scale2": each((32,), "int64"), "group": "experts",
        "max_output_size": 11, "out": zeros((3, 32), BF16), "expert_token_nums": zeros((2,), I32),
    }  # fmt: skip
    assert run("dispatch_ffn_combine", library, Host("ascend910_93"), **given) is None
    log = stub.log()
    first, second = given["weight2"]
    assert log[5:8] == ["  weight2 = list of 2", f"  weight2[0] = {described(first, 2, 2)}",
                        f"  weight2[1] = {described(second, 2, 2)}"]  # fmt: skip
    assert "  group = 'experts'" in log
    assert log.count("aclDestroyTensorList") == 4
    with pytest.raises(aclnn.OperandRefusedError, match="one entry for each expert here"):
        run(
            "dispatch_ffn_combine",
            library,
            Host("ascend910_93"),
            **given | {"scale2": each((32,), "int64", 3)},
        )


def test_both_phases_come_from_one_library(stub, library):
    """The package that is looked into first has half of the operation; its half is never called."""
    given = {"x": zeros((3, 4, 4096), BF16), "hc_fn": zeros((24, 16384), F32),
             "hc_scale": zeros((3,), F32), "hc_base": zeros((24,), F32), "hc_eps": 0.5}  # fmt: skip
    y, post, comb = run("hc_pre", library, **given)
    assert (y.shape, post.shape, comb.shape) == ((3, 4096), (3, 4), (3, 4, 4))
    assert "  hc_eps = 0.5" in stub.log()
    assert "  norm_eps = 1e-06" in stub.log()


def test_wrappers_have_the_signature_of_the_table(stub, library):
    rotary = aclnn.bind(aclnn.BY_NAME["inplace_partial_rotary_mul"], library, Host())
    assert str(inspect.signature(rotary)) == (
        "(*, x: Any, cos: Any, sin: Any, partial_slice: tuple[int, ...], mode: int = 0) -> None"
    )
    assert "Rotary positions for a part of every head, in place" in str(rotary.__doc__)
    assert "cos: tensor, float16 float32 bfloat16 float32 float32, [b _ _ r]" in str(rotary.__doc__)
    several = inspect.signature(aclnn.bind(aclnn.BY_NAME["hc_pre"], library, Host()))
    assert several.return_annotation == tuple[Any, Any, Any]


# --- errors of CANN ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "phase", "status"),
    [
        ("aclnnAddGetWorkspaceSize", "workspace size", 161002),
        ("aclnnAdd", "execution", 507011),
        ("aclCreateTensor", "descriptor", 0),
        ("aclCreateScalar", "descriptor", 0),
        ("aclDestroyScalar", "release", 7),
    ],
)
def test_a_refusal_of_cann_is_a_typed_error_and_leaves_nothing(stub, library, fails, phase, status):
    stub.reset(fails, status or 1)
    x = zeros((3,), F32)
    with pytest.raises(aclnn.CallFailedError) as caught:
        run("add", library, self=x, other=x)
    error = caught.value
    assert (error.operation, error.phase, error.status) == ("add", phase, status)
    assert error.detail == "EZ9999: the stub was told so"
    assert f"add: {phase}" in str(error)
    assert error.detail in str(error)


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_an_executor_that_gets_no_workspace_is_destroyed(stub, library, kind):
    class Full(Host):
        def empty(self, shape, dtype):
            if dtype == "uint8":
                raise kind("no room")
            return super().empty(shape, dtype)

    with pytest.raises(kind, match="no room"):
        run("kv_quant_sparse_attn_sharedkv", library, Full(), **attention())
    destroyed = [line for line in stub.log() if line.startswith("aclDestroyAclOpExecutor")]
    assert destroyed == [
        "aclDestroyAclOpExecutor aclnnKvQuantSparseAttnSharedkvGetWorkspaceSize"
    ]  # fmt: skip


@pytest.mark.parametrize("fails", ["aclCreateTensorList", "aclnnDispatchFFNCombine"])
def test_members_of_a_list_are_destroyed_once_when_a_call_fails(stub, library, fails):
    stub.reset(fails, 5)
    test = test_a_list_owns_its_tensors
    with pytest.raises(aclnn.CallFailedError, match="told so"):
        test(stub, library)


def test_an_error_of_release_does_not_hide_the_first(stub, library):
    """Both the call and what follows it fail: the call's error is the one to read."""
    stub.reset("aclnnAdd aclDestroyTensor", 3)
    x = zeros((3,), F32)
    with pytest.raises(aclnn.CallFailedError, match="execution"):
        run("add", library, self=x, other=x)
    assert stub.log()[-4:].count("aclDestroyTensor") == 3


# --- what is refused before anything is called ---------------------------------------------------

REFUSED = [
    ({"q": None}, "needs q, which was not given; it takes q, ori_kv"),
    ({"k": 3}, "has no argument k; it takes q"),
    ({"q": 3}, "q must be an array of the device: a numpy array, not int"),
    ({"q": zeros((3, 64, 512), "float16")}, "q must be of bfloat16; float16 came: cast it"),
    ({"sinks": zeros((63,), F32)}, r"sinks must be 64 long in axis 0 \(h, by q \(3, 64, 512\)\)"),
    ({"q": zeros((3, 1, 64, 512), BF16)}, r'3 axes \[t, h, 512\] as layout_q="TND" says'),
    ({"q": zeros((3, 64, 256), BF16)}, "q must be 512 long in axis 2; bfloat16"),
    ({"q": zeros((3, 65, 512), BF16)[:, 1:]}, r"q must be contiguous; strides \(33280, 512, 1\)"),
    ({"q": zeros((3, 64, 512), BF16, shift=2)}, "q must be aligned to 32 bytes; address 0x"),
    ({"cu_seqlens_q": zeros((4,), I32)}, r"cu_seqlens_q must be 3 long in axis 0 \(b\+1, by ori_b"),
    ({"cu_seqlens_q": None}, "needs cu_seqlens_q, which is left out"),
    ({"ori_kv": None}, "ori_kv must be given, with or without cmp_kv"),
    ({"ori_kv": zeros((5, 24, 1, 640), FP8)}, "multiple of 16 tokens up to 1024, not 24"),
    ({"ori_kv": zeros((5, 16, 2, 640), FP8)[:, :, :1]}, "dense behind axis 0; strides"),
    ({"cmp_sparse_indices": zeros((3, 1, 512), I32)}, "select from cmp_kv, which is left out"),
    ({"softmax_scale": "1"}, "softmax_scale must be a float; str '1' came"),
    ({"softmax_scale": None}, "needs softmax_scale"),
    ({"cmp_ratio": 2}, "cmp_ratio must be 1 or 4 or 128; 2 came"),
    ({"cmp_ratio": True}, "cmp_ratio must be an int of 64 bits; bool True came"),
    ({"layout_q": "NTD"}, "layout_q must be 'BSND' or 'TND'; 'NTD' came"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda each: str(each)[:30])
def test_an_operand_that_does_not_fit_is_refused_by_name(stub, library, change, message):
    given = {**attention(), **change}
    with pytest.raises(aclnn.OperandRefusedError, match=message):
        run("kv_quant_sparse_attn_sharedkv", library, **given)
    assert stub.log() == []


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda two: memoryview(bytes(two))])
def test_bytes_are_no_sequence_of_ints(stub, library, kind):
    """Their elements are ints, but whoever passes them means something else."""
    x, angles = zeros((3, 1, 5, 64), BF16), zeros((3, 1, 1, 64), F32)
    with pytest.raises(
        aclnn.OperandRefusedError, match=r"partial_slice must be a sequence of ints; .* came"
    ):
        run("inplace_partial_rotary_mul", library, x=x, cos=angles, sin=angles,
            partial_slice=kind([0, 64]))  # fmt: skip
    assert stub.log() == []


def test_dtypes_go_together_as_columns(stub, library):
    x, wide, narrow = (
        zeros((3, 1, 5, 64), BF16),
        zeros((3, 1, 1, 64), F32),
        zeros((3, 1, 1, 64), BF16),
    )
    rotary = aclnn.bind(aclnn.BY_NAME["inplace_partial_rotary_mul"], library, Host())
    for angles in (wide, narrow):
        rotary(x=x, cos=angles, sin=angles, partial_slice=(0, 64))
    with pytest.raises(
        aclnn.OperandRefusedError,
        match="sin must be of bfloat16 beside x of bfloat16, cos of bfloat16",
    ):
        rotary(x=x, cos=narrow, sin=wide, partial_slice=(0, 64))
    with pytest.raises(
        aclnn.OperandRefusedError, match=r"\(begin, end\) within the last axis of x, 64"
    ):
        rotary(x=x, cos=wide, sin=wide, partial_slice=(32, 96))
    with pytest.raises(aclnn.OperandRefusedError, match="covers 32 numbers and cos has 64"):
        rotary(x=x, cos=wide, sin=wide, partial_slice=(32, 64))


def test_an_array_of_another_device_is_refused(stub, library):
    class Elsewhere(Host):
        place = "npu:0"

    with pytest.raises(aclnn.OperandRefusedError, match="self must be on npu:0; one on cpu came"):
        run("add", library, Elsewhere(), self=zeros((3,), F32), other=zeros((3,), F32))


def test_an_operation_without_a_kernel_for_the_chip_is_unavailable(stub, library):
    with pytest.raises(aclnn.UnavailableError, match=r"no kernel for ascend910b.*ascend950"):
        run("kv_quant_sparse_attn_sharedkv", library, Host("ascend910b"), **attention())


# --- libraries -----------------------------------------------------------------------------------


def test_the_search_path_is_that_of_the_adapters(built, tmp_path):
    opp = tmp_path / "opp"
    for vendor in ("first", "second"):
        place = opp / "vendors" / vendor / aclnn.library.CUSTOM
        place.parent.mkdir(parents=True)
        place.touch()
    (opp / "vendors" / "config.ini").write_text("[x]\nload_priority=second,gone,first\n")
    packages = f"{built.half.parents[2]}:/nowhere:{built.custom.parents[2]}"
    found = aclnn.search_path({"ASCEND_CUSTOM_OPP_PATH": packages, "ASCEND_OPP_PATH": str(opp)})
    assert [str(each).removeprefix(str(tmp_path)) for each in found[:4]] == [
        str(built.half), str(built.custom),
        f"/opp/vendors/second/{aclnn.library.CUSTOM}", f"/opp/vendors/first/{aclnn.library.CUSTOM}",
    ]  # fmt: skip
    assert found[4:] == aclnn.library.OWN == aclnn.search_path({"ASCEND_OPP_PATH": "/nowhere"})


def test_a_missing_operation_says_where_it_was_looked_for(built):
    library = aclnn.Library(["/nowhere/libopapi.so", str(built.custom)])
    assert library.has("aclnnHcPre")
    assert not library.has("aclnnHcPost")
    with pytest.raises(aclnn.UnavailableError) as caught:
        run("hc_post", library, x=None)
    for part in (
        "aclnnHcPostGetWorkspaceSize and aclnnHcPost",
        str(built.custom),
        "/nowhere",
        "set_env.sh",
    ):
        assert part in str(caught.value)


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", aclnn.OPERATIONS, ids=lambda op: op.name)
def test_every_line_of_the_table_holds_together(op):
    names = [each.name for each in op.arguments]
    assert len(set(names)) == len(names)
    given = [each for each in op.arguments if each.kind in ("tensor", "tensors")]
    columns = {len(str(each.dtypes).split()) for each in given} - {1}
    assert len(columns) <= 1
    for each in op.arguments:
        if isinstance(each.dtypes, str):
            assert set(each.dtypes.split()) <= set(aclnn.DTYPES), each.name
        assert (each.kind in ("tensor", "tensors", "result")) == bool(each.dtypes), each.name
        assert (
            each.default is operations.REQUIRED or not each.choices or each.default in each.choices
        )
    assert "never run by this project" in op.source
    assert "never run" in aclnn.describe(op)
    inspect.signature(aclnn.bind(op, aclnn.Library([]), Host()))


def test_names_are_unique_and_those_without_a_950_are_known():
    assert len(aclnn.BY_NAME) == len(aclnn.OPERATIONS)
    assert {op.name for op in aclnn.OPERATIONS if "ascend950" not in op.chips} == {
        "scatter_nd_update", "dispatch_ffn_combine", "dispatch_ffn_combine_bf16",
        "dispatch_ffn_combine_w4a8", "copy_and_expand_eagle_inputs",
    }  # fmt: skip


# --- arrays and devices --------------------------------------------------------------------------


class FakeTorch:
    """A torch tensor, as far as the binding asks."""

    shape, dtype, device = (2, 3), "torch.bfloat16", "npu:1"

    def __getattr__(self, name):
        given = {"stride": (8, 1), "storage_offset": 16, "element_size": 2, "nbytes": 80,
                 "data_ptr": 4096, "untyped_storage": self}  # fmt: skip
        return lambda: given[name]


def test_a_torch_tensor_is_described_by_its_storage():
    assert aclnn.of_torch(FakeTorch()) == aclnn.Tensor(4096, (2, 3), (8, 1), BF16, 16, 40, "npu:1")
    assert aclnn.of_torch(FakeTorch()).address == 4096 + 32


def test_torch_itself_is_described_alike():
    torch = pytest.importorskip("torch", reason="the extra `kernels` brings torch")
    array = torch.zeros(7, 5, dtype=torch.bfloat16)[2:4, :3]
    found = aclnn.of_torch(array)
    assert (found.shape, found.strides, found.offset, found.elements) == ((2, 3), (5, 1), 10, 35)
    assert found.address == array.data_ptr()
    assert found.dtype == BF16


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("Ascend950PR_9599", "ascend950"),
        ("Ascend910_9391", "ascend910_93"),
        ("Ascend910B3", "ascend910b"),
    ],
)
def test_chips_are_known_by_their_devices(name, chip):
    assert devices.chip_of(name) == chip


def test_an_unknown_chip_and_a_missing_torch_npu_are_unavailable():
    with pytest.raises(aclnn.UnavailableError, match="calls itself 'Ascend310P3'"):
        devices.chip_of("Ascend310P3")
    with pytest.raises(aclnn.UnavailableError, match=r"no NPU can be reached.*install CANN"):
        aclnn.npu()


def test_strides_of_axes_with_one_entry_do_not_count():
    array = np.zeros((3, 1, 5), np.float32)
    other = np.lib.stride_tricks.as_strided(array, (3, 1, 5), (20, 4096, 4))
    assert aclnn.of_numpy(other).is_dense(gaps=False)
