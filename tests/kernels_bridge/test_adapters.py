"""Adapters with stand-ins of their libraries: layouts, names, and the numbers of the twins."""

from __future__ import annotations

import functools
import re
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax import quant
from kernels_bridge import signatures
from kernels_bridge.adapters import deep_ep, deep_gemm, deep_select, flash_mla
from kernels_bridge.ops import attention, gemm, logits, pages, selection
from kernels_bridge.registry import KernelRefusedError
from tests.kernels_bridge import stand_ins


@pytest.fixture
def library(monkeypatch):
    """Puts a stand-in where its library would be imported from."""

    def put(name, module):
        monkeypatch.setitem(sys.modules, name, module)

    signatures.function_of.cache_clear()
    yield put
    signatures.function_of.cache_clear()


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


@functools.cache
def program(function, static):
    """Compiled once for all operands of equal shapes."""
    return jax.jit(functools.partial(function, **dict(static)))


def against_twin(op, name, *operands, tolerance, **static):
    """The implementation inside a program, next to the twin; accepted and ruled like in a call."""
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
    rule = op.abstract(*shapes, **static)
    impl = op.impl(name)
    assert not impl.accepts(*shapes, **static)
    kept = tuple(static.items())
    got, want = (program(function, kept)(*operands) for function in (impl.run, op.twin))
    for kind, x, y in zip(*map(jax.tree.leaves, (rule, got, want)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype) == (kind.shape, kind.dtype)
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
    return got


# -- attention -------------------------------------------------------------------------------------

BF16 = ml_dtypes.bfloat16
ROUNDED = 1 / 128  # of a bfloat16 result of size 1 and below


def lists(seed, count, window, selected, rows):
    """Ids with strangers among them; the last query sees nobody."""
    rng = np.random.default_rng(seed)
    own = rng.integers(-2, rows + 3, (count, window)).astype(np.int32)
    extra = rng.integers(-2, rows + 3, (count, selected)).astype(np.int32)
    own[-1], extra[-1] = -1, rows
    return own, extra


def test_rows_are_attended_in_one_list_of_whole_steps(library):
    library("flash_mla", stand_ins.flash_mla(stand_ins.flash_mla_hopper))
    own, extra = lists(1, 3, 5, 17, 40)
    q, rows, sink = normal(2, 3, 64, 512, dtype=BF16), normal(3, 40, 512, dtype=BF16), normal(4, 64)
    out, lse = against_twin(
        attention.attend_rows, "flash_mla", q, rows, own, extra, sink, tolerance=ROUNDED, scale=0.05
    )
    assert not np.asarray(out[-1], np.float32).any()
    assert np.isneginf(lse[-1]).all()


@pytest.mark.parametrize(
    ("name", "decode", "own_bytes", "extra_bytes"),
    [
        ("flash_mla_sm100", stand_ins.flash_mla_pip, 528, 288),
        ("flash_mla_sm100", stand_ins.flash_mla_pip, 528, 0),
        ("flash_mla_sm90", stand_ins.flash_mla_hopper, 584, 584),
    ],
)
def test_pages_are_attended_where_they_lie(
    library, monkeypatch, name, decode, own_bytes, extra_bytes
):
    library("flash_mla", stand_ins.flash_mla(decode))
    monkeypatch.setattr(flash_mla.dlpack, "multiprocessors", lambda: 12)
    size, ids = 4, lists(5, 6, 64, 64, 12)
    pack = jax.jit(pages.pack_pages, static_argnums=(1, 2))
    table = np.asarray(pack(normal(6, 12, 512), size, own_bytes))
    further = np.asarray(pack(normal(7, 12, 512), size, extra_bytes or 288))
    own, extra = (each.reshape(3, 2, -1) for each in ids)
    if not extra_bytes:
        further, extra = further[:0], extra[:, :, :0]
    q, sink = normal(8, 3, 2, 64, 512, dtype=BF16), normal(9, 64)
    against_twin(attention.attend_pages, name, q, table, own, further, extra, sink,
                 tolerance=ROUNDED, scale=0.05)  # fmt: skip


# -- products --------------------------------------------------------------------------------------


def quantized(seed, *shape, group, block, packed):
    """e4m3 codes and scales, float32 or e8m0."""
    rng = np.random.default_rng(seed)
    codes = (4 * rng.normal(size=shape)).astype(ml_dtypes.float8_e4m3fn)
    *lead, n, k = shape
    scale = rng.integers(121, 127, (*lead, -(-n // block), -(-k // group)))
    return codes, scale.astype(np.uint8) if packed else np.exp2(scale - 127).astype(np.float32)


@pytest.mark.parametrize(("name", "group", "block"), [("sm90", 128, 128), ("sm100", 32, 32)])
def test_products_get_their_scales_as_they_want_them(library, name, group, block):
    library("deep_gemm", stand_ins.deep_gemm())
    packed, name = name == "sm100", f"deep_gemm_{name}"
    make = functools.partial(quantized, group=group, packed=packed)
    static = {"group": group, "block": block}
    b = make(1, 3, 160, 272, block=block)
    one = b[0][0], b[1][0]
    a = make(2, 5, 272, block=1)
    against_twin(gemm.fp8_gemm, name, *a, *one, tolerance=ROUNDED, **static)
    a = make(3, 256, 272, block=1)
    expert = np.repeat(np.array([2, 0], np.int32), 128)
    expert[100:128] = -1
    against_twin(gemm.grouped_contiguous, name, *a, *b, expert, tolerance=ROUNDED, **static)
    a, count = make(4, 3, 6, 272, block=1), np.array([6, 0, 2], np.int32)
    against_twin(gemm.grouped_masked, name, *a, *b, count, tolerance=ROUNDED, expected=2, **static)


# -- the indexer -----------------------------------------------------------------------------------

SCORES = [stand_ins.fp8_fp4_mqa_logits, stand_ins.fp8_fp4_mqa_logits_upstream]
FIRST, LAST = np.array([0, 3, 5], np.int32), np.array([9, 7, 5], np.int32)


@pytest.mark.parametrize("scores", SCORES)
def test_scores_are_put_back_to_their_columns(library, scores):
    library("deep_gemm", stand_ins.deep_gemm(scores))
    fp8 = ml_dtypes.float8_e4m3fn
    q, keys = normal(1, 3, 32, 64, dtype=fp8), normal(2, 9, 64, dtype=fp8)
    against_twin(logits.index_logits, "deep_gemm_sm90", q, keys, np.abs(normal(3, 9)),
                 normal(4, 3, 32), FIRST, LAST, tolerance=1e-4)  # fmt: skip


@pytest.mark.parametrize("scores", SCORES)
def test_packed_vectors_are_cut_into_codes_and_words(library, scores):
    library("deep_gemm", stand_ins.deep_gemm(scores))
    q, keys = map(
        np.asarray, map(jax.jit(quant.pack_index), (normal(1, 3, 16, 128), normal(2, 9, 128)))
    )
    weight = normal(3, 3, 16, dtype=BF16).astype(np.float32)
    got = against_twin(logits.index_logits_packed, "deep_gemm_sm100", q, keys, weight, FIRST, LAST,
                       tolerance=ROUNDED)  # fmt: skip
    assert np.isneginf(got[2]).all()


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_ties_are_taken_in_our_order(library, dtype):
    """Few values, so that the stand-in's choice among equals is another one in most rows."""
    library("deep_select", stand_ins.deep_select())
    rng = np.random.default_rng(3)
    x = rng.integers(-3, 3, (7, 41)).astype(np.float32)
    x[1] = np.where(x[1] == 0, -0.0, x[1])
    end = np.array([41, 30, 9, 5, 1, 41, 41], np.int32)
    distinct = np.stack([rng.permutation(41) for _ in end]).astype(np.float32)
    with_nan = distinct.copy()
    with_nan[5, 3] = np.nan
    for each in (x, distinct, with_nan):
        got = against_twin(selection.select_best, "deep_select", each.astype(dtype), end,
                           tolerance=0, k=9)  # fmt: skip
    assert 3 in np.asarray(got)[5]


# -- signatures ------------------------------------------------------------------------------------

PUBLISHED = [
    (flash_mla.SPARSE, stand_ins.flash_mla_sparse_fwd),
    (flash_mla.BLACKWELL_PAGES, stand_ins.flash_mla_pip),
    (flash_mla.HOPPER_PAGES, stand_ins.flash_mla_hopper),
    (deep_gemm.PRODUCTS["fp8_gemm"], stand_ins.fp8_gemm_nt),
    (deep_gemm.PRODUCTS["grouped_masked"], stand_ins.m_grouped_fp8_gemm_nt_masked),
    (deep_gemm.LOGITS, stand_ins.fp8_fp4_mqa_logits),
    (deep_gemm.LOGITS, stand_ins.fp8_fp4_mqa_logits_upstream),
    (deep_select.TOPK, stand_ins.topk),
]


@pytest.mark.parametrize(("published", "function"), PUBLISHED)
def test_a_function_is_compared_with_what_was_published(published, function):
    assert signatures.difference(function, published) is None
    assert "has no parameter" in (signatures.difference(lambda x: x, published) or "")


def test_a_function_in_c_is_read_in_its_docstring():
    def native(*args):
        """fp8_gemm_nt(a: tuple, b: tuple, d: Tensor, c: object = None, recipe: object = None)"""

    native.__signature__ = "none"  # as of a builtin: inspect gives up
    published = deep_gemm.PRODUCTS["fp8_gemm"]
    assert signatures.difference(native, published) is None
    native.__doc__ = "fp8_gemm_nt(a: tuple, b: tuple) -> None"
    assert signatures.difference(native, published) == "it has no parameter d, recipe"


def test_another_release_is_refused_by_name(library):
    module = stand_ins.deep_gemm()
    module.fp8_gemm_nt = lambda lhs, rhs, out: None
    library("deep_gemm", module)
    with pytest.raises(KernelRefusedError, match=r"is not the one .* no parameter a, b, d, recipe"):
        signatures.function_of(deep_gemm.PRODUCTS["fp8_gemm"])
    library("deep_gemm", None)
    with pytest.raises(KernelRefusedError, match=r"fp8_gemm_nt cannot be had: .*build and install"):
        signatures.function_of(deep_gemm.PRODUCTS["fp8_gemm"])


def test_what_an_adapter_passes_must_be_published():
    with pytest.raises(ValueError, match=r"EPBuffer.dispatch has no parameters \['row'\]"):
        signatures.signature(deep_ep.LIBRARY, "EPBuffer.dispatch", "x", "row")


@pytest.mark.parametrize(
    ("accepts", "shapes", "static", "said"),
    [
        (flash_mla.accepts_blackwell,
         ((2, 1, 64, 512), (3, 4, 288), (2, 1, 64), (0, 4, 288), (2, 1, 0), (64,)), {},
         "pages of 528 bytes per token, not 288"),
        (flash_mla.accepts_blackwell,
         ((2, 1, 64, 512), (3, 4, 528), (2, 1, 65), (3, 4, 584), (2, 1, 64), (64,)), {},
         "ids in blocks of 64, not 65.* further pages of 528 or 288 bytes per token, not 584"),
        (flash_mla.accepts_hopper,
         ((2, 1, 64, 512), (3, 4, 584), (2, 1, 64), (3, 4, 584), (2, 1, 0), (64,)), {},
         "extra and extra_pages together"),
        (flash_mla.accepts_rows, ((0, 64, 512), (9, 512), (0, 4), (0, 4), (64,)), {}, "no empty"),
        (deep_select.accepts, ((3, 5000), (3,)), {"k": 4097}, "k up to 4096, not 4097"),
        (deep_gemm.accepts_logits, ((3, 16, 48), (9, 48), (9,), (3, 16), (3,), (3,)), {},
         "32 or 64 heads, not 16; .*128 values, not 48"),
        (deep_gemm.accepts_packed, ((3, 24, 36), (9, 36), (3, 24), (3,), (3,)), {},
         "64 heads, not 24; .*not of 36 bytes"),
        (functools.partial(deep_gemm.accepts_contiguous, False),
         ((130, 256), (130, 2), (3, 128, 256), (3, 1, 2), (130,)), {"group": 32, "block": 1},
         "1 x 128 and 128 x 128, not 32 and 1 rows; .*tiles of 128 .*not 130"),
        (functools.partial(deep_gemm.accepts_pair, True),
         ((5, 250), (5, 4), (160, 250), (5, 4)), {"group": 64, "block": 32},
         "uint8 e8m0 scales, not float32; .*32 or 128 columns, not 64; .*16 bytes, not 250"),
    ],
)  # fmt: skip
def test_what_a_library_would_refuse_is_said_before_it_is_called(accepts, shapes, static, said):
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = "; ".join(accepts(*given, **static))
    assert re.search(said, found), found
