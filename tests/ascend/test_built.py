"""Functions of the model as single operations of the compiler, against XLA's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch")

from ascend import built  # noqa: E402
from ascend.executor import Executed, place  # noqa: E402
from deepinfer_jax import numerics as nx  # noqa: E402
from deepinfer_jax.cache import Codec  # noqa: E402
from deepinfer_jax.model import attention, block, engram, exchange, hyper, index, moe, rope  # noqa: E402
from deepinfer_jax.model.attention import Entries, Reach, Ring  # noqa: E402
from deepinfer_jax.numerics import Numerics  # noqa: E402
from deepinfer_jax.rows import FAR, spans_of, text_rows  # noqa: E402
from deepinfer_jax.tables import Rotation  # noqa: E402
from kernels_bridge import building, direct  # noqa: E402
from tests.small import PLAIN  # noqa: E402

NUMERICS = Numerics.fp32("batched")
CFG = dataclasses.replace(PLAIN, rms_norm_eps=1e-6, gate_temp=0.5)
BOUND = 2e-6  # relative to the largest number: sums of up to 80 float32, in another order


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers(seed, low, high, *shape):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def check(name, function, *given):
    """One call by its name, with XLA's results."""
    jitted = jax.jit(function)
    want = jax.tree.leaves(jitted(*given))
    run = Executed(jitted, device="cpu", ops=built.named(CFG, NUMERICS))
    assert run.program(*given).replaced == {name}
    for _ in range(2):  # the second time in memory that was used
        got = jax.tree.leaves(run(*place(jax.tree.map(np.array, given), "cpu")))
        for one, other in zip(want, got, strict=True):
            one, other = np.asarray(one), other.numpy()
            if one.dtype.kind == "f":
                scale = np.abs(one[np.isfinite(one)]).max(initial=1)
                np.testing.assert_allclose(other, one, rtol=0, atol=BOUND * scale)
            else:
                np.testing.assert_array_equal(other, one)
    return want


# -- hyper-connections, norms, rotations -----------------------------------------------------------


@pytest.mark.parametrize("streams", [3, 4])
def test_mixes(streams):
    cfg = dataclasses.replace(CFG, hc_mult=streams, hc_sinkhorn_iters=5)
    given = normal(1, 7, streams * (2 + streams)), normal(2, 3), normal(3, streams * (2 + streams))

    def mixes(raw, scale, base):
        return nx.mixes(raw, scale, base, streams, 5, cfg.hc_eps, NUMERICS)

    want = jax.tree.leaves(jax.jit(mixes)(*given))
    run = Executed(jax.jit(mixes), device="cpu", ops=built.named(cfg, NUMERICS))
    for one, other in zip(want, run(*place(given, "cpu")), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)


def test_sums_of_streams():
    streams = normal(1, 5, CFG.hc_mult, 13)
    c = CFG.hc_mult
    p = {"base": normal(2, 7), "fn": normal(3, 7, c * 13), "scale": normal(4, 3)}
    check("raw_mixes", lambda p, x: hyper.raw_mixes(p, x, CFG, NUMERICS), p, streams)
    mixed = hyper.Mix(normal(5, 5, c), normal(6, 5, c), normal(7, 5, c, c))
    check(
        "expand", lambda y, m, x: hyper.expand(y, m, x, NUMERICS), normal(8, 5, 13), mixed, streams
    )
    check("normed", lambda w, pre, x: hyper.normed(w, pre, x, CFG, NUMERICS), normal(9, 13),
          normal(10, 5, c), streams)  # fmt: skip


def test_norms():
    def norm(x, weight):
        return nx.rms_norm(x, weight, CFG.rms_norm_eps, NUMERICS)

    check("rms_norm", norm, normal(1, 5, 3, 11), normal(2, 11))
    check("rms_norm", norm, normal(1, 5, 16), normal(2, 16).astype(jnp.bfloat16))


@pytest.mark.parametrize("inverse", [False, True])
def test_rotations(inverse):
    angle = Rotation(normal(1, 5, 3), normal(2, 5, 3))

    def rotated(x, angle):
        return rope.rotated(x, angle, inverse, NUMERICS)

    check("rotated", rotated, normal(3, 5, 2, 9), angle)
    check("rotated", rotated, normal(3, 5, 9), angle)


# -- experts ---------------------------------------------------------------------------------------


def test_products_of_few_rows_and_of_groups():
    def dot(x, w):
        return nx.dot(x, w, NUMERICS)

    check("_dot", dot, normal(1, 6, 13), normal(2, 70, 13))
    check("_dot", dot, normal(1, 1, 16), normal(2, 5, 16))
    run = Executed(jax.jit(dot), device="cpu", ops=built.named(CFG, NUMERICS))
    assert not run.program(normal(1, 49, 13), normal(2, 70, 13)).replaced  # torch's
    check("_group_dot", lambda x, w: nx.group_dot(x, w, NUMERICS), normal(1, 7, 3, 13),
          normal(2, 3 * 5, 13))  # fmt: skip


