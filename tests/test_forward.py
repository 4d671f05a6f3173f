"""Loops over equal layers and units against the same layers one by one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import params, rows, tables
from deepinfer_jax.cache import init_cache
from deepinfer_jax.model import forward, hyper
from deepinfer_jax.model.program import program
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
    """(looped hidden states and cache, unrolled output, routing and cache)."""
    hidden, looped = forward.forward(weights, made, batch, cache, DEEP, NUMERICS)
    seen, unrolled = forward.trace(weights, made, batch, cache, DEEP, NUMERICS)
    last = seen[-1][0]
    u = hyper.collapse(last.pre, last.x, NUMERICS)
    output = rms_norm(u, weights["norm"], DEEP.rms_norm_eps, NUMERICS.dtype)
    return (hidden.output, hidden.routed, looped), (output, last.routed, unrolled)


def test_the_program_has_loops_of_both_kinds():
    assert [(u.first, u.repeat, [n for _, n in u.runs]) for u in program(DEEP)] == [
        (0, 1, [1]),
        (1, 2, [1, 2]),
        (7, 1, [1]),
        (8, 3, [1]),
    ]


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
