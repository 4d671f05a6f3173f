"""Index scores over a packed cache and the choice by counting, in Pallas' interpreter.

Every check has its turn on a device too, where the kernels are compiled (`test_gpu_index.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import cache as caches
from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.cache import Codec
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.model import index
from deepinfer_jax.model.attention import Entries
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.numerics.pallas import choosing, indexing
from deepinfer_jax.rows import spans_of, text_rows
from tests import small
from tests.test_numerics import normal

NATIVE, KVQ, PLAIN = (
    dataclasses.replace(n, rows="pallas", interpret=True)
    for n in (Numerics.native(), Numerics.fp32_kvq(), Numerics.fp32())
)
# Rows, heads; pages, entries of a page, pages of a slot. Tiles are of 64 entries, or of 16.
T, H, PAGES, SIZE, EACH = 5, 3, 9, 24, 3
SLOTS = np.array([0, 2, 1, 1, 0], np.int32)
VISIBLE = np.array([72, 0, 50, 7, 33], np.int32)


def codec_of(form: str, width: int) -> Codec:
    if form == "plain":
        return Codec.plain(width)
    pack, unpack = quant.pack_index, quant.unpack_index
    return Codec(form, width, quant.index_bytes(width), pack, unpack, quant.qdq_index)  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Case:
    """A cache of random keys with shuffled pages, and queries of T rows."""

    codec: Codec
    numerics: Numerics

    @functools.cached_property
    def keys(self) -> np.ndarray:
        return normal(1, 2, PAGES, SIZE, self.codec.width)

    @functools.cached_property
    def pages(self) -> np.ndarray:
        return np.random.default_rng(2).permutation(PAGES).astype(np.int32).reshape(-1, EACH)

    @functools.cached_property
    def query(self) -> tuple[jax.Array, jax.Array]:
        q = jnp.asarray(normal(3, T, H, self.codec.width)).astype(self.numerics.dtype)
        gain = jnp.asarray(normal(4, T, H)).astype(self.numerics.dtype)
        return (quant.qdq_index(q) if self.numerics.quantize_kv else q), gain

    def scores(self, ids: np.ndarray, pick: Any = slice(None), data: Any = None, **how) -> Any:
        """Of the rows `pick`, with what the cache holds of `keys` unless it is given."""
        data = self.codec.store(jnp.asarray(self.keys)) if data is None else data
        q, gain = (each[pick] for each in self.query)
        ids = ids if ids.ndim == 1 else ids[pick]
        numerics, where = self.numerics, (data, jnp.int32(1), jnp.asarray(self.pages))
        rounding = "none" if numerics.dtype == "float32" else numerics.index_rounding

        @jax.jit
        def run(q, gain, where, slot, visible, ids):
            return indexing.index_cache(
                q, gain, where, slot, visible, ids, rounding, numerics.interpret, **how
            )

        return run(q, gain, where, SLOTS[pick], VISIBLE[pick], ids)

    def in_blocks(self, ids: np.ndarray) -> Any:
        """Keys decoded into memory, a few at a time: what runs where the kernel cannot."""
        rows = text_rows(SLOTS * 0, SLOTS, VISIBLE - 1)
        numerics = dataclasses.replace(self.numerics, index_block=32)
        field = index.Field(1, self.codec)

        @jax.jit
        def run(q, gain, data, pages):
            entries = Entries(data, jnp.int32(1), pages)
            query, spans = index.IndexQuery(q, gain), spans_of(rows, 3)
            return index.scores_in_blocks(
                query, entries, jnp.asarray(ids), VISIBLE, rows, spans, field, numerics
            )

        return run(*self.query, self.codec.store(jnp.asarray(self.keys)), self.pages)

    def exact(self, ids: np.ndarray) -> np.ndarray:
        """In float64, without any rounding; -inf where nothing is to be seen."""
        kept = quant.qdq_index(jnp.asarray(self.keys)) if self.numerics.quantize_kv else self.keys
        kept = np.asarray(kept, np.float64)[1]
        q, gain = (np.asarray(each, np.float64) for each in self.query)
        ids = np.broadcast_to(ids, (T, ids.shape[-1]))
        out = np.full(ids.shape, -np.inf)
        for t, i in np.ndindex(ids.shape):
            if 0 <= ids[t, i] < VISIBLE[t]:
                key = kept[self.pages[SLOTS[t], ids[t, i] // SIZE], ids[t, i] % SIZE]
                out[t, i] = np.maximum(q[t] @ key, 0) @ gain[t]
        return out


CASES = {
    "words": Case(codec_of("words", 128), NATIVE),
    "bytes": Case(codec_of("packed", 32), NATIVE),
    "three groups": Case(codec_of("packed", 96), NATIVE),
    "three roundings": Case(
        codec_of("words", 128), dataclasses.replace(NATIVE, index_rounding="reference")
    ),
    "float32": Case(codec_of("packed", 32), KVQ),
    "plain": Case(codec_of("plain", 40), PLAIN),
}


def listed() -> np.ndarray:
    """Ids with holes, beyond what is visible and beyond the cache; for one row none at all."""
    ids = np.sort(np.random.default_rng(5).choice(80, (T, 41))).astype(np.int32)
    ids[:, 35:], ids[2, 5], ids[4] = -1, -1, -1
    return ids


IDS = {"all": np.arange(EACH * SIZE, dtype=np.int32), "listed": listed()}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
wanted = pytest.mark.parametrize("ids", IDS.values(), ids=IDS)


def check_values(case: Case, ids: np.ndarray) -> None:
    got, want = np.asarray(case.scores(ids), np.float64), case.exact(ids)
    seen = want > -np.inf
    assert 40 < seen.sum() < seen.size
    np.testing.assert_array_equal(got > -np.inf, seen)
    # bfloat16 keeps eight digits of a sum, the reference's roundings those of every term too.
    digits = {"none": 1e-6, "once": 2**-8, "reference": 2**-6}
    rounding = "none" if case.numerics.dtype == "float32" else case.numerics.index_rounding
    size = np.abs(want[seen]).max()
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=digits[rounding] * size)


def check_bits(case: Case, ids: np.ndarray) -> None:
    """Those of decoded keys; whichever rows are there, and however a program walks."""
    every = case.scores(ids)
    np.testing.assert_array_equal(bits(every), bits(case.in_blocks(ids)))
    for pick in ([2], [3, 0], [4, 4, 1]):
        np.testing.assert_array_equal(bits(case.scores(ids, np.array(pick))), bits(every)[pick])
    walk = indexing.Walk(tiles=1, stages=2)
    np.testing.assert_array_equal(bits(case.scores(ids, walk=walk)), bits(every))


@cases
@wanted
def test_scores_are_those_of_float64(case, ids):
    check_values(case, ids)


@cases
@wanted
def test_scores_do_not_see_rows_or_walks(case, ids):
    check_bits(case, ids)


def test_entries_that_a_row_may_not_see_are_not_read():
    """NaN everywhere behind the last visible entry of a slot, and in other sources."""
    case, ids = CASES["plain"], IDS["all"]
    keys = np.full_like(case.keys, np.nan)
    for slot, end in ((0, 72), (1, 50)):
        for entry in range(end):
            place = case.pages[slot, entry // SIZE], entry % SIZE
            keys[(1, *place)] = case.keys[(1, *place)]
    got = case.scores(ids, data=jnp.asarray(keys))
    np.testing.assert_array_equal(bits(got), bits(case.scores(ids)))


def test_a_page_that_is_not_there_is_no_fault():
    case = CASES["words"]
    pages = case.pages.copy()
    pages[:, 2] = -1  # rows see entries of it by their count; whatever comes out is finite
    other = Case(case.codec, case.numerics)
    other.__dict__["pages"] = pages
    got, want = np.asarray(other.scores(IDS["all"])), np.asarray(case.scores(IDS["all"]))
    np.testing.assert_array_equal(got[:, : 2 * SIZE], want[:, : 2 * SIZE])
    np.testing.assert_array_equal(got > -np.inf, want > -np.inf)


@pytest.mark.parametrize(("width", "form"), [(128, "words"), (256, "words"), (32, "packed")])
def test_keys_lie_in_words_where_they_fill_them(width, form):
    cfg = dataclasses.replace(small.CONFIG, index_head_dim=width)
    codec = caches.index_codec(cfg, NATIVE)
    x = jnp.asarray(normal(6, 3, 2, width))
    row = codec.store(x)
    assert (codec.form, row.shape, row.dtype) == (
        form,
        (3, 2, *codec.shaped().shape),
        codec.shaped().dtype,
    )
    assert row.nbytes == 6 * quant.index_bytes(width)
    np.testing.assert_array_equal(bits(codec.load(row, "float32")), bits(quant.qdq_index(x)))


# -- the choice ------------------------------------------------------------------------------------


def scores_of(n: int) -> np.ndarray:
    """Ties; nothing; every other one; a NaN; zeros of both signs; infinity; neighbours alike."""
    x = np.round(normal(7, 7, n) * 4) / 4
    x[1], x[2, ::2], x[3, n // 3], x[4], x[4, 1] = -np.inf, -np.inf, np.nan, 0, -0.0
    x[5, n // 2], x[5, : n // 4] = np.inf, -np.inf
    x[6] = np.repeat(np.arange(n), 2)[:n]
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


def best_of(x: np.ndarray, k: int) -> np.ndarray:
    """NaN, then value, then lower column; what is no number or -inf takes a place and is left."""
    out = np.full((len(x), k), -1)
    for row, value in zip(out, np.where(x == 0, np.float32(0), x), strict=True):
        order = np.lexsort((np.arange(value.size), -value, ~np.isnan(value)))[:k]
        kept = np.sort(order[value[order] > -np.inf])
        row[: kept.size] = kept
    return out


def check_choice(n: int, k: int, part: int, narrow: bool, interpret: bool) -> None:
    x = scores_of(n)
    if not narrow:
        x = x * np.float32(1.0001)
    ids = np.sort(np.random.default_rng(8).choice(5 * n, (7, n)), axis=1).astype(np.int32)
    run = jax.jit(
        functools.partial(choosing.chosen, k=k, narrow=narrow, interpret=interpret, part=part)
    )
    want = best_of(x, k)
    np.testing.assert_array_equal(run(x, None), want)
    mapped = np.where(want < 0, -1, np.take_along_axis(ids, np.maximum(want, 0), axis=1))
    np.testing.assert_array_equal(run(x, ids), mapped)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "part"),
    [(100, 7, 32), (50, 50, 64), (333, 5, 64), (64, 64, 64), (200, 1, 16), (9, 20, 16)],
)
def test_the_best_columns(n, k, part, narrow):
    """In one part, in several, in several rounds; more asked for than there are."""
    check_choice(n, min(n, k), part, narrow, True)


def test_forms_choose_alike():
    x = scores_of(90)
    for numerics in (NATIVE, PLAIN):
        got = jax.jit(nx.chosen, static_argnums=(2, 3))(x, None, 8, numerics)
        plain = dataclasses.replace(numerics, rows="tiled")
        np.testing.assert_array_equal(
            got, jax.jit(nx.chosen, static_argnums=(2, 3))(x, None, 8, plain)
        )


def test_a_choice_has_no_gradient():
    x = jnp.asarray(scores_of(90)[6:])

    def total(x):
        picked = index.select(x, jnp.arange(90, dtype=jnp.int32), 8, NATIVE)
        return jnp.sum(jnp.take_along_axis(x, picked, axis=1))

    slope = jax.jit(jax.grad(total))(x)
    assert int(slope.sum()) == 8
