"""Decode == chunked prefill == whole prefill == verification rows == score, bit for bit.

A row's bits depend on the tokens before it and on nothing else: not on how many rows a call has, on
chunk boundaries, neighbours, slots, padding, capacity, on rejected drafts before it or on what the
cache held before. Every comparison is of unsigned integers, in float32 and in the shipped numerics.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import params as parameters
from deepinfer_jax import steps
from deepinfer_jax.numerics import products
from tests import feeding
from tests.feeding import Fed, Text

DTYPES = ("bfloat16", "float32")
ONE, FEW, MANY = 1, 12, 48  # rows of the three compiled programs
VERIFY = 6  # rows of the widest verification: the anchor and a block of drafts
LENGTHS = (48, 37, 29)
IMAGE = range(10, 17)


@functools.cache
def texts(dtype: str) -> tuple[Text, ...]:
    cfg = feeding.model(dtype).cfg
    spans = (IMAGE, range(0), range(0))
    return tuple(
        feeding.text(cfg, n, seed, span)
        for seed, (n, span) in enumerate(zip(LENGTHS, spans, strict=True))
    )


@dataclasses.dataclass(frozen=True)
class Whole:
    """The whole prefill of one text: what came out of every position, and the cache (slot 0)."""

    rows: list[dict[str, np.ndarray]]
    cache: feeding.Cache


@functools.cache
def whole(dtype: str, number: int) -> Whole:
    m, source = feeding.model(dtype), texts(dtype)[number]
    pieces = [feeding.piece(0, source, 0, len(source))]
    fed, cache = feeding.feed(m, feeding.garbage(m), pieces, MANY)
    rows = [fed.of(0, p) for p in range(len(source))]
    return Whole([r for r in rows if r is not None], cache)


def check_rows(dtype: str, number: int, fed: Fed, slot: int, start: int, stop: int) -> None:
    """Rows start..stop came out as in the whole prefill (the last log-prob has no next token)."""
    want = whole(dtype, number).rows
    for position in range(start, stop):
        got = fed.of(slot, position)
        assert got is not None
        names = [n for n in want[position] if n != "logprob" or position < stop - 1]
        left, right = ({n: r[n] for n in names} for r in (got, want[position]))
        assert not feeding.different(left, right), (number, position)


def check_cache(dtype: str, number: int, cache, slot: int) -> None:
    """Everything still readable is what the whole prefill left."""
    m, source, before = feeding.model(dtype), texts(dtype)[number], whole(dtype, number).cache
    got = feeding.visible(m, cache, slot, len(source))
    want = feeding.visible(m, before, 0, len(source))
    assert not feeding.different(got, want), number


# -- schedules -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Move:
    """One slot in one call: `rows` rows, of which the first `good` are right and `kept` count."""

    rows: int
    good: int
    kept: int


CHUNKS = st.integers(1, 20).map(lambda n: Move(n, n, n))
SINGLE = st.just(Move(1, 1, 1))


@st.composite
def verifications(draw) -> Move:
    rows = draw(st.integers(2, VERIFY))
    good = draw(st.integers(1, rows))
    return Move(rows, good, draw(st.integers(1, good)))


MOVES = st.none() | SINGLE | CHUNKS | verifications() | verifications()


@dataclasses.dataclass(frozen=True)
class Turn:
    """One call: the move of every text, the order of their rows, padding rows before each."""

    moves: tuple[Move | None, ...]
    order: tuple[int, ...]
    gaps: tuple[int, ...]


TURNS = st.builds(
    Turn,
    moves=st.tuples(MOVES, MOVES, MOVES),
    order=st.permutations((0, 1, 2)).map(tuple),
    gaps=st.tuples(*[st.integers(0, 2)] * 3),
)


class Session:
    """Three texts in three of four slots, fed turn by turn and checked after each."""

    def __init__(self, dtype: str, slots: list[int]) -> None:
        self.dtype, self.m, self.slots = dtype, feeding.model(dtype), slots
        self.texts, self.done = texts(dtype), [0, 0, 0]
        self.cache = feeding.garbage(self.m)

    def turn(self, turn: Turn) -> None:
        pieces, claims, gaps, total = [], [], [], 0
        for number in turn.order:
            move, gap = turn.moves[number], turn.gaps[number]
            start = self.done[number]
            left = len(self.texts[number]) - start
            if move is None or not left:
                continue
            rows = min(move.rows, left, MANY - total - gap)
            if rows < 1:
                continue
            good = min(move.good, rows)
            p = feeding.piece(self.slots[number], self.texts[number], start, start + rows)
            pieces.append(feeding.wrong(p, good, self.m.cfg.vocab_size))
            claims.append((number, start, start + good))
            self.done[number] = start + min(move.kept, good)
            gaps.append(gap)
            total += rows + gap
        if not pieces:
            return
        size = FEW if total <= FEW else MANY
        fed, self.cache = feeding.feed(self.m, self.cache, pieces, size, gaps)
        for number, start, stop in claims:
            check_rows(self.dtype, number, fed, self.slots[number], start, stop)

    def finish(self) -> None:
        """Feed what is left, one text after the other, in chunks longer than any ring's slack."""
        for number, source in enumerate(self.texts):
            while self.done[number] < len(source):
                n = min(19, len(source) - self.done[number])
                moves = tuple(Move(n, n, n) if i == number else None for i in range(3))
                self.turn(Turn(moves, (0, 1, 2), (0, 0, 0)))
            check_cache(self.dtype, number, self.cache, self.slots[number])


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    turns=st.lists(TURNS, min_size=1, max_size=12),
    slots=st.permutations(range(feeding.SLOTS)).map(lambda p: p[:3]),
)
@settings(max_examples=25)
def test_any_schedule_gives_the_bits_of_whole_prefill(dtype, turns, slots):
    session = Session(dtype, slots)
    for turn in turns:
        session.turn(turn)
    session.finish()


