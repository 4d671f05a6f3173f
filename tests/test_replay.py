"""Decoder replay: a prompt whose early rows stop at the decoder boundary (docs/model.md 11).

`mask` runs every row and narrows the decoder's windows, `compact` drops the rows nobody may see.
Both must agree bit for bit, in any chunks, and leave everything that decoding reads.
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

from deepinfer_jax import cache as caches
from deepinfer_jax import rows as row_sets
from deepinfer_jax import sampling, steps
from deepinfer_jax.determinism import equality, feeding
from deepinfer_jax.determinism.feeding import Fed, Text
from deepinfer_jax.model import forward
from deepinfer_jax.model.forward import Replay
from tests import every_role

ROWS = 64  # of every call: those without a replay share a program with tests/invariance
KEEP = 17  # the floor: window 11 and slack 6
PROMPTS = (27, 21)
MASK, COMPACT = Replay("mask", KEEP), Replay("compact", KEEP)
DTYPES = (
    pytest.param("float32", marks=pytest.mark.exhaustive),
    pytest.param("bfloat16", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
)


@functools.cache
def texts(dtype: str) -> tuple[Text, ...]:
    cfg = every_role.model(dtype).cfg
    spans = (range(7, 12), range(0))
    sizes = (PROMPTS[0] + 8, PROMPTS[1] + 8)
    return tuple(
        every_role.text(cfg, n, seed + 20, span)
        for seed, (n, span) in enumerate(zip(sizes, spans, strict=True))
    )


def prompts_of(slots: tuple[int, ...]) -> np.ndarray:
    lengths = np.zeros(every_role.SLOTS, np.int32)
    lengths[list(slots)] = PROMPTS
    return lengths


@functools.cache
def whole(dtype: str, replay: Replay) -> tuple[Fed, caches.Cache]:
    """Both prompts in one call, in slots 0 and 1."""
    m = every_role.model(dtype)
    pieces = [feeding.piece(i, texts(dtype)[i], 0, n) for i, n in enumerate(PROMPTS)]
    return feeding.feed(
        m, every_role.garbage(m), pieces, ROWS, replay=replay, prompts=prompts_of((0, 1))
    )


def check_state(dtype: str, cache, slot: int, number: int, want=None) -> None:
    """Everything that later calls may read is what `mask` left."""
    m, length = every_role.model(dtype), PROMPTS[number]
    want = whole(dtype, MASK)[1] if want is None else want
    floor = length - KEEP
    got = feeding.visible(m, cache, slot, length, floor)
    assert not equality.different(got, feeding.visible(m, want, number, length, floor))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_equals_compact(dtype):
    (masked, _), (compact, cache) = whole(dtype, MASK), whole(dtype, COMPACT)
    for slot, length in enumerate(PROMPTS):
        for position in range(length):
            left, right = compact.of(slot, position), masked.of(slot, position)
            if position < length - KEEP:
                assert left is None
                continue
            assert not equality.different(left, right), (slot, position)
        check_state(dtype, cache, slot, slot)


@pytest.mark.exhaustive  # the default run decodes after a replay, which reads all of it
@pytest.mark.parametrize("dtype", DTYPES)
def test_global_entries_and_encoder_are_exact(dtype):
    """Replay approximates the decoder's windows and nothing else."""
    m = every_role.model(dtype)
    _, compact = whole(dtype, COMPACT)
    pieces = [feeding.piece(i, texts(dtype)[i], 0, n) for i, n in enumerate(PROMPTS)]
    fed, off = feeding.feed(m, every_role.garbage(m), pieces, ROWS)
    masked, _ = whole(dtype, MASK)
    for slot, length in enumerate(PROMPTS):
        got, want = (feeding.visible(m, c, slot, length) for c in (compact, off))
        changed = equality.different(got, want)
        assert set(changed) == {"decoder", "draft"}
        first = length - KEEP  # the first row kept has no window but itself
        assert (masked.of(slot, first)["logits"] != fed.of(slot, first)["logits"]).any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    cuts=st.tuples(*[st.lists(st.integers(1, n - 1), max_size=4) for n in PROMPTS]),
    slots=st.permutations(range(4)).map(lambda p: tuple(p[:2])),
)
@settings(max_examples=20)
def test_chunks_equal_the_whole_prompt(dtype, cuts, slots):
    """Chunks before, across and after the boundary; the two prompts advance side by side."""
    m, cache, prompts = every_role.model(dtype), every_role.garbage(every_role.model(dtype)), None
    prompts = prompts_of(slots)
    edges = [sorted({0, *c, n}) for c, n in zip(cuts, PROMPTS, strict=True)]
    for turn in range(max(len(e) for e in edges) - 1):
        pieces = [
            feeding.piece(slot, texts(dtype)[i], edges[i][turn], edges[i][turn + 1])
            for i, slot in enumerate(slots)
            if turn + 1 < len(edges[i])
        ]
        fed, cache = feeding.feed(m, cache, pieces, ROWS, replay=COMPACT, prompts=prompts)
        for p in pieces:
            number = slots.index(p.slot)
            for position in range(p.start, p.start + len(p.part) - 1):
                got, want = fed.of(p.slot, position), whole(dtype, MASK)[0].of(number, position)
                if position < PROMPTS[number] - KEEP:
                    assert got is None
                else:
                    assert not equality.different(got, want)
    for number, slot in enumerate(slots):
        check_state(dtype, cache, slot, number)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_afterwards_is_the_same(dtype):
    """Rejected drafts, then tokens one by one, then a draft: nothing stale is ever read."""
    m, results = every_role.model(dtype), []
    for replay in (MASK, COMPACT):
        cache, out = whole(dtype, replay)[1], []
        source, start = texts(dtype)[0], PROMPTS[0]
        p = feeding.wrong(feeding.piece(0, source, start, start + 6), 1, m.cfg.vocab_size)
        fed, cache = feeding.feed(m, cache, [p], ROWS)
        out.append(fed.of(0, start))
        for position in range(start + 1, start + 8):
            pieces = [feeding.piece(0, source, position, position + 1)]
            fed, cache = feeding.feed(m, cache, pieces, ROWS)
            out.append({n: v for n, v in fed.of(0, position).items() if n != "scored"})
        drafted = every_role.draft_of(m, cache, [0, -1, -1], [start + 8, 0, 0], [5, 6, 7])
        out.append({"logits": drafted.logits[0], "confidence": drafted.confidence[0]})
        results.append(out)
    for left, right in zip(*results, strict=True):
        assert not equality.different(left, right)


