"""Global KV dealt to the devices of an axis "context": what is found, read and written is that of
one device. Whole models over such meshes: tests/test_parallel.py, tests/engine/test_mesh.py.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from deepinfer_jax import cache as caches
from deepinfer_jax import layout
from deepinfer_jax.axes import CONTEXT
from deepinfer_jax.cache import Paging
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.engine import spread
from deepinfer_jax.mirror import Split
from deepinfer_jax.model import attention, block, dealt, index
from deepinfer_jax.model.attention import Entries, Reach, Ring
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.forward import Replay, forward
from deepinfer_jax.model.index import Field, IndexQuery
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import spans_of, take_rows, text_rows
from kernels_bridge.building import NoKernelsError, find_compiler
from tests import small

CFG, NUMERICS = small.CONFIG, Numerics.fp32_kvq()  # float32 shows what bfloat16 may round away
SLOTS, PAGES, ENTRIES = 3, 7, 12  # entries of a page: a multiple of every number of devices here
COUNTS, STARTS = (3, 0, 6), (40, 0, 9)  # rows of each slot in the call, and where they begin
EVERYWHERE, SHARED = PartitionSpec(), PartitionSpec(None, None, CONTEXT)
KINDS = CFG.kinds()
RATIO = KINDS[3].ratio


def rows():
    """With one padding row at the end."""
    each = [(s, STARTS[s] + n) for s in range(SLOTS) for n in range(COUNTS[s])] + [(-1, 0)]
    slots, positions = np.array(each, np.int32).T
    return text_rows(np.zeros(len(each)), slots, positions)


def mesh_of(ranks: int):
    return layout.device_mesh(1, 1, jax.devices()[:ranks], context=ranks)


def dealt_out(whole: np.ndarray, ranks: int) -> np.ndarray:
    """Entries [sources, P, n, w] as devices have them, one behind the other along n."""
    sources, pages, n, width = whole.shape
    turned = np.swapaxes(whole.reshape(sources, pages, n // ranks, ranks, width), 2, 3)
    return turned.reshape(whole.shape)


@functools.cache
def state() -> dict[str, Any]:
    """A cache of random vectors of few values, so that scores tie; queries for it."""
    rng = np.random.default_rng(1)
    t = len(np.asarray(rows().slots))

    def few(*shape):
        return rng.integers(-2, 3, shape).astype(np.float32) / 2

    main, key = (make(CFG, NUMERICS) for make in (caches.main_codec, caches.index_codec))
    window = caches.window_codec(CFG, NUMERICS)
    pages = rng.permutation(PAGES)[: 2 * SLOTS].reshape(SLOTS, 2).astype(np.int32)
    return {
        "kv": np.asarray(main.store(jnp.asarray(rng.normal(size=(2, PAGES, ENTRIES, 32)), "f"))),
        "keys": np.asarray(key.store(jnp.asarray(few(2, PAGES, ENTRIES, CFG.index_head_dim)))),
        "ring": np.asarray(window.store(jnp.asarray(rng.normal(size=(1, SLOTS, 16, 32)), "f"))),
        "pages": pages,
        "query": IndexQuery(
            jnp.asarray(few(t, CFG.index_n_heads, CFG.index_head_dim)),
            jnp.abs(jnp.asarray(few(t, CFG.index_n_heads))),
        ),
        "q": rng.normal(size=(t, 2, 32)).astype(np.float32),
        "new": rng.normal(size=(t, 32)).astype(np.float32),
        "sink": np.zeros(2, np.float32),
    }


def attended(kv, ring, q, new, sink, selected, own, pages, numerics, split=None):
    """Of `own` rows; `split`: kv is a device's share."""
    window, main = (make(CFG, numerics) for make in (caches.window_codec, caches.main_codec))
    reach = Reach(CFG.sliding_window, RATIO, window, main, 0.2)
    floor = block.padding_floor(own, jnp.zeros_like(own.positions))
    entries, rings = Entries(kv, 1, pages), Ring(ring, 0)
    spans = spans_of(rows(), SLOTS)
    about: Any = q, new, rings, entries, selected, floor, sink, own, spans, reach, numerics
    return attention.attend(*about) if split is None else dealt.attend(*about, rows(), split)


