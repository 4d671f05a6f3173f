"""The C++ kernels against float64, against each other, and over blocks, threads and numbers."""

from __future__ import annotations

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_bridge import ffi
from kernels_bridge.building import NoKernelsError, find_compiler

try:
    find_compiler()
except NoKernelsError as error:
    pytest.skip(str(error), allow_module_level=True)

TYPES = (ml_dtypes.bfloat16, np.float32)


def normal(seed: int, *shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


def as_bits(x: np.ndarray) -> np.ndarray:
    """Of bfloat16 its bits, as a decoded cache and decoded weights hold it."""
    return x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x


@functools.partial(jax.jit, static_argnames="f")
def run(f, *operands):
    return f(*operands)


# -- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("t", "g", "n", "k"), [(7, 3, 5, 21), (13, 1, 9, 64), (1, 2, 17, 8)])
def test_products_are_those_of_float64(dtype, t, g, n, k):
    x, w = normal(1, t, g, k, dtype=dtype), normal(2, g * n, k, dtype=dtype)
    wide = w.astype(np.float64).reshape(g, n, k)
    want = np.einsum("tgk,gnk->tgn", x.astype(np.float64), wide)
    got = run(ffi.product, x, w)
    np.testing.assert_allclose(got, want, atol=1e-5 * k**0.5)
    np.testing.assert_array_equal(run(ffi.product, x, as_bits(w)), got)


@pytest.mark.parametrize("dtype", TYPES)
def test_neither_blocks_nor_threads_enter_a_product(dtype):
    """131 rows of 65 columns are shared among threads; alone each takes other blocks."""
    x, w = normal(3, 131, 1, 203, dtype=dtype), normal(4, 65, 203, dtype=dtype)
    whole = np.asarray(run(ffi.product, x, w))
    for rows in (slice(0, 1), slice(5, 7), slice(9, 12), slice(20, 26), slice(40, 53)):
        np.testing.assert_array_equal(run(ffi.product, x[rows], w), whole[rows])
        np.testing.assert_array_equal(run(ffi.product, x[rows], w[11:14]), whole[rows, :, 11:14])


def eight_lanes(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [T, K] times w [N, K], both bfloat16, whose products are exact in float32: sums in eight
    lanes over ascending k, then over the lanes, ((0+4) + (2+6)) + ((1+5) + (3+7)).
    """
    wide = [np.pad(a.astype(np.float32), ((0, 0), (0, -a.shape[1] % 8))) for a in (x, w)]
    sums = np.zeros((len(x), len(w), 8), np.float32)
    for k in range(0, wide[0].shape[1], 8):
        sums = sums + wide[0][:, None, k : k + 8] * wide[1][None, :, k : k + 8]
    four = sums[..., :4] + sums[..., 4:]
    return (four[..., 0] + four[..., 2]) + (four[..., 1] + four[..., 3])


@pytest.mark.parametrize("k", [8, 72, 203])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 11, 12, 29])
def test_the_order_of_a_sum_is_the_same_on_every_processor(rows, k):
    """Every height of a block, with columns that fill its width and some that do not."""
    x, w = (normal(seed, n, k, dtype=ml_dtypes.bfloat16) for seed, n in ((17, rows), (18, 23)))
    np.testing.assert_array_equal(run(ffi.product, x[:, None], w)[:, 0], eight_lanes(x, w))


def test_a_kernel_of_whole_calls_is_not_mapped():
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(lambda x: ffi.best(x, 2))(normal(1, 3, 4, 50))


# -- attention and the indexer, where the cache has its vectors ------------------------------------

SLOTS, RING, WINDOW, PICKED, HEADS, WIDTH = 3, 9, 6, 4, 5, 20
PAGE, PAGES = 4, 7  # tokens of a page, pages of all slots


def field(dtype):
    """Rows of two slots that go on from position 7, an empty ring place never read, pages mixed."""
    position = np.array([7, 8, 9, 10, 7, 8, 0], np.int32)
    slot = np.array([2, 2, 2, 2, 0, 0, 0], np.int32)
    floor = np.array([0, 0, 5, 5, 0, 0, 2**30], np.int32)  # the last row is padding
    selected = np.array(
        [[0, 1, 2, -1], [1, 3, -1, -1], [-1] * 4, [0, 2, 3, 4], [0, -1, -1, -1], [2, 3, 5, 6],
         [-1] * 4], np.int32,
    )  # fmt: skip
    return {
        "q": normal(1, len(slot), HEADS, WIDTH, dtype=dtype),
        "fresh": normal(2, len(slot), WIDTH, dtype=dtype),
        "ring": normal(3, 2, SLOTS, RING, WIDTH, dtype=dtype),
        "data": normal(4, 2, PAGES, PAGE, WIDTH, dtype=dtype),
        "pages": np.array([[3, 0], [-1, -1], [6, 2]], np.int32),
        "first": np.array([4, 7, 0], np.int32),
        "start": np.array([7, 2**30, 7], np.int32),
        "rows": (slot, position, floor),
        "selected": selected,
        "sink": normal(5, HEADS),
    }


def in_one_call(at, selected=True):
    return run(
        functools.partial(_in_one_call, WINDOW, 0.3),
        {**at, "ring": as_bits(at["ring"]), "data": as_bits(at["data"])} if selected else
        {**at, "ring": as_bits(at["ring"]), "data": None},
    )  # fmt: skip


def _in_one_call(window, scale, at):
    entries = None if at["data"] is None else (at["data"], 1, at["pages"])
    return ffi.attend_cache(
        at["q"], at["fresh"], (at["ring"], 1), entries, (at["first"], at["start"]), at["rows"],
        at["selected"], at["sink"], window, scale,
    )  # fmt: skip


def keys_of(at, row, selected):
    """What one row attends over, gathered in plain numpy: (keys [S, K], mask [S])."""
    slot, position, floor = (int(part[row]) for part in at["rows"])
    keys, mask = [], []
    for wanted in range(position - WINDOW + 1, position + 1):
        mask.append(wanted >= max(floor, 0))
        begun = at["start"][slot]
        if wanted >= begun:
            keys.append(at["fresh"][at["first"][slot] + wanted - begun])
        else:
            keys.append(at["ring"][1, slot, wanted % RING])
    for each in at["selected"][row] if selected else ():
        mask.append(each >= 0)
        keys.append(at["data"][1, at["pages"][slot, max(each, 0) // PAGE], each % PAGE])
    return np.stack(keys), np.array(mask)


@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_reads_the_cache_as_attention_of_gathered_keys(dtype, selected):
    at = field(dtype)
    got = np.asarray(in_one_call(at, selected))
    for row in range(len(at["q"])):
        keys, mask = keys_of(at, row, selected)
        q, sink = at["q"][row], at["sink"]
        alone = run(functools.partial(ffi.attend, scale=0.3), q, keys, mask, sink)
        np.testing.assert_array_equal(alone, got[row], err_msg=f"row {row}")
        wide = keys.astype(np.float64)[mask]
        s = q.astype(np.float64) @ wide.T * np.float32(0.3)
        top = s.max(axis=1, initial=-np.inf) if mask.any() else np.zeros(HEADS)
        p = np.exp(s - top[:, None])
        want = p @ wide / (p.sum(1) + np.exp(sink - top))[:, None]
        np.testing.assert_allclose(got[row], want, atol=1e-5 if dtype == np.float32 else 1e-2)


@pytest.mark.parametrize("selected", [True, False])
def test_some_rows_of_a_call_attend_as_among_all_of_them(selected):
    """Devices that share the rows of a call have the window vectors of all."""
    at = field(np.float32)
    whole, part = np.asarray(in_one_call(at, selected)), np.array([3, 5, 1])
    own = {name: at[name][part] for name in ("q", "selected")}
    few = in_one_call({**at, **own, "rows": tuple(x[part] for x in at["rows"])}, selected)
    np.testing.assert_array_equal(few, whole[part])


@pytest.mark.parametrize("rounding", ["none", "once", "reference"])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_indexer_reads_the_cache_as_gathered_keys(dtype, rounding):
    at = field(dtype)
    slot, gain = at["rows"][0], normal(6, len(at["q"]), HEADS)
    visible = np.array([3, 4, 5, 5, 8, 2, 0], np.int32)
    ids = np.tile(np.array([0, 1, 2, 4, 5, 7, -1, 3], np.int32), (len(slot), 1))
    entries = as_bits(at["data"]), 1, at["pages"]
    score = functools.partial(ffi.index_cache, rounding=rounding)
    got = np.asarray(run(lambda *a: score(*a), at["q"], gain, entries, slot, visible, ids))
    for row in range(len(slot)):
        for column, each in enumerate(ids[row]):
            if not 0 <= each < visible[row]:
                assert got[row, column] == -np.inf
                continue
            key = at["data"][1, at["pages"][slot[row], each // PAGE], each % PAGE][None]
            alone = ffi.index_scores(at["q"][row], gain[row], key, rounding)
            assert alone[0] == got[row, column], (row, column)
            terms = np.maximum(at["q"][row].astype(np.float64) @ key[0].astype(np.float64), 0)
            want = terms @ gain[row]
            np.testing.assert_allclose(got[row, column], want, rtol=2e-2, atol=0.1)


# -- selection -------------------------------------------------------------------------------------


def _rank(row, i):
    return (-np.inf if np.isnan(row[i]) else -row[i], not np.isnan(row[i]), i)


@settings(max_examples=30)
@given(
    values=st.lists(st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.25, 3.0, np.nan]), min_size=11,
                    max_size=11),
    k=st.sampled_from([1, 4, 11]),
)  # fmt: skip
def test_the_best_are_in_a_total_order(values, k):
    x = np.array([values, values[::-1]], np.float32)
    got = run(functools.partial(ffi.best, k=k), x)
    for row, columns in zip(x, np.asarray(got), strict=True):
        assert columns.tolist() == sorted(range(11), key=lambda i: _rank(row, i))[:k]


def test_many_columns_are_selected_as_by_sorting():
    x = np.random.default_rng(7).integers(-50, 50, (70, 900)).astype(np.float32)
    got = run(functools.partial(ffi.best, k=31), x)
    np.testing.assert_array_equal(got, np.argsort(-x, axis=1, kind="stable")[:, :31])
