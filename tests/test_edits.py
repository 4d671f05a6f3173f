"""Edits of logits: a slow reference, the same bits at any schedule, and the distribution."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from deepinfer_jax import edits as editing
from deepinfer_jax import rejection, sampling
from tests import small
from tests.compiled_sampling import LOGPROB, SAMPLE, TRANSFORM
from tests.test_sampling import assert_same_bits, mixed_batch
from tests.test_sampling_draws import DRAWS, assert_fits, names

B, V, NEW, DRAFTS = 6, 23, 7, 3
ENDS, FORCED = 2, 4


def reference(logits, prompt, reply, asked) -> tuple[np.ndarray, np.ndarray]:
    """What a request with the options `asked` draws from: float32 [V] and what is allowed [V]."""
    x = np.array(logits, np.float32)
    allowed = np.ones(len(x), bool)
    if "allowed" in asked:
        allowed[:] = False
        allowed[asked["allowed"]] = True
    allowed[asked.get("banned", [])] = False
    for token, bias in asked.get("bias", {}).items():
        x[token] += np.float32(bias if allowed[token] else 0)
    repetition = asked.get("repetition", 1.0)
    for token in {*prompt, *reply}:
        x[token] *= np.float32(1 / repetition if x[token] > 0 else repetition)
    for token in set(reply):
        x[token] -= np.float32(asked.get("frequency", 0)) * np.float32(reply.count(token))
        x[token] -= np.float32(asked.get("presence", 0))
    if len(reply) < asked.get("least", 0):
        allowed[asked.get("ends", [])] = False
    forced = asked.get("forced", [])
    if len(reply) < len(forced) and forced[len(reply)] >= 0:
        allowed = np.arange(len(x)) == forced[len(reply)]
    return x, allowed


def made(prompt, reply, asked) -> editing.Edits:
    """The edits of one slot."""
    room = {"ends": [*asked.get("ends", []), -1, -1][:ENDS]}
    room["forced"] = [*asked.get("forced", []), *[-1] * FORCED][:FORCED]
    return editing.make_edits(V, prompt, reply, **{**asked, **room})


PLACE = jax.jit(editing.place)
TOKENS = st.integers(0, V - 1)
numbers = functools.partial(st.floats, width=32)
# A request without options edits nothing.
ASKED = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "bias": st.dictionaries(TOKENS, numbers(-6, 6), max_size=5),
        "allowed": st.lists(TOKENS, min_size=5, max_size=12, unique=True),
        "banned": st.lists(TOKENS, max_size=2),
        "repetition": numbers(0.25, 4),
        "frequency": numbers(-2, 2),
        "presence": numbers(-2, 2),
        "ends": st.lists(TOKENS, max_size=ENDS),
        "least": st.integers(0, NEW),
        "forced": st.lists(st.integers(-1, V - 1), max_size=FORCED),
    },
)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=9)


def slots_of(prompts, every) -> editing.Edits:
    """The edits of a batch, seated one by one."""
    found = editing.idle(B, V, ENDS, FORCED)
    for slot, (prompt, asked) in enumerate(zip(prompts, every, strict=True)):
        if asked is not None:
            found = PLACE(found, np.int32(slot), made(prompt, [], asked))
    return found


# -- a model of one token: what follows depends on the newest token alone --------------------------


def tables() -> tuple[np.ndarray, np.ndarray]:
    """Logits [V, V] of the target and of a drafter that is often right."""
    rng = np.random.default_rng(8)
    target = 2 * rng.standard_normal((V, V))
    return target.astype(np.float32), (target + 0.4 * rng.standard_normal((V, V))).astype("f4")


def options() -> sampling.Sampling:
    heat, top_k = np.resize([1.0, 0.0, 1.4], B), np.resize([-1, -1, -1, 6], B)
    return sampling.make_sampling(B, heat, top_k=top_k, seeds=range(40, 40 + B))


@functools.partial(jax.jit, static_argnames="n")
def one_round(target, guess, newest, index, length, edits, chosen, n):
    """(Sampled [B, n + 1], emitted, edits): a round with n drafts as `rounds` makes it."""
    every, before, last = jnp.arange(B, dtype=jnp.int32), [], newest
    for k in range(n):
        mine = edits
        if before:
            mine = editing.of_rows(edits, every, jnp.stack(before, axis=1), jnp.full((B,), k))
        own, allowed = editing.edited(guess[last], mine, index + k, None)
        last = sampling.sample(own, chosen, index + k, allowed).token
        before.append(last)
    drafts = jnp.stack(before, axis=1) if before else jnp.zeros((B, 0), jnp.int32)
    fed = jnp.concatenate([newest[:, None], drafts], axis=1).reshape(-1)
    slot = jnp.repeat(every, n + 1)
    offset = jnp.tile(jnp.arange(n + 1, dtype=jnp.int32), B)
    rows = editing.of_rows(edits, slot, drafts, offset)
    at = index[slot] + offset
    own, allowed = editing.edited(target[fed], rows, at, None)
    each = jax.tree.map(lambda x: jnp.asarray(x)[slot], chosen)
    found = sampling.sample(target[fed], each, at, allowed, own)
    found = jax.tree.map(lambda x: x.reshape(B, n + 1), found)
    right = sampling.accepted(found.token, drafts, length)
    emitted = jnp.arange(n + 1)[None, :] <= right[:, None]
    return found, emitted, editing.committed(edits, found.token, emitted)


def replies(prompts, every, drafts: int, rng) -> list[list[tuple]]:
    """NEW tokens of each request with their numbers, by rounds of random verify lengths."""
    target, guess = tables()
    edits, found = slots_of(prompts, every), [[] for _ in range(B)]
    while min(map(len, found)) < NEW:
        newest = [r[-1][0] if r else p[-1] for r, p in zip(found, prompts, strict=True)]
        index = [len(r) + len(p) for r, p in zip(found, prompts, strict=True)]
        length = rng.integers(0, drafts + 1, B).astype(np.int32)
        seen, emitted, edits = one_round(
            target, guess, np.array(newest), np.array(index, np.int32), length, edits, options(),
            drafts,
        )  # fmt: skip
        for slot, reply in enumerate(found):
            for place in np.flatnonzero(emitted[slot]):
                reply.append(tuple(np.asarray(x)[slot, place].item() for x in numbers_of(seen)))
    counts = np.asarray(edits.counts)
    for slot, reply in enumerate(found):
        want = np.bincount([token for token, *_ in reply], minlength=V)
        assert every[slot] is None or counts[slot].tolist() == want.tolist()
    return [reply[:NEW] for reply in found]


def numbers_of(seen: sampling.Sampled) -> tuple:
    return seen.token, seen.logprob_raw, seen.logprob_processed, seen.kept_mass


def one_by_one(prompts, every) -> list[list[tuple]]:
    """The same replies by the slow reference: its logits, drawn from with the same noise."""
    target, found = tables()[0], [[] for _ in range(B)]
    for _ in range(NEW):
        said = [[token for token, *_ in reply] for reply in found]
        logits = np.stack([target[(s or p)[-1]] for s, p in zip(said, prompts, strict=True)])
        drawn = [
            reference(row, prompt, reply, asked or {})
            for row, prompt, reply, asked in zip(logits, prompts, said, every, strict=True)
        ]
        edited, allowed = (np.stack(part) for part in zip(*drawn, strict=True))
        index = np.array([len(s) + len(p) for s, p in zip(said, prompts, strict=True)], np.int32)
        seen = SAMPLE(edited, options(), index, allowed)
        raw = LOGPROB(logits, seen.token)
        for slot, reply in enumerate(found):
            token, _, processed, kept = (np.asarray(x)[slot].item() for x in numbers_of(seen))
            reply.append((token, np.asarray(raw)[slot].item(), processed, kept))
    return found


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.exhaustive), DRAFTS])
@given(
    prompts=st.lists(PROMPTS, min_size=B, max_size=B),
    every=st.lists(ASKED, min_size=B, max_size=B),
    seed=st.integers(0, 99),
)
@settings(max_examples=15)
def test_any_use_of_drafts_gives_the_reply_of_the_reference(prompts, every, seed, drafts):
    """Tokens and all three numbers, in every bit, of requests of all kinds side by side."""
    want = one_by_one(prompts, every)
    assert replies(prompts, every, drafts, np.random.default_rng(seed)) == want
    for asked, reply in zip(every, want, strict=True):
        check(asked or {}, reply)


def check(asked: dict[str, Any], reply: list[tuple]) -> None:
    """What a reader of the options expects of the reply, without any logits."""
    forced = asked.get("forced", [])
    for place, (token, raw, processed, kept) in enumerate(reply):
        assert math.isfinite(raw)
        assert 0 < kept <= 1
        if place < len(forced) and forced[place] >= 0:
            assert (token, processed) == (forced[place], 0.0)
            continue
        assert token not in asked.get("banned", [])
        assert token in asked.get("allowed", range(V))
        assert place >= asked.get("least", 0) or token not in asked.get("ends", [])


def test_drafts_under_edits_are_often_right():
    """The property above would hold of a drafter that sees no edits, too."""
    every = [{"forced": [3, 4, 5, 6], "frequency": 1.5}] * B
    edits, (target, guess) = slots_of([[1]] * B, every), tables()
    index = np.full(B, 1, np.int32)
    seen, emitted, _ = one_round(
        target, guess, np.ones(B, int), index, np.full(B, DRAFTS), edits, options(), DRAFTS
    )
    assert emitted.all()
    assert np.asarray(seen.token).tolist() == [[3, 4, 5, 6]] * B


def test_a_slot_seated_again_goes_on_where_it_was():
    """Preemption: edits made anew from prompt and reply are those that rounds have counted."""
    asked = {"bias": {3: 1.5}, "repetition": 1.3, "frequency": 0.7, "least": 3, "ends": [5]}
    found = slots_of([[1, 2, 2]] * B, [asked] * B)
    tokens = np.random.default_rng(4).integers(0, V, (B, 4)).astype(np.int32)
    emitted = np.arange(4) < np.arange(B)[:, None] % 5
    found = editing.committed(found, jnp.asarray(tokens), jnp.asarray(emitted))
    for slot in range(B):
        again = made([1, 2, 2], tokens[slot][emitted[slot]].tolist(), asked)
        own = jax.tree.map(lambda x, slot=slot: np.asarray(x[slot : slot + 1]), found)
        jax.tree.map(np.testing.assert_array_equal, own, again)


# -- rows beside others ----------------------------------------------------------------------------


@jax.jit
def edited_sample(logits, edits, chosen, index):
    own, allowed = editing.edited(logits, edits, index, None)
    return sampling.sample(logits, chosen, index, allowed, own)


def repeated(one: editing.Edits, count: int) -> editing.Edits:
    return jax.tree.map(lambda x: np.broadcast_to(x, (count, *x.shape[1:])), one)


# More numbers than a compiler treats as few: in all, or in a row.
WIDE = [
    (DRAWS, 11),
    *(pytest.param(*size, marks=pytest.mark.exhaustive) for size in [(40, 300), (5, 4099)]),
]


@pytest.mark.parametrize(("count", "vocab"), WIDE)
def test_a_row_without_edits_has_the_bits_of_a_program_without(count, vocab):
    """Beside rows that have edits."""
    logits, chosen, index = mixed_batch(count, vocab)
    one = editing.make_edits(
        vocab, [3, 4], [5, 5], bias={7: 2.5}, banned=[8], repetition=1.7, frequency=0.3,
        presence=-0.2, ends=[1], least=2**30,
    )  # fmt: skip
    plain = np.arange(count) % 3 > 0
    edits = dataclasses.replace(repeated(one, count), active=~plain)
    got, want = edited_sample(logits, edits, chosen, index), SAMPLE(logits, chosen, index)
    assert_same_bits(*(jax.tree.map(lambda x: np.asarray(x)[plain], part) for part in (got, want)))
    assert not np.array_equal(got.logprob_processed, want.logprob_processed)


def test_without_edits_there_is_nothing_to_compute():
    logits, mask = jnp.zeros((2, V)), jnp.ones((2, V), bool)
    assert editing.edited(logits, None, np.zeros(2, int), mask) == (logits, mask)
    assert editing.committed(None, jnp.zeros((2, 1), int), mask[:, :1]) is None


def test_the_image_token_is_never_said_whatever_is_asked():
    """Of a model that has one; no other logit changes, and no model without one does."""
    cfg, vocab = dataclasses.replace(small.CONFIG, image_token_id=7), 11
    logits, chosen, index = mixed_batch(DRAWS, vocab)
    spoken, others = editing.spoken(jnp.asarray(logits), cfg), np.arange(vocab) != 7
    np.testing.assert_array_equal(np.asarray(spoken)[:, others], logits[:, others])
    assert editing.spoken(logits, small.PLAIN) is logits
    one = editing.make_edits(
        vocab, [7], [7], bias={7: 1e9}, repetition=1e-9, presence=-9.0, ends=[-1]
    )
    made = edited_sample(spoken, repeated(one, DRAWS), chosen, index)
    assert (np.asarray(made.token) != 7).all()
    assert np.isfinite(np.asarray(made.logprob_processed)).all()


def test_largest_values_leave_finite_numbers():
    """At the limits of `requests.Options`, at the coldest temperature that draws, too."""
    most, vocab = 1e9, 11
    one = editing.make_edits(
        vocab, [1, 2], [2] * 1000, bias={1: most, 2: -most, 4: most}, repetition=most,
        frequency=most, presence=most, ends=[-1],
    )  # fmt: skip
    logits = np.tile(np.linspace(-30, 30, vocab, dtype=np.float32), (DRAWS, 1))
    heat = np.resize([1e-5, 1.0, 0.0], DRAWS)
    chosen = sampling.make_sampling(DRAWS, heat, seeds=range(DRAWS))
    index = np.full(DRAWS, 1002, np.int32)
    seen = edited_sample(logits, repeated(one, DRAWS), chosen, index)
    assert all(np.isfinite(np.asarray(x)).all() for x in numbers_of(seen))


# -- the distribution ------------------------------------------------------------------------------

LOGITS = np.array([0.3, 2.0, -1.0, 1.1, -4.0, 0.9, 1.9, -0.2, -2.0, 0.0, 0.6], np.float32)
GUESS = LOGITS + np.random.default_rng(6).normal(size=11).astype(np.float32)
ASKS = {
    "bias": {"bias": {2: 2.5, 1: -1.0}},
    "sets": {"allowed": [0, 1, 3, 6, 8], "banned": [6], "ends": [0], "least": 9},
    "penalties": {"repetition": 1.8, "frequency": 0.4, "presence": 0.3, "bias": {3: 0.5}},
}
PROMPT, REPLY = [1, 4], [3, 6, 6]


def wide_rows(asked) -> editing.Edits:
    return repeated(editing.make_edits(11, PROMPT, REPLY, **{"ends": [-1], **asked}), DRAWS)


def chances(logits, asked, limits) -> np.ndarray:
    x, allowed = reference(logits, PROMPT, REPLY, asked)
    one = sampling.make_sampling(1, *limits, seeds=[0])
    return np.exp(np.asarray(TRANSFORM(x[None], one, allowed[None]), np.float64))[0]


@pytest.mark.parametrize("limits", [(1.0,), (0.7, 1.0, 4)], ids=["plain", "cold"])
@pytest.mark.parametrize("name", ASKS)
def test_draws_fit_the_edited_distribution(name, limits):
    seed, _ = names("seed")
    chosen = sampling.make_sampling(DRAWS, *limits, seeds=[0] * DRAWS)
    chosen = sampling.Sampling(chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p, seed)
    logits, index = np.tile(LOGITS, (DRAWS, 1)), np.full(DRAWS, len(PROMPT + REPLY), np.int32)
    seen = edited_sample(logits, wide_rows(ASKS[name]), chosen, index)
    chance = chances(LOGITS, ASKS[name], limits)
    assert_fits(np.bincount(np.asarray(seen.token), minlength=11), DRAWS * chance)


@jax.jit
def rejected(logits, guess, edits, chosen, index):
    own, allowed = editing.edited(logits, edits, index, None)
    drawn, _ = editing.edited(guess, edits, index, None)
    draft = rejection.draft(drawn, chosen, index, index, allowed)
    yes = jnp.ones(draft.shape, bool)
    seen = rejection.sample(logits, drawn, draft, yes, chosen, index, allowed, own)
    return seen, draft, sampling.judge(logits, seen.token, chosen, allowed, own)


@pytest.mark.parametrize("name", ASKS)
def test_rejection_fits_the_edited_distribution(name):
    chosen = sampling.make_sampling(DRAWS, seeds=range(DRAWS))
    index = np.full(DRAWS, len(PROMPT + REPLY), np.int32)
    wide = [np.tile(row, (DRAWS, 1)) for row in (LOGITS, GUESS)]
    seen, draft, want = rejected(*wide, wide_rows(ASKS[name]), chosen, index)
    assert 0.2 < np.mean(np.asarray(seen.token) == np.asarray(draft)) < 0.95
    chance = chances(LOGITS, ASKS[name], (1.0,))
    assert_fits(np.bincount(np.asarray(seen.token), minlength=11), DRAWS * chance)
    assert_same_bits(seen, want)
