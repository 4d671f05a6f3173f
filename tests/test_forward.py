"""Loops over equal layers and units against single layers, and sizes that are refused."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import params, rows, tables
from deepinfer_jax.cache import cache_shapes, init_cache
from deepinfer_jax.model import forward, hyper
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.program import Unit, program
from deepinfer_jax.numerics import Numerics, rms_norm
from tests.small import CONFIG

# Two equal units of a source and two reusing layers, then a boundary and three equal sources.
DEEP = dataclasses.replace(
    CONFIG,
    vision=None,
    image_token_id=None,
    num_hidden_layers=11,
    compress_ratios=(0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0),
    kv_source_layer_ids=(1, 4, 7),
    index_source_layer_ids=(1, 4, 7, 8, 9, 10),
    candidate_source_layer_id=7,
    engram_layer_ids=(0,),
    engram_num_embeddings=(61,),
    dspark_target_layer_ids=(7,),
)
NUMERICS = Numerics.native()
LENGTHS = (23, 9)


@jax.jit
def both(weights, made, batch, cache):
    """(looped hidden states and cache, unrolled output, routing and cache).

    What captures runs the loops of `program`; `looped` is tested in tests/test_looped.py.
    """
    some = Capture(router_load="all")
    hidden, looped = forward.forward(weights, made, batch, cache, DEEP, NUMERICS, capture=some)
    seen, unrolled = forward.trace(weights, made, batch, cache, DEEP, NUMERICS)
    last = seen[-1][0]
    u = hyper.collapse(last.pre, last.x, NUMERICS)
    output = rms_norm(u, weights["norm"], DEEP.rms_norm_eps, NUMERICS)
    return (hidden.output, hidden.routed, looped), (output, last.routed, unrolled)


def test_the_program_has_loops_of_both_kinds():
    assert [(u.first, u.repeat, [n for _, n in u.runs]) for u in program(DEEP)] == [
        (0, 1, [1]),
        (1, 2, [1, 2]),
        (7, 1, [1]),
        (8, 3, [1]),
    ]


@pytest.mark.exhaustive
def test_loops_give_the_bits_of_single_layers():
    weights = params.init(jax.random.key(5), DEEP)
    token_map = np.arange(DEEP.vocab_size, dtype=np.int32) % DEEP.engram_compressed_vocab_size
    made = tables.make_tables(DEEP, token_map, 40)
    tokens = np.random.default_rng(3).integers(0, DEEP.vocab_size, (2, max(LENGTHS)))
    batch = rows.batch_rows(jnp.asarray(tokens), jnp.array(LENGTHS))
    cache = init_cache(DEEP, NUMERICS, slots=2, capacity=40)
    looped, unrolled = both(weights, made, batch, cache)
    real = np.asarray(batch.real)
    for one, other in zip(looped[:2], unrolled[:2], strict=True):
        one, other = np.asarray(one), np.asarray(other)
        rows_first = one if one.shape[0] == real.size else np.moveaxis(one, 1, 0)
        others_first = other if other.shape[0] == real.size else np.moveaxis(other, 1, 0)
        np.testing.assert_array_equal(rows_first[real], others_first[real])
    jax.tree.map(np.testing.assert_array_equal, looped[2], unrolled[2])


# -- sizes that are refused ------------------------------------------------------------------------


def shapes(capacity, positions, rows_of=(2, 11), cfg=DEEP, **options):
    """The output shape of a forward whose sizes are these; nothing is compiled."""
    batch = jax.eval_shape(rows.batch_rows, jax.ShapeDtypeStruct(rows_of, jnp.int32), TWO)
    cache = None if capacity is None else cache_shapes(cfg, NUMERICS, 2, capacity)
    call = functools.partial(forward.forward, cfg=cfg, numerics=NUMERICS, **options)
    made = tables.table_shapes(cfg, positions)
    return jax.eval_shape(call, params.shapes(cfg), made, batch, cache)[0].output.shape


TWO = jax.ShapeDtypeStruct((2,), jnp.int32)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"capacity": 42, "positions": 40}, "capacity must be at most 40, .* got 21 entries of 2"),
        ({"capacity": 41, "positions": 40}, "got 21 entries of 2"),
        ({"capacity": 40, "positions": 39}, "got 40 entries of 1"),
        ({"capacity": None, "positions": 10, "length": 11}, "length .* at most 10, .* got 11"),
        ({"capacity": None, "positions": 21}, "length .* at most 21, .* got 22"),
    ],
)
def test_positions_beyond_the_tables_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        shapes(**sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {"capacity": 39, "positions": 39},  # rounded up to 40 for the entries of two tokens
        {"capacity": None, "positions": 11, "length": 11},
        {"capacity": None, "positions": 22},
    ],
)
def test_positions_up_to_the_end_of_the_tables_are_not(sizes):
    assert shapes(**sizes) == (22, DEEP.hidden_size)


@pytest.mark.parametrize(("ratio", "width"), [(1, 4), (2, 3)])
def test_candidates_follow_the_ratio_of_their_source(ratio, width):
    """At most 4 blocks of 3 entries, made of 1 or 2 tokens each, of a slot with 14 tokens."""
    cfg = dataclasses.replace(
        DEEP,
        compress_ratios=(0, *(2,) * 6, *(ratio,) * 4, 0, 0),
    )
    cache = cache_shapes(cfg, NUMERICS, 2, 14)

    def first(weights, made, batch, cache):
        call, cache = forward.make_call(weights, made, batch, cache, cfg, NUMERICS)
        return forward.first_stream(call, cache).candidates

    batch = jax.eval_shape(rows.batch_rows, jax.ShapeDtypeStruct((2, 5), jnp.int32), TWO)
    made = tables.table_shapes(cfg, 14)
    found = jax.eval_shape(first, params.shapes(cfg), made, batch, cache)
    assert found.shape == (10, width)
    assert shapes(14, 14, (2, 5), cfg) == (10, DEEP.hidden_size)


def test_a_boundary_inside_a_loop_is_noticed():
    unit = Unit(7, 2, program(DEEP)[2].runs)
    with pytest.raises(AssertionError, match="boundary is one layer"):
        forward._cross_boundary(None, unit, None, forward.Replay("compact"))