# -- one row alone, another capacity ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_alone_in_a_larger_cache(dtype):
    """A slot moves to a cache of its own, ten times as long, and goes on one token at a time."""
    m, source = feeding.model(dtype), texts(dtype)[0]
    start = IMAGE.start + 3
    pieces = [feeding.piece(2, source, 0, start)]
    _, cache = feeding.feed(m, feeding.garbage(m), pieces, MANY)
    cache = feeding.moved(m, cache, 2, 600)
    for position in range(start, len(source)):
        pieces = [feeding.piece(0, source, position, position + 1)]
        fed, cache = feeding.feed(m, cache, pieces, ONE)
        check_rows(dtype, 0, fed, 0, position, position + 1)
    check_cache(dtype, 0, cache, 0)


# -- drafts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_do_not_depend_on_rejected_tokens_or_neighbours(dtype):
    m = feeding.model(dtype)
    session = Session(dtype, [3, 0, 1])
    for _ in range(7):
        session.turn(Turn((Move(6, 2, 1), Move(4, 4, 3), Move(5, 1, 1)), (1, 2, 0), (0, 1, 0)))
    anchors, done = [5, 6, 7], session.done
    together = feeding.draft_of(m, session.cache, session.slots, done, anchors)
    for number in range(3):
        source = texts(dtype)[number]
        pieces = [feeding.piece(0, source, 0, done[number])]
        _, cache = feeding.feed(m, feeding.garbage(m), pieces, MANY)
        where = [-1, 0, -1], [0, done[number], 0], [9, anchors[number], 8]
        alone = feeding.draft_of(m, cache, *where)
        for name in ("tokens", "logits", "base", "confidence"):
            left, right = getattr(together, name)[number], getattr(alone, name)[1]
            assert np.array_equal(feeding.bits(left), feeding.bits(right)), (name, number)


# -- a broken promise is noticed -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [VERIFY, VERIFY + 3])
def test_rejecting_more_rows_than_the_slack_loses_state(dtype, rows):
    """At the cache's slack nothing is lost. Three rows more and every ring has been overrun."""
    m, source, start = feeding.model(dtype), texts(dtype)[1], 22
    _, cache = feeding.feed(m, feeding.garbage(m), [feeding.piece(0, source, 0, start)], MANY)
    p = feeding.wrong(feeding.piece(0, source, start, start + rows), 1, m.cfg.vocab_size)
    _, after = feeding.feed(m, cache, [p], FEW)
    _, clean = feeding.feed(m, cache, [feeding.piece(0, source, start, start + 1)], FEW)
    got, want = (feeding.visible(m, c, 0, start + 1) for c in (after, clean))
    lost = ["decoder", "draft", "encoder", "history", "pending"] if rows > VERIFY else []
    assert sorted(feeding.different(got, want)) == lost


# -- trainers --------------------------------------------------------------------------------------