@pytest.mark.parametrize("images", [False, True])
def test_routes_with_ties_and_a_second_bias(images):
    gate = {"weight": normal(1, 7, 13), "bias": normal(2, 7)}
    gate["weight"][4], gate["bias"][4] = gate["weight"][1], gate["bias"][1]  # equal: the lower
    if images:
        gate["bias_vl"] = 5 * normal(3, 7)
    image = np.arange(9) % 2 == 0

    def route(gate, x, image):
        return moe.route(gate, x, image, 3, CFG, NUMERICS)

    experts = check("route", route, gate, normal(4, 9, 13), image)[0]
    assert any({1, 4} <= set(row) for row in np.asarray(experts).tolist())


def rows_of(slots, positions):
    return text_rows(np.zeros(len(slots), np.int32), np.array(slots), np.array(positions))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_experts_some_of_which_are_nowhere(dtype):
    stacks = {f"w{i}": normal(i, 2, 6, *((17, 5) if i == 2 else (5, 17))).astype(dtype)
              for i in (1, 2, 3)}  # fmt: skip
    experts = np.argsort(normal(4, 9, 6), axis=1)[:, :3].astype(np.int32)
    experts[2] = exchange.NOWHERE
    routed = moe.Route(experts, np.abs(normal(5, 9, 3)), normal(6, 9, 6))
    rows = rows_of([0] * 9, range(9))

    def outputs(stacks, x, routed, rows):
        return moe.routed_experts(stacks, 1, x, routed, 6, rows, CFG, NUMERICS)

    (y,) = check("routed_experts", outputs, stacks, 3 * normal(7, 9, 17), routed, rows)
    assert not np.asarray(y)[2].any()


def test_a_row_may_name_an_expert_twice():
    """Then an expert has more to do than there are rows."""
    stacks = {f"w{i}": normal(i, 1, 4, *((17, 5) if i == 2 else (5, 17))) for i in (1, 2, 3)}
    routed = moe.Route(np.full((6, 3), 2, np.int32), np.abs(normal(5, 6, 3)), normal(6, 6, 4))

    def outputs(stacks, x, routed, rows):
        return moe.routed_experts(stacks, 0, x, routed, 4, rows, CFG, NUMERICS)

    check("routed_experts", outputs, stacks, normal(7, 6, 17), routed, rows_of([0] * 6, range(6)))


def test_the_expert_of_every_row():
    p = {"w1": normal(1, 5, 17), "w2": normal(2, 17, 5), "w3": normal(3, 5, 17)}
    check(
        "shared_expert",
        lambda p, x: moe.shared_expert(p, x, CFG, NUMERICS),
        p,
        3 * normal(4, 9, 17),
    )


# -- attention -------------------------------------------------------------------------------------

HEADS, WIDTH, SLOTS, RING, PAGE = 3, 11, 4, 17, 4
CODEC = Codec.plain(WIDTH)
SLOT = [2, 2, 2, 0, 3, -1]  # rows of three slots and padding
POSITION = [30, 31, 32, 3, 20, 0]
ROWS = rows_of(SLOT, POSITION)
FLOOR = np.array([0, 0, 25, 1, 0, FAR], np.int32)
REACH = Reach(CFG.sliding_window, 2, CODEC, CODEC, CFG.head_dim**-0.5)


def entries_of(seed, width=WIDTH):
    data, pages = normal(seed, 2, 9, PAGE, width), integers(seed, 0, 9, SLOTS, 5)
    pages[1] = -1  # nobody's
    return Entries(data, 1, pages)


@pytest.mark.parametrize("picked", [0, 6])
def test_attention_over_window_and_entries(picked):
    """Of new rows and old ones, a floor inside the window, empty selections, a padding row."""
    selected = np.sort(integers(1, -1, 15, len(SLOT), picked), axis=1)
    ring = normal(2, 3, SLOTS, RING, WIDTH)
    entries = dataclasses.replace(entries_of(3), source=None) if picked else None
    data = normal(5, len(SLOT), HEADS, WIDTH), normal(6, len(SLOT), WIDTH), ring, entries

    def attend(q, new, ring, entries, selected, floor, sink, rows):
        if entries is not None:
            entries = dataclasses.replace(entries, source=1)
        return attention.attend(q, new, Ring(ring, 2), entries, selected, floor, sink, rows,
                                spans_of(rows, SLOTS), REACH, NUMERICS)  # fmt: skip

    (out,) = check("attend", attend, *data, selected, FLOOR, normal(7, HEADS), ROWS)
    assert np.abs(np.asarray(out)[:5]).min() > 0