@functools.partial(jax.jit, static_argnames="numerics")
def on_one(given, numerics):
    """(selected by the candidate source, its candidates, selected among those, attention)."""
    every, spans = rows(), spans_of(rows(), SLOTS)
    field = Field(RATIO, caches.index_codec(CFG, numerics))
    keys, query = Entries(given["keys"], 1, given["pages"]), given["query"]
    ids = jnp.arange(2 * ENTRIES, dtype=jnp.int32)
    score = index.scores(query, keys, ids, every, spans, field, numerics)
    first = index.select(score, ids, CFG.index_topk, numerics)
    visible = index.visible_entries(every.positions, RATIO)
    candidates = index.candidate_blocks(score, visible, CFG, numerics)
    ids = index.members(candidates, CFG.candidate_block_size)
    score = index.scores(query, keys, ids, every, spans, field, numerics)
    second = index.select(score, ids, CFG.index_topk, numerics)
    parts = [given[name] for name in ("kv", "ring", "q", "new", "sink")]
    return first, candidates, second, attended(*parts, second, every, given["pages"], numerics)


def over_devices(given, ranks, numerics):
    """The same over a mesh."""
    split = Split(CONTEXT, ranks, (rows().slots.shape[0],))
    field = Field(RATIO, caches.index_codec(CFG, numerics))
    specs = dict.fromkeys(given, EVERYWHERE) | {"kv": SHARED, "keys": SHARED}

    def here(given):
        spans, places = spans_of(rows(), SLOTS), split.own()
        own, safe = take_rows(rows(), places), jnp.maximum(places, 0)
        keys = Entries(given["keys"], 1, given["pages"])
        query = jax.tree.map(lambda x: x[safe], given["query"])
        find = functools.partial(dealt.select, query, keys)
        about: Any = rows(), spans, split, field
        first, candidates = find(
            jnp.full((own.slots.shape[0], 4), -1, jnp.int32), *about, KINDS[3], CFG, numerics
        )
        second, _ = find(candidates, *about, KINDS[4], CFG, numerics)
        o = attended(
            given["kv"], given["ring"], given["q"][safe], given["new"], given["sink"], second, own,
            given["pages"], numerics, split,
        )  # fmt: skip
        return tuple(map(split.gathered, (first, candidates, second, o)))

    mesh = mesh_of(ranks)
    over = jax.shard_map(here, mesh=mesh, in_specs=(specs,), out_specs=EVERYWHERE, check_vma=False)
    shares = {name: dealt_out(given[name], ranks) for name in ("kv", "keys")}
    return jax.jit(over)(given | shares)


@pytest.mark.parametrize(
    ("ranks", "form"),
    [
        (2, "tiled"),
        (3, "tiled"),
        pytest.param(4, "tiled", marks=pytest.mark.exhaustive),
        pytest.param(2, "ffi", marks=pytest.mark.exhaustive),
    ],
)
def test_what_is_found_and_attended_to_is_that_of_one_device(ranks, form, monkeypatch):
    """Blocks of candidates that devices share unevenly, ties, and few rows at a time."""
    assert CFG.candidate_block_size % 2
    monkeypatch.setattr(dealt, "ROWS_AT_ONCE", 2)
    if form == "ffi":
        try:
            find_compiler()
        except NoKernelsError as error:
            pytest.skip(str(error))
    numerics, real = dataclasses.replace(NUMERICS, rows=form), np.asarray(rows().real)
    want = on_one(state(), numerics)
    assert (np.asarray(want[0])[real] != np.asarray(want[2])[real]).any()
    for got, one in zip(over_devices(state(), ranks, numerics), want, strict=True):
        np.testing.assert_array_equal(bits(got)[real], bits(one)[real])