score = jax.jit(steps.score, static_argnames=("cfg", "numerics", "remat"))


def _batch(dtype: str, numbers: tuple[int, ...], width: int):
    sources = [texts(dtype)[n] for n in numbers]
    tokens = np.full((len(sources), width), 5, np.int32)
    for row, source in zip(tokens, sources, strict=True):
        row[: len(source)] = source.tokens
    return tokens, np.array([len(s) for s in sources], np.int32)


def _check_scores(dtype: str, scores: steps.Scores, numbers: tuple[int, ...]) -> None:
    """What the sampler saw: log-probabilities of the next token, and the experts of every token."""
    raw, routed = np.asarray(scores.raw), np.moveaxis(np.asarray(scores.routed), 0, 2)
    for row, number in enumerate(numbers):
        rows = whole(dtype, number).rows
        want = np.array([r["logprob"][0] for r in rows[:-1]])
        got = raw[row, : len(want)]
        assert np.array_equal(feeding.bits(got), feeding.bits(want)), number
        experts = np.stack([r["routed"] for r in rows])
        assert np.array_equal(routed[row, : len(rows)], experts), number


@pytest.mark.parametrize("dtype", DTYPES)
def test_score_is_what_the_sampler_computed(dtype):
    m, numbers = feeding.model(dtype), (2, 1)
    tokens, lengths = _batch(dtype, numbers, 40)
    scores = score(m.params, m.tables, tokens, lengths, m.cfg, m.numerics)
    _check_scores(dtype, scores, numbers)


@pytest.mark.slow
def test_decoded_weights_give_the_same_bits():
    """What a small model keeps in memory to save the decoding at every step."""
    m, numbers = feeding.model("bfloat16"), (2, 1)
    tokens, lengths = _batch("bfloat16", numbers, 40)
    scores = score(parameters.decode(m.params), m.tables, tokens, lengths, m.cfg, m.numerics)
    _check_scores("bfloat16", scores, numbers)


@functools.partial(jax.jit, static_argnames=("cfg", "numerics", "remat"))
def _loss(params, made, tokens, lengths, cfg, numerics, remat):
    """Mean negative log-probability with its gradient, and the scores it was made of."""

    def loss(params):
        scores = steps.score(params, made, tokens, lengths, cfg, numerics, remat=remat)
        real = jnp.arange(1, tokens.shape[1])[None, :] < lengths[:, None]
        count = jnp.sum(lengths - 1).astype(jnp.float32)
        return -jnp.sum(jnp.where(real, scores.raw, 0)) / count, scores

    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize(
    ("dtype", "remat"),
    [("bfloat16", True), pytest.param("float32", False, marks=pytest.mark.slow)],
)
def test_a_trainer_sees_the_same_log_probabilities(dtype, remat):
    """Under value_and_grad, with float32 master weights, with and without recomputation."""
    m, numbers = feeding.model(dtype), (2, 1)
    tokens, lengths = _batch(dtype, numbers, 40)
    masters = parameters.widen(m.params)
    (_, scores), slope = _loss(
        masters, m.tables, tokens, lengths, m.cfg, m.numerics, remat
    )  # fmt: skip
    _check_scores(dtype, scores, numbers)
    for path, leaf in parameters.by_path(slope).items():
        assert np.isfinite(np.asarray(leaf)).all(), path
    moved = [p for p, leaf in parameters.by_path(slope).items() if np.any(np.asarray(leaf))]
    assert any("experts" in p for p in moved)
    assert any("compressor" in p for p in moved)


@pytest.mark.slow
def test_a_plain_product_would_be_caught(monkeypatch):
    """Without tiles a single float32 row takes another path through the compiler."""
    monkeypatch.setattr(products, "_in_tiles", lambda f, x, numerics: f(x))
    program = feeding.compiled()
    m, source = feeding.model("float32"), texts("float32")[1]
    pieces = [feeding.piece(0, source, 0, 30)]
    fed, cache = feeding.feed(m, feeding.garbage(m), pieces, MANY, program=program)
    pieces = [feeding.piece(0, source, 0, 29)]
    _, cache = feeding.feed(m, feeding.garbage(m), pieces, MANY, program=program)
    cache = feeding.moved(m, cache, 0, 600)
    alone, _ = feeding.feed(m, cache, [feeding.piece(0, source, 29, 30)], ONE, program=program)
    assert "logits" in feeding.different(alone.of(0, 29), fed.of(0, 29))
