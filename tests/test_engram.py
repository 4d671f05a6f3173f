"""Engram hashing against Python's integers, and look-back over calls, images and rings."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import resources
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import engram
from deepinfer_jax.model.engram import HashConstants
from deepinfer_jax.rows import spans_of, text_rows
from tests.small import PLAIN


@functools.cache
def released() -> ModelConfig:
    return ModelConfig.from_json(resources.config_file("deepseek-v4.1-flash"))


# -- constants -------------------------------------------------------------------------------------

PRIMES = {  # of the release, docs/model.md 5.2
    1: """16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183
          16000189 16000207 16000211 16000253 16000277 16000289 16000307 16000321
          16000339 16000381 16000393 16000399 16000403 16000409 16000447 16000463""",
    14: """16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627
           16000667 16000669 16000693 16000697 16000711 16000729 16000759 16000769
           16000781 16000799 16000813 16000819 16000841 16000877 16000879 16000889""",
}
MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
ROWS = {  # of the compressed ids 5, 17, 1234, 98765, newest first
    1: """3889985 30570021 40268302 53854578 74235168 81029010 100426120 118891433
          140663316 156641112 170873702 176646848 198504696 209508056 226106138 244426389
          268957684 273660927 291314106 311240084 320338451 343707975 353023310 375001870""",
    14: """897380 16353005 34900403 63266234 69449016 85289440 108947768 120779290
           131003039 149871894 168381161 190149974 194374713 220463499 232154941 246778031
           265681804 278921704 303558078 317957238 326466468 351943018 364680192 368203216""",
}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.mark.parametrize(("ordinal", "layer", "rows"), [(0, 1, 384006168), (1, 14, 384016682)])
def test_released_constants(ordinal, layer, rows):
    constants = engram.hash_constants(released())[ordinal]
    flat = [p for order in constants.primes for p in order]
    assert flat == numbers(PRIMES[layer])
    assert constants.multipliers == MULTIPLIERS[layer]
    assert sum(flat) == rows == released().engram_num_embeddings[ordinal]
    assert constants.offsets == tuple(np.cumsum([0, *flat[:-1]]).tolist())


@pytest.mark.parametrize(("ordinal", "layer"), [(0, 1), (1, 14)])
def test_released_rows(ordinal, layer):
    tokens = np.array([[5, 17, 1234, 98765]], np.int32)
    constants = engram.hash_constants(released())[ordinal]
    got = engram.table_rows(jnp.asarray(tokens), jnp.int32(0), constants)
    np.testing.assert_array_equal(got[0], numbers(ROWS[layer]))


def test_a_table_too_small_for_its_primes_is_refused():
    cfg = dataclasses.replace(PLAIN, engram_num_embeddings=(59, 999))
    with pytest.raises(ValueError, match="layer 0 has 59 rows, its primes need 60"):
        engram.hash_constants(cfg)


def test_a_vocabulary_beyond_the_arithmetic_is_refused():
    cfg = dataclasses.replace(PLAIN, engram_compressed_vocab_size=(1 << 17) + 1)
    with pytest.raises(
        ValueError, match="compressed_vocab_size must be at most 131072, got 131073"
    ):
        engram.hash_constants(cfg)
    without = dataclasses.replace(cfg, engram_layer_ids=(), engram_num_embeddings=())
    assert engram.hash_constants(without) == ()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1 << 24) + 1, "engram_vocab_size must be at most 16777216, got 16777217"),
        ((1 << 24) - 4, "engram_vocab_size=16777212 leads to the prime 167.*below 16777216"),
    ],
)
def test_primes_beyond_the_arithmetic_are_refused(size, message):
    cfg = dataclasses.replace(PLAIN, engram_vocab_size=size)
    with pytest.raises(ValueError, match=message):
        engram.hash_constants(cfg)


# -- hashing ---------------------------------------------------------------------------------------


def hashed(ids: list[int], pad: int, constants: HashConstants) -> list[int]:
    """One row in Python's integers."""
    ids = [pad if t < 0 else t for t in ids]
    value, columns = ids[0] * constants.multipliers[0], []
    for order, primes in enumerate(constants.primes, start=1):
        value ^= ids[order] * constants.multipliers[order]
        columns += [value % p for p in primes]
    assert value < 1 << 63
    return [c + o for c, o in zip(columns, constants.offsets, strict=True)]


