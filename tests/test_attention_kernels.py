"""Attention over a packed cache in one kernel, in Pallas' interpreter: values, bits, edges.

Every check has its turn on a device too, where the kernel is compiled (`test_gpu_index.py`).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import cache as caches
from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.model import attention, forward
from deepinfer_jax.model.attention import Entries, Reach, Ring
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.numerics.pallas import attending
from deepinfer_jax.rows import FAR, batch_rows, spans_of, text_rows
from tests import every_role, small
from tests.test_numerics import normal

NATIVE, KVQ, PLAIN = (
    dataclasses.replace(n, rows="pallas", interpret=True)
    for n in (Numerics.native(), Numerics.fp32_kvq(), Numerics.fp32())
)
# Heads; entries chosen; ring, pages, entries of a page, pages of a slot.
H, S, RING, PAGES, SIZE, EACH = 3, 70, 134, 9, 40, 3
# Slot 0 is in the middle of its text, slot 1 begins, slot 2 has one row; a row of padding.
SLOTS = np.array([0, 0, 0, 1, 1, 2, -1], np.int32)
POSITIONS = np.array([100, 101, 102, 0, 1, 60, 0], np.int32)
FLOOR = np.array([0, 0, 80, 0, 0, 0, FAR], np.int32)
T = len(SLOTS)


@dataclasses.dataclass(frozen=True)
class Case:
    """A cache of random vectors; `window` leaves a rest in a tile."""

    numerics: Numerics
    width: int = 64
    window: int = 83
    entries: bool = True
    topped: int = S

    @functools.cached_property
    def reach(self) -> Reach:
        cfg = dataclasses.replace(small.CONFIG, head_dim=self.width)
        window, main = (
            caches.window_codec(cfg, self.numerics),
            caches.main_codec(cfg, self.numerics),
        )
        return Reach(self.window, 1, window, main, 0.11)

    @functools.cached_property
    def selected(self) -> np.ndarray:
        """Ascending, then -1; for one row all, for one none."""
        rng = np.random.default_rng(1)
        out = np.full((T, S), -1, np.int32)
        for row, count in zip(out, (self.topped, 20, 64, 0, 1, 37, 0), strict=True):
            row[:count] = np.sort(rng.choice(EACH * SIZE, count, replace=False))
        return out

    @functools.cached_property
    def made(self) -> tuple:
        """Queries, new window vectors, rings, entries, pages."""
        reach, dtype = self.reach, self.numerics.dtype
        new = jnp.asarray(normal(2, T, self.width)).astype(dtype)
        ring = reach.window_codec.store(jnp.asarray(normal(3, 2, 3, RING, self.width)))
        kv = reach.main_codec.store(jnp.asarray(normal(4, 2, PAGES, SIZE, self.width)))
        pages = np.random.default_rng(5).permutation(PAGES).astype(np.int32).reshape(3, EACH)
        q = jnp.asarray(normal(6, T, H, self.width)).astype(dtype)
        new = quant.qdq_fp8(new) if self.numerics.quantize_kv else new
        return q, new, ring, kv, pages, normal(7, H)

    def whole(self):
        """By one program for each row, though there are few of them."""
        q, new, ring, kv, pages, sink = self.made
        rows = text_rows(SLOTS * 0, SLOTS, POSITIONS)
        numerics, reach = self.numerics, self.reach

        @jax.jit
        def run(q, new, ring, kv, pages, sink, selected):
            spans, slots = spans_of(rows, 3), jnp.maximum(rows.slots, 0)
            entries = (kv, jnp.int32(1), pages) if self.entries else None
            return attending.attend_cache(
                q, new, (ring, 1), entries, (spans.first, spans.start),
                (slots, rows.positions, jnp.asarray(FLOOR)), selected, sink, reach.window,
                reach.scale, numerics.interpret, apart=False,
            )  # fmt: skip

        return run(q, new, ring, kv, pages, sink, self.selected)

    def run(self, by_rows: bool = False, pick: slice = slice(None)):
        """Attention of the rows `pick`; by_rows: over keys that stand in memory."""
        reach, numerics = self.reach, self.numerics

        @jax.jit
        def run(q, new, ring, kv, pages, sink, selected, floor, rows):
            spans = spans_of(rows, 3)
            entries = Entries(kv, jnp.int32(1), pages) if self.entries else None
            given = new, Ring(ring, jnp.int32(1)), entries, spans, sink
            if not by_rows:
                return attention.attend(
                    q, *given[:3], selected, floor, sink, rows, spans, reach, numerics
                )
            each = q, jnp.maximum(rows.slots, 0), rows.positions, floor, selected, None
            f = functools.partial(attention.attend_row, reach=reach, numerics=numerics)
            return nx.map_rows(f, each, given, numerics)

        q, new, *rest = self.made
        rows = text_rows(SLOTS[pick] * 0, SLOTS[pick], POSITIONS[pick])
        return run(q[pick], new[pick], *rest, self.selected[pick], FLOOR[pick], rows)

    def exact(self) -> np.ndarray:
        """In float64."""
        q, new, ring, kv, pages, sink = self.made
        old = np.asarray(self.reach.window_codec.load(ring, "float32"), np.float64)[1]
        far = np.asarray(self.reach.main_codec.load(kv, "float32"), np.float64)[1]
        q, new = (np.asarray(each, np.float64) for each in (q, new))
        first = {0: 100, 1: 0, 2: 60}
        out = np.zeros(q.shape)
        for t in range(T):
            slot, keys = int(SLOTS[t]), []
            for place in range(max(POSITIONS[t] - self.window + 1, FLOOR[t], 0), POSITIONS[t] + 1):
                inside = place >= first[slot]
                row = int(np.argmax(slot == SLOTS)) + place - first[slot]
                keys.append(new[row] if inside else old[slot, place % RING])
            for entry in self.selected[t] if self.entries else ():
                if entry >= 0:
                    keys.append(far[pages[slot, entry // SIZE], entry % SIZE])
            if keys:
                s = q[t] @ np.array(keys).T * self.reach.scale
                p = np.exp(s) / (np.exp(s).sum(axis=1) + np.exp(sink))[:, None]
                out[t] = p @ np.array(keys)
        return out


CASES = {
    "packed": Case(NATIVE),
    "window only": Case(NATIVE, entries=False),
    "short window": Case(NATIVE, width=32, window=5),
    "float32": Case(KVQ),
    "plain": Case(PLAIN, width=96),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def check_values(case: Case) -> None:
    got, want = np.asarray(case.run(), np.float64), case.exact()
    real = SLOTS >= 0
    assert np.abs(want[real]).max() > 0.5
    # bfloat16 rounds probabilities.
    bound = 1e-6 if case.numerics.dtype == "float32" else 2**-8
    np.testing.assert_allclose(got[real], want[real], rtol=0, atol=4 * bound * np.abs(want).max())


def check_bits(case: Case) -> None:
    """Those of keys that stand in memory, of one program for a row, of some slots alone."""
    every = bits(case.run())
    np.testing.assert_array_equal(every, bits(case.run(by_rows=True)))
    np.testing.assert_array_equal(every, bits(case.whole()))
    for pick in (slice(0, 3), slice(3, 5), slice(3, 6)):
        np.testing.assert_array_equal(bits(case.run(pick=pick)), every[pick])


@cases
def test_attention_is_that_of_float64(case):
    check_values(case)


@cases
def test_attention_does_not_see_other_rows_or_how_keys_come(case):
    check_bits(case)


def test_padding_gives_zeros():
    assert not np.asarray(CASES["packed"].run())[SLOTS < 0].any()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_cache_changes_no_bit_of_a_forward():
    """Every kind of layer, candidates included: with a cache and without one."""
    model = every_role.model("bfloat16", "pallas")
    numerics = dataclasses.replace(model.numerics, interpret=True)
    tokens = np.random.default_rng(0).integers(3, model.cfg.vocab_size, (1, 40))

    @jax.jit
    def run(weights, tables, batch, cache):
        return forward.forward(weights, tables, batch, cache, model.cfg, numerics)[0].output

    batch = batch_rows(jnp.asarray(tokens, jnp.int32), jnp.array([40]))
    with_cache, without = (
        run(model.params, model.tables, batch, cache)
        for cache in (caches.init_cache(model.cfg, numerics, 1, 64), None)
    )
    np.testing.assert_array_equal(bits(with_cache), bits(without))