def test_ties_stand_where_the_choice_is_made():
    """So that the test above says something about their order."""
    every, given = rows(), state()
    field = Field(RATIO, caches.index_codec(CFG, NUMERICS))
    keys = Entries(jnp.asarray(given["keys"]), 1, jnp.asarray(given["pages"]))
    ids = jnp.arange(2 * ENTRIES, dtype=jnp.int32)
    spans = spans_of(every, SLOTS)
    score = np.asarray(index.scores(given["query"], keys, ids, every, spans, field, NUMERICS))
    ordered = -np.sort(-score, axis=1)
    k = CFG.index_topk
    assert (ordered[:, k - 1] == ordered[:, k])[np.asarray(every.real)].any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_entry_is_written_by_the_device_that_has_it(ranks):
    numerics, t = Numerics.native(), rows().slots.shape[0]
    rng = np.random.default_rng(2)
    kv = jnp.asarray(rng.normal(size=(t, CFG.head_dim)), jnp.float32)
    key = jnp.asarray(rng.normal(size=(t, CFG.index_head_dim)), jnp.float32)
    main = caches.main_codec(CFG, numerics).store(kv)
    stored = caches.index_codec(CFG, numerics).store(key)
    call: Any = types.SimpleNamespace(whole=rows(), cfg=CFG)
    paging = Paging(2 * ENTRIES, PAGES)  # of both ratios
    empty = functools.partial(caches.init_cache, CFG, numerics, SLOTS, 46, paging=paging)

    def written(cache):
        for ratio in CFG.ratios:
            cache = block.store_entries(call, cache, ratio, 0, main, stored)
        return cache.kv, cache.keys

    own = jax.shard_map(
        written, mesh=mesh_of(ranks), in_specs=(spread.cache_specs(mesh_of(ranks)),),
        out_specs=SHARED, check_vma=False,
    )  # fmt: skip
    pages = jnp.asarray(state()["pages"])
    one, shared = (dataclasses.replace(each, pages=pages) for each in (empty(), empty(ranks=ranks)))
    made = jax.jit(own)(shared), jax.jit(written)(one)
    for got, want in zip(*map(jax.tree.leaves, made), strict=True):
        assert np.asarray(want).any()
        np.testing.assert_array_equal(got, dealt_out(np.asarray(want), ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_device_holds_its_share_of_global_kv_and_all_of_the_rest(ranks):
    """By the shardings that an engine's cache is made with; requests are spread as well."""
    paging = Paging(2 * ENTRIES, 2 * PAGES)
    whole = caches.cache_shapes(CFG, Numerics.native(), 4, 96, paging=paging, ranks=ranks)
    mesh = layout.device_mesh(2, 1, jax.devices()[: 2 * ranks], context=ranks)
    for field in dataclasses.fields(whole):
        if field.name == "ranks":
            continue
        spec = getattr(spread.cache_specs(mesh), field.name)
        parts = 2 * ranks if field.name in ("kv", "keys") else 2
        for leaf in jax.tree.leaves(getattr(whole, field.name)):
            held = jax.NamedSharding(mesh, spec).shard_shape(leaf.shape)
            assert np.prod(held) * parts == np.prod(leaf.shape), field.name


def test_what_a_device_holds_of_an_empty_cache():
    """A capacity that the devices cannot share evenly is rounded up."""
    one = caches.cache_shapes(CFG, NUMERICS, 2, 9)
    two = jax.eval_shape(lambda: caches.init_share(CFG, NUMERICS, 2, 9, 2))
    assert [kv.shape[2] for kv in one.kv] == [5, 9]
    assert [kv.shape[2] for kv in two.kv] == [key.shape[2] for key in two.keys] == [3, 5]
    assert two.window.shape == one.window.shape


def test_an_empty_cache_is_made_in_parts():
    """No device makes more of global KV than its part, not even on the way."""
    mesh, specs = mesh_of(2), spread.cache_specs(mesh_of(2))
    whole = caches.cache_shapes(CFG, NUMERICS, 2, 180, ranks=2)

    def share():
        return caches.init_share(CFG, NUMERICS, 2, 180, 2)

    over = jax.shard_map(share, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False)
    made = jax.jit(over)()
    for name in ("window", "kv", "keys", "pages"):
        how = jax.NamedSharding(mesh, getattr(specs, name))
        each = (jax.tree.leaves(getattr(cache, name)) for cache in (made, whole))
        for array, shaped in zip(*each, strict=True):
            assert array.shape == shaped.shape
            held = {shard.data.shape for shard in array.addressable_shards}
            assert held == {how.shard_shape(shaped.shape)}, name
    traced = str(jax.make_jaxpr(share)())
    assert "[1,2,90,32]" in traced  # entries of single tokens
    assert "[1,2,180,32]" not in traced


def test_what_does_not_fit_a_shared_cache_is_refused():
    with pytest.raises(ValueError, match=r"multiple of 6, .* for each of 3 devices, .* got 4"):
        caches.cache_shapes(CFG, NUMERICS, 2, 40, paging=Paging(4, 20), ranks=3)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        caches.cache_shapes(CFG, NUMERICS, 2, 40, ranks=0)
    cache = caches.cache_shapes(CFG, NUMERICS, SLOTS, 60, ranks=2)
    nothing: Any = None
    about = nothing, types.SimpleNamespace(positions=200), rows(), cache, CFG, NUMERICS
    with pytest.raises(ValueError, match="capture sees the rows of one device"):
        forward(*about, capture=Capture(selected="all"))
    with pytest.raises(ValueError, match="replay drops rows"):
        forward(*about, replay=Replay("mask"))
    with pytest.raises(ValueError, match=r"shared by 2 devices along 'context', split .* 3 along"):
        forward(*about, split=Split(CONTEXT, 3, (rows().slots.shape[0],)))