LARGEST_PRIMES = (16777213, 16777199, 16777183)  # below 2^24


@pytest.mark.parametrize("vocabulary", [1 << 17, 99092, 251])
@pytest.mark.parametrize("kind", ["largest", "smallest", "random"])
def test_hashes_are_exact(vocabulary, kind):
    """Ids and multipliers up to the largest that their bound admits, primes up to 2^24."""
    rng = np.random.default_rng(vocabulary)
    bound = (2**63 - 1) // vocabulary // 2
    multipliers = {
        "largest": [2 * bound - 1] * 4,
        "smallest": [1, 3, 5, 7],
        "random": [2 * int(v) + 1 for v in rng.integers(0, bound, 4)],
    }[kind]
    primes = (LARGEST_PRIMES[:2], (11, LARGEST_PRIMES[2]), (2, 16000057))
    offsets = tuple(np.cumsum([0, *[p for order in primes for p in order][:-1]]).tolist())
    constants = HashConstants(primes, offsets, tuple(multipliers))
    ids = rng.integers(-1, vocabulary, (60, 4)).astype(np.int32)
    ids[:3] = [[vocabulary - 1] * 4, [0] * 4, [-1] * 4]
    got = engram.table_rows(jnp.asarray(ids), jnp.int32(vocabulary - 2), constants)
    want = [hashed(row, vocabulary - 2, constants) for row in ids.tolist()]
    np.testing.assert_array_equal(got, want)


# -- look-back -------------------------------------------------------------------------------------

CFG = dataclasses.replace(PLAIN, engram_max_ngram_size=4)
SLACK, WIDTH = 4, 8
RING = CFG.engram_lookback + SLACK - 1  # the least that `SLACK` rejected rows allow


@jax.jit
def call(history, compressed, slots, positions):
    """Look-backs of one call and the history after it."""
    rows = text_rows(compressed, slots, positions)
    spans = spans_of(rows, history.shape[0])
    seen = engram.lookback(compressed, history, rows, spans, CFG)
    return seen, engram.store_history(history, compressed, rows, spans)


def feed(history, slot: int, start: int, ids: list[int]):
    """One call of at most `WIDTH` rows, the first of them padding."""
    columns = [np.full(WIDTH, fill, np.int32) for fill in (9, -1, 0)]
    rows = slice(1, 1 + len(ids))
    columns[0][rows], columns[1][rows] = ids, slot
    columns[2][rows] = np.arange(start, start + len(ids))
    seen, history = call(history, *columns)
    return np.asarray(seen)[rows], history


def expected(ids: list[int], position: int) -> list[int]:
    """Newest first; from the first dead or missing token on, -1."""
    window = []
    for back in range(4):
        gone = position < back or ids[position - back] < 0
        if gone or (window and window[-1] < 0):
            return window + [-1] * (4 - back)
        window.append(ids[position - back])
    return window


@given(
    ids=st.lists(st.sampled_from([-1, 3, 5, 7, 11, 13]), min_size=1, max_size=24),
    moves=st.lists(st.tuples(st.integers(1, SLACK), st.integers(1, SLACK)), max_size=30),
    slot=st.integers(0, 2),
)
@settings(max_examples=80)
def test_lookback_over_calls_and_rejected_tokens(ids, moves, slot):
    """Calls of up to `SLACK` rows of which any number counts; the rest is wrong and fed again."""
    history, done = np.full((3, RING), 0x2BAD, np.int32), 0
    for rows, kept in [*moves, *[(1, 1)] * len(ids)]:
        if done == len(ids):
            return
        kept = min(kept, rows, len(ids) - done)
        right = ids[done : done + kept]
        seen, history = feed(history, slot, done, right + [17] * (rows - kept))
        for offset in range(kept):
            assert seen[offset].tolist() == expected(ids, done + offset)
        done += kept


@pytest.mark.parametrize(("ring", "intact"), [(RING, True), (RING - 1, False)])
def test_the_history_is_as_short_as_it_can_be(ring, intact):
    """Three tokens, then `SLACK` rows of which one counts, then one more."""
    history = np.zeros((1, ring), np.int32)
    _, history = feed(history, 0, 0, [3, 5, 7])
    _, history = feed(history, 0, 3, [11] + [17] * (SLACK - 1))
    seen, _ = feed(history, 0, 4, [13])
    assert (seen[0].tolist() == [13, 11, 7, 5]) == intact