@pytest.mark.exhaustive
def test_the_oracle_agrees():
    """Logits of the kept rows and of the steps that follow, and the draft after them."""
    m, source, length = every_role.model("float32"), texts("float32")[0], PROMPTS[0]
    model = every_role.oracle(("compact", KEEP))
    state = model.new_state()
    images = {i: source.embeddings[i] for i in np.flatnonzero(source.image).tolist()}
    records = model.prefill(state, source.tokens[:length].tolist(), images)
    fed, cache = whole("float32", COMPACT)
    for position in range(length - KEEP, length):
        got = fed.of(0, position)["logits"]
        np.testing.assert_allclose(got, records[position].logits, atol=1e-4)
    for position in range(length, length + 3):
        record = model.step(state, int(source.tokens[position]))
        fed, cache = feeding.feed(
            m, cache, [feeding.piece(0, source, position, position + 1)], ROWS
        )  # fmt: skip
        np.testing.assert_allclose(fed.of(0, position)["logits"], record.logits, atol=1e-4)
    want = model.draft(state, 9)
    got = every_role.draft_of(m, cache, [0, -1, -1], [length + 3, 0, 0], [9, 0, 0])
    np.testing.assert_array_equal(got.tokens[0], want.ids)
    np.testing.assert_allclose(got.logits[0], want.logits, atol=1e-4)


# -- what is refused -------------------------------------------------------------------------------


def test_the_floor_is_window_plus_slack():
    cfg = every_role.model("float32").cfg
    slack = cfg.dspark_block_size + 1
    forward.check_replay(Replay("compact", cfg.sliding_window + slack), cfg, slack)
    for mode in ("mask", "compact"):
        with pytest.raises(ValueError, match=r"keep=16 is below the floor 17"):
            forward.check_replay(Replay(mode, 16), cfg, slack)
    forward.check_replay(Replay("off", 0), cfg, slack)


def test_a_replay_needs_its_model_and_its_arguments():
    m = every_role.model("float32")
    with pytest.raises(ValueError, match="mode must be off, mask or compact, got 'half'"):
        forward.check_replay(Replay("half", 99), m.cfg, 6)  # pyright: ignore
    late = dataclasses.replace(m.cfg, engram_layer_ids=(3,))
    early = dataclasses.replace(m.cfg, dspark_target_layer_ids=(2, 4))
    for cfg, layer in ((late, 3), (early, 2)):
        with pytest.raises(ValueError, match=rf"layers \[{layer}\] are not"):
            forward.check_replay(COMPACT, cfg, 6)
    rows = feeding.rows_of([feeding.piece(0, texts("float32")[0], 0, 3)], ROWS)
    with pytest.raises(ValueError, match="needs a cache and prompt_lengths"):
        forward.forward(m.params, m.tables, rows, None, m.cfg, m.numerics, replay=COMPACT)


# -- lengths ---------------------------------------------------------------------------------------


def test_prefill_counts_rows_that_a_replay_dropped(monkeypatch):
    """Slot 2's chunk ends before the boundary, so no row of it reaches the head."""
    m = every_role.model("float32")
    pieces = [
        feeding.piece(0, texts("float32")[0], 20, 24),
        feeding.piece(2, texts("float32")[1], 0, 3),
    ]
    rows = jax.tree.map(jnp.asarray, feeding.rows_of(pieces, ROWS))
    kept = row_sets.take_rows(rows, jnp.array([0, 1, 2, 3, -1, -1], jnp.int32))
    output = jnp.zeros((6, m.cfg.hidden_size), jnp.float32)
    cache = caches.init_cache(m.cfg, m.numerics, 4, 64)
    cache = dataclasses.replace(cache, lengths=jnp.array([20, 5, 0, 7], jnp.int32))
    hidden = forward.Hidden(output, output[None], jnp.zeros((1, 6, 1), jnp.int32), kept)
    monkeypatch.setattr(steps, "extend", lambda *a, **k: (hidden, cache))
    chosen = sampling.make_sampling(4, 0.0, seeds=range(4))
    _, after = steps.prefill(
        m.params, m.tables, rows, cache, chosen, m.cfg, m.numerics, replay=COMPACT
    )
    np.testing.assert_array_equal(after.lengths, [24, 5, 3, 7])
