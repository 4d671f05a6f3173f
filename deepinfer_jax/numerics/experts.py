"""Products with the weights of experts: rows are sorted by expert once, for all products."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.numerics import cuda, stored, tiles
from deepinfer_jax.numerics.elements import float_weight, round_to
from deepinfer_jax.numerics.pallas import grouped as kernels
from deepinfer_jax.numerics.products import contract, prepared
from deepinfer_jax.numerics.settings import Numerics
from kernels_bridge import ffi


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slot", "source", "real", "expert", "live", "used"],
    meta_fields=["tile"],
)
@dataclasses.dataclass(frozen=True)
class Groups:
    """M rows sorted by expert and padded to whole tiles of one expert each.

    slot    [M] place of a row among the padded rows
    source  [tiles * tile] row that stands at a place; M where there is none
    real    [M] whether the row has an expert
    expert  [tiles] whose tile it is
    live    [tiles] rows in a tile, its first ones
    used    tiles that hold rows; they come first
    tile    rows per tile
    """

    slot: jax.Array
    source: jax.Array
    real: jax.Array
    expert: jax.Array
    live: jax.Array
    used: jax.Array
    tile: int


def group_rows(ids: jax.Array, weight: Any, numerics: Numerics) -> Groups:
    """Sort rows by their experts `ids` [M] (stable); an id beyond the last expert is none.

    weight [layers, E, N, K]: any of the stacks that the rows will be multiplied with. A row sees
    neither how many rows its expert has nor which. No capacity, nothing is dropped.
    """
    m, experts = ids.shape[0], stored.shape(weight)[1]
    tile = tiles.of_experts(m, weight, numerics)
    number = min(m, -(-m // tile) + min(experts, m))
    count = jnp.zeros((experts,), jnp.int32).at[ids].add(1, mode="drop")
    each = (count + tile - 1) // tile
    ends = jnp.cumsum(each, dtype=jnp.int32)
    order = jnp.argsort(ids, stable=True)
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    rank = jnp.arange(m, dtype=jnp.int32) - first[ids[order]]
    rank = jnp.zeros((m,), jnp.int32).at[order].set(rank)
    slot = (ends - each)[ids] * tile + rank
    tiles_of_all = jnp.arange(number, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, tiles_of_all, side="right", method="compare_all")
    real = ids < experts
    place = jnp.where(real, slot, number * tile)
    source = jnp.full((number * tile,), m, jnp.int32)
    source = source.at[place].set(jnp.arange(m, dtype=jnp.int32), mode="drop")
    expert = jnp.minimum(owner, experts - 1).astype(jnp.int32)
    before = tiles_of_all - (ends - each)[expert]
    live = jnp.clip(count[expert] - before * tile, 0, tile)
    return Groups(slot, source, real, expert, live, ends[-1], tile)


def spread(groups: Groups, x: jax.Array, copies: int = 1) -> jax.Array:
    """x [M / copies, ...] to the padded places, each row `copies` times; zeros elsewhere."""
    empty = groups.source == groups.slot.shape[0]
    rows = x[jnp.where(empty, 0, groups.source // copies)]
    return jnp.where(empty.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros((), x.dtype), rows)


def collect(groups: Groups, y: jax.Array) -> jax.Array:
    """y at the padded places back in the order of rows [M, ...]; zeros for rows without expert."""
    real = groups.real.reshape(-1, *[1] * (y.ndim - 1))
    return jnp.where(real, y[jnp.where(groups.real, groups.slot, 0)], jnp.zeros((), y.dtype))


def grouped_linear(
    x: jax.Array, weight: Any, layer: Any, groups: Groups, numerics: Numerics,
    quantized: bool = False,
) -> jax.Array:  # fmt: skip
    """`linear` of padded rows x [tiles * tile, K] through weight[layer, expert] [N, K] of each.

    Tiles without rows come out undefined; `collect` takes nothing from them.
    """
    x = prepared(x, numerics, quantized)
    if numerics.rows in ("tiled", "ffi"):
        return map_groups(_linear_alone, x, weight, layer, groups, numerics)
    layer = jnp.asarray(layer, jnp.int32)
    return cast(Any, _grouped(x, (weight,), layer, groups, numerics))[0]


def _linear_alone(linear, x, weight):
    return linear(x, weight)[0]


def map_groups(
    f: Callable, rows: Any, stacks: Any, layer: Any, groups: Groups, numerics: Numerics
) -> jax.Array:
    """f(linear, rows, stacks) of padded rows, a tree of [tiles * tile, ...] -> [tiles * tile, ...].

    linear(x, *weights) are `grouped_linear` of `prepared` x with weight[layer, expert] of each row,
    for every one of the weights, which a kernel may read at once; f may call it several times and
    sees no other row. On a CPU one loop runs all of f on tile after
    tile, which keeps a tile's intermediate values in its cache. f is static: a function without
    arrays in it.
    Tiles without rows come out undefined; `collect` takes nothing from them.
    """
    layer = jnp.asarray(layer, jnp.int32)
    if numerics.rows in ("tiled", "ffi"):
        return cast(jax.Array, _tile_by_tile(f, rows, stacks, layer, groups, numerics))
    return _all_tiles(f, rows, stacks, layer, groups, numerics)


def _all_tiles(f, rows, stacks, layer, groups, numerics):
    def linear(x, *weights):
        return _grouped(x, weights, layer, groups, numerics)

    return f(linear, rows, stacks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def _tile_by_tile(f, rows, stacks, layer, groups, numerics):
    parts = jax.tree.map(lambda a: a.reshape(-1, groups.tile, *a.shape[1:]), rows)

    def one(t):
        def linear(x, *weights):
            return tuple(_of_tile(x, groups.expert[t], w, layer, numerics) for w in weights)

        return f(linear, jax.tree.map(lambda a: a[t], parts), stacks)

    # Wide, since XLA:CPU would convert all of a bfloat16 result to float32 and back for each tile.
    out = jax.eval_shape(one, 0)
    empty = jnp.zeros((groups.expert.shape[0], *out.shape), jnp.float32)
    y = lax.fori_loop(0, groups.used, lambda t, y: y.at[t].set(one(t).astype(jnp.float32)), empty)
    return y.reshape(-1, *out.shape[1:]).astype(out.dtype)


def _tile_by_tile_forward(f, rows, stacks, layer, groups, numerics):
    y = _tile_by_tile(f, rows, stacks, layer, groups, numerics)
    return y, (rows, stacks, layer, groups)


def _tile_by_tile_backward(f, numerics, saved, g):
    rows, stacks, layer, groups = saved
    ordinary = dataclasses.replace(numerics, rows="batched")

    def run(rows, stacks):
        return _all_tiles(f, rows, stacks, layer, groups, ordinary)

    _, pull = jax.vjp(run, rows, stacks)
    return *pull(g), None, None


_tile_by_tile.defvjp(_tile_by_tile_forward, _tile_by_tile_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped(x, weights, layer, groups, numerics):
    if numerics.rows == "cuda" and all(cuda.takes(x, weight) for weight in weights):
        numbers = layer, groups.expert, groups.live, groups.used
        return cuda.experts(x, weights, numbers, numerics.dtype)
    return tuple(_grouped_one(x, weight, layer, groups, numerics) for weight in weights)


def _grouped_one(x, weight, layer, groups, numerics):
    if numerics.uses_pallas:
        return kernels.product(
            x, weight, layer, groups.expert, groups.live, groups.used, groups.tile,
            numerics.dtype, numerics.interpret,
        )  # fmt: skip
    return _batched(x, weight, layer, groups, numerics)


def _of_tile(x, expert, weight, layer, numerics):
    """One tile; the weight comes from the whole stack, so that no layer of it is ever copied."""
    own = jax.tree.map(lambda a: a[layer, expert], weight)
    own = float_weight(own, numerics.dtype)
    product = ffi.product(x[:, None], own)[:, 0] if numerics.rows == "ffi" else contract(x, own)
    return round_to(product, numerics.dtype)


def _batched(x, weight, layer, groups, numerics):
    parts = x.reshape(-1, groups.tile, x.shape[-1])
    y = jax.vmap(_of_tile, in_axes=(0, 0, None, None, None))(
        parts, groups.expert, weight, layer, numerics
    )
    return y.reshape(x.shape[0], -1)


def _grouped_forward(x, weights, layer, groups, numerics):
    return _grouped(x, weights, layer, groups, numerics), (x, weights, layer, groups)


def _grouped_backward(numerics, saved, slopes):
    x, weights, layer, groups = saved
    live = (groups.source < groups.slot.shape[0])[:, None]
    # What no product has written may be NaN, which a gradient of zero would not silence.
    x, *slopes = (jnp.where(live, a, jnp.zeros((), a.dtype)) for a in (x, *slopes))
    ordinary = dataclasses.replace(numerics, rows="batched")

    def plain(x, weights):
        return tuple(_batched(x, weight, layer, groups, ordinary) for weight in weights)

    _, pull = jax.vjp(plain, x, weights)
    return *pull(tuple(slopes)), None, None


_grouped.defvjp(_grouped_forward, _grouped_backward)