@pytest.mark.parametrize("donated", [(), ("ring",)])
def test_window_vectors_are_stored_where_a_later_row_wins(donated):
    """A slot with more rows than its ring has places; padding writes nothing."""
    rows = rows_of([1] * 20 + [3, -1], [*range(40, 60), 7, 0])

    def store(ring, new, rows):
        return attention.store_window(
            Ring(ring, 1), new, rows, spans_of(rows, SLOTS), CODEC, NUMERICS
        )

    ring = normal(1, 3, SLOTS, RING, WIDTH)
    (want,) = check("store_window", store, ring, normal(2, 22, WIDTH), rows)
    run = Executed(jax.jit(store), device="cpu", ops=built.named(CFG, NUMERICS), donated=donated)
    given = place((ring, normal(2, 22, WIDTH), rows), "cpu")
    before = given[0].clone()
    made = run(*given)
    np.testing.assert_array_equal(made, want)
    assert (made.data_ptr() == given[0].data_ptr()) == bool(donated)
    assert donated or torch.equal(given[0], before)


@pytest.mark.parametrize("common", [True, False])
def test_scores_of_entries(common):
    query = index.IndexQuery(normal(1, len(SLOT), HEADS, WIDTH), normal(2, len(SLOT), HEADS))
    ids = np.arange(19, dtype=np.int32) if common else integers(3, -2, 19, len(SLOT), 7)
    entries = dataclasses.replace(entries_of(4), source=None)

    def scores(query, entries, ids, rows):
        entries = dataclasses.replace(entries, source=1)
        return index.scores(query, entries, ids, rows, spans_of(rows, SLOTS), index.Field(2, CODEC),
                            NUMERICS)  # fmt: skip

    (score,) = check("_scores", scores, query, entries, ids, ROWS)
    assert {True, False} == set(np.isfinite(np.asarray(score)).reshape(-1).tolist())


def scored(n):
    """Ties, zeros of both signs, nothing to see, a NaN."""
    score = np.round(normal(1, 6, n))
    score[0, ::3], score[1], score[2, ::2], score[3, 1] = -np.inf, -np.inf, -0.0, np.nan
    return score


@pytest.mark.parametrize(("n", "k"), [(23, 5), (5, 5), (4, 7)])
def test_selections_with_ties(n, k):
    ids = np.arange(n, dtype=np.int32)
    each = np.sort(integers(2, 0, 90, 6, n), axis=1)

    def select(score, ids):
        return index.select(score, ids, k, NUMERICS)

    check("select", select, scored(n), ids)
    check("select", select, scored(n), each)


def test_candidates_hold_the_newest_block():
    def blocks(score, visible):
        return index.candidate_blocks(score, visible, CFG, NUMERICS)

    visible = np.array([0, 1, 17, 18, 19, 20], np.int32)
    for n in (23, 7):
        check("candidate_blocks", blocks, scored(n), np.minimum(visible, n))


def test_rows_of_an_engram_table():
    """Of the largest ids there may be, whose products take all of 63 bits."""
    cfg = dataclasses.replace(
        CFG, vocab_size=1 << 17, engram_compressed_vocab_size=1 << 17,
        engram_num_embeddings=(200, 200),
    )  # fmt: skip
    tokens = integers(1, -1, 1 << 17, 50, cfg.engram_max_ngram_size)
    for ordinal, constants in enumerate(engram.hash_constants(cfg)):

        def hashed(tokens, pad, ordinal=ordinal, constants=constants):
            return block._hashed(tokens, pad, ordinal, constants, NUMERICS)

        jitted = jax.jit(lambda tokens, pad, hashed=hashed: hashed(tokens, pad))
        run = Executed(jitted, device="cpu", ops=built.named(cfg, NUMERICS))
        assert run.program(tokens, np.int32(5)).replaced == {"_hashed"}
        got = run(*place((tokens, np.int32(5)), "cpu"))
        np.testing.assert_array_equal(got, jitted(tokens, np.int32(5)))


# -- what is not taken, and what is refused --------------------------------------------------------


def test_what_rounds_inside_is_left_as_it_is():
    assert set(built.named(CFG, Numerics(rows="batched"))) == {"mixes"}


def test_a_slot_outside_is_an_error_and_no_memory_of_others():
    rows = rows_of([SLOTS], [3])

    def attend(q, new, ring, rows):
        nothing = jnp.zeros((1, 0), jnp.int32)
        floor, sink, spans = rows.positions * 0, jnp.zeros(HEADS), spans_of(rows, SLOTS)
        rings = Ring(ring, 0)
        return attention.attend(
            q, new, rings, None, nothing, floor, sink, rows, spans, REACH, NUMERICS
        )

    run = Executed(jax.jit(attend), device="cpu", ops=built.named(CFG, NUMERICS))
    given = normal(1, 1, HEADS, WIDTH), normal(2, 1, WIDTH), normal(3, 1, SLOTS, RING, WIDTH), rows
    with pytest.raises(IndexError, match="attend: an index points outside"):
        run(*place(given, "cpu"))


def test_without_a_compiler_the_message_names_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    direct.load.cache_clear()
    with pytest.raises(building.NoKernelsError, match=r'install one .*kernels="torch"'):
        built.named(CFG, NUMERICS)
    direct.load.cache_clear()
