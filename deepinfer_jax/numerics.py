"""The one module where floating-point sums happen, each in an order fixed by the model.

A row of any result is a function of that row's operands alone: never of the number of rows, their
order, padding, neighbours, or of the program around it. On CPU that needs four rules:

- a dot runs on tiles of a fixed number of rows (never on one row, never on all of them at once);
- a row sum uses a reducer that the compiler does not recognise, in fixed lanes;
- an inexact product that feeds an addition is pinned, so that it is never contracted to one fused
  multiply-add in one program and not in another;
- roundings to bfloat16 are explicit.

`rows="batched"` trades the promise for plain XLA operations; `rows="dense"` goes further and works
on whole sequences at once, with masks instead of gathers (training on accelerators).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import quant

_FLOAT_MAX = np.finfo(np.float32).max
_LANES, _WIDE_LANES, _WIDE = 16, 512, 8192


@dataclasses.dataclass(frozen=True, slots=True)
class Numerics:
    """What fixes the bits of a result, apart from model, weights and chip.

    dtype                 activations between modules: "bfloat16" or "float32"
    quantize_activations  FP8 by 32 before every linear that the release stores in FP8 or FP4
    quantize_kv           quantized window KV, compressed KV, index keys and queries
    index_rounding        "once": index scores accumulate in float32 and round to bfloat16 once;
                          "reference": the published reference's three roundings
    rows                  "tiled": the invariant forms; "batched": plain XLA, no promise; "dense":
    the
                          same, for calls without a cache whose rows are sequences of equal length
    row_tile              rows per dot below `long_rows` rows, and `long_row_tile` from there on
    index_block           index keys scored at once
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantize_activations: bool = True
    quantize_kv: bool = True
    index_rounding: Literal["once", "reference"] = "once"
    rows: Literal["tiled", "batched", "dense"] = "tiled"
    row_tile: int = 8
    long_row_tile: int = 32
    long_rows: int = 128
    index_block: int = 512

    @classmethod
    def native(cls, quantized: bool = True) -> Numerics:
        """What the model was trained with; `quantized` is `ModelConfig.quantized`."""
        return cls(quantize_activations=quantized)

    @classmethod
    def fp32(cls) -> Numerics:
        """Float32 throughout, no quantization points: for parity with other implementations."""
        return cls(dtype="float32", quantize_activations=False, quantize_kv=False)

    @classmethod
    def fp32_kvq(cls) -> Numerics:
        """`fp32` with the KV and index quantizers kept."""
        return cls(dtype="float32", quantize_activations=False, quantize_kv=True)

    def fingerprint(self) -> str:
        """Twelve hex digits naming these settings; equal settings on one chip give equal bits."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:12]


# -- elements --------------------------------------------------------------------------------------


@jax.custom_jvp
def pin(x: jax.Array) -> jax.Array:
    """The identity on finite float32, opaque to fusion of a product into an add."""
    return jnp.minimum(x, _FLOAT_MAX)


@pin.defjvp
def _pin_jvp(primals, tangents):
    return pin(primals[0]), tangents[0]


def quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """x / divisor for a result that feeds an addition.

    A compiler divides by a broadcast through the reciprocal, so this is an inexact product too.
    """
    return pin(x / divisor)


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Round once to `dtype`; survives compilers that may keep excess precision."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        x = lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def float_weight(leaf: Any, dtype: Any) -> jax.Array:
    """A weight leaf (stored or plain) as floats of `dtype`."""
    if isinstance(leaf, quant.Quantized):
        return quant.dequantize(leaf, dtype)
    return leaf.astype(dtype)


# -- sums ------------------------------------------------------------------------------------------


def _pinned_add(a, b):
    return jnp.minimum(a, _FLOAT_MAX) + b


@jax.custom_jvp
def row_sum(x: jax.Array) -> jax.Array:
    """Sum of float32 [..., K] over the last axis: lanes first, each in order, then the lanes."""
    lanes = _WIDE_LANES if x.shape[-1] >= _WIDE else _LANES
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % lanes)])
    parts = padded.reshape(*x.shape[:-1], -1, lanes)
    parts = lax.reduce(parts, np.float32(0), _pinned_add, (parts.ndim - 2,))
    return lax.reduce(parts, np.float32(0), _pinned_add, (parts.ndim - 1,))


@row_sum.defjvp
def _row_sum_jvp(primals, tangents):
    return row_sum(primals[0]), jnp.sum(tangents[0], axis=-1)


def ordered_sum(terms: list[jax.Array]) -> jax.Array:
    """Left-to-right sum of a short list; pin inexact products before."""
    return functools.reduce(lambda a, b: a + b, terms)


def plain_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum over one axis in an order of the compiler's choice; for `rows="dense"` only."""
    return jnp.sum(x, axis=axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def axis_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum of float32 over one short axis, in index order; pin inexact products before."""
    return lax.reduce(x, np.float32(0), _pinned_add, (axis,))


@axis_sum.defjvp
def _axis_sum_jvp(axis, primals, tangents):
    return axis_sum(primals[0], axis), jnp.sum(tangents[0], axis=axis)


def mean_square(x: jax.Array) -> jax.Array:
    """Mean of squares over the last axis, float32."""
    x = x.astype(jnp.float32)
    return quotient(row_sum(pin(x * x)), np.float32(x.shape[-1]))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: Any) -> jax.Array:
    """[..., K] normalised in float32 and rounded once to `dtype` (model spec 6.5)."""
    scale = lax.rsqrt(mean_square(x) + np.float32(eps))
    y = x.astype(jnp.float32) * scale[..., None]
    gain = weight.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
    return round_to(gain * y, dtype)


def logsumexp(x: jax.Array) -> jax.Array:
    """log sum exp over the last axis, float32; -inf entries contribute nothing."""
    x = x.astype(jnp.float32)
    top = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, np.float32(0))
    return pin(jnp.log(row_sum(jnp.exp(x - top)))) + top[..., 0]


def log_softmax(x: jax.Array) -> jax.Array:
    """Log-probabilities over the last axis, float32."""
    return x.astype(jnp.float32) - logsumexp(x)[..., None]


# -- rows through a fixed program ------------------------------------------------------------------


def _in_tiles(f: Callable, x: jax.Array, numerics: Numerics) -> jax.Array:
    """Apply f: [tile, ...] -> [tile, ...] to any number of rows, always on whole tiles."""
    count = x.shape[0]
    tile = numerics.row_tile if count < numerics.long_rows else numerics.long_row_tile
    tiles = -(-count // tile)
    padded = jnp.pad(x, [(0, tiles * tile - count)] + [(0, 0)] * (x.ndim - 1))
    parts = padded.reshape(tiles, tile, *x.shape[1:])
    y = f(parts[0])[None] if tiles == 1 else lax.map(f, parts)
    return y.reshape(tiles * tile, *y.shape[2:])[:count]


def _precision(x: jax.Array) -> Any:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _contract(x: jax.Array, w: jax.Array) -> jax.Array:
    """[M, K] x [N, K] -> float32 [M, N]."""
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())),
        precision=_precision(x), preferred_element_type=jnp.float32,
    )  # fmt: skip


def dot(x: jax.Array, w: jax.Array, numerics: Numerics) -> jax.Array:
    """x [T, K] times w [N, K] of the same dtype -> float32 [T, N]; rows are independent."""
    return cast(jax.Array, _dot(x, w, numerics))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(x, w, numerics):
    if numerics.rows != "tiled":
        return _contract(x, w)
    return _in_tiles(lambda part: _contract(part, w), x, numerics)


def _dot_forward(x, w, numerics):
    return _dot(x, w, numerics), (x, w)


def _dot_backward(numerics, saved, g):
    x, w = saved
    if numerics.rows == "dense":
        return _einsum_backward("tk,nk->tn", saved, g)
    gx = lax.dot_general(g, w.astype(jnp.float32), (((1,), (0,)), ((), ())))
    gw = lax.dot_general(g, x.astype(jnp.float32), (((0,), (0,)), ((), ())))
    return gx.astype(x.dtype), gw.astype(w.dtype)


_dot.defvjp(_dot_forward, _dot_backward)


def _contract_groups(x: jax.Array, w: jax.Array) -> jax.Array:
    """[M, G, K] x [G, N, K] -> float32 [M, G, N]."""
    y = lax.dot_general(
        x, w, (((2,), (2,)), ((1,), (0,))),
        precision=_precision(x), preferred_element_type=jnp.float32,
    )  # fmt: skip
    return y.transpose(1, 0, 2)


def group_dot(x: jax.Array, w: jax.Array, numerics: Numerics) -> jax.Array:
    """x [T, G, K] times w [G, N, K], group by group -> float32 [T, G, N]; rows are independent."""
    return cast(jax.Array, _group_dot(x, w, numerics))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _group_dot(x, w, numerics):
    if numerics.rows != "tiled":
        return _contract_groups(x, w)
    return _in_tiles(lambda part: _contract_groups(part, w), x, numerics)


def _group_dot_forward(x, w, numerics):
    return _group_dot(x, w, numerics), (x, w)


def _group_dot_backward(numerics, saved, g):
    if numerics.rows == "dense":
        return _einsum_backward("tgk,gnk->tgn", saved, g)
    _, pull = jax.vjp(_contract_groups, *saved)
    return pull(g)


_group_dot.defvjp(_group_dot_forward, _group_dot_backward)


def einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Product of two arrays of one dtype, accumulated in float32; for `rows="dense"` only.

    The backward pass rounds the incoming gradient to the operands' dtype, as training in bfloat16
    does.
    """
    return cast(jax.Array, _einsum_trained(spec, x, w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum_trained(spec, x, w):
    return _einsum(spec, x, w)


def _einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    def product(x, w):
        return jnp.einsum(
            spec, x, w, precision=_precision(x), preferred_element_type=jnp.float32
        )  # fmt: skip

    def widened(x, w):  # XLA:CPU has no batched bfloat16 product with a float32 result
        return product(x.astype(jnp.float32), w.astype(jnp.float32))

    return lax.platform_dependent(x, w, cpu=widened, default=product)


def _einsum_forward(spec, x, w):
    return _einsum(spec, x, w), (x, w)


def _einsum_backward(spec, saved, g):
    x, w = saved
    operands, out = spec.split("->")
    left, right = operands.split(",")
    g = g.astype(x.dtype)
    gx = _einsum(f"{out},{right}->{left}", g, w)
    gw = _einsum(f"{out},{left}->{right}", g, x)
    return gx.astype(x.dtype), gw.astype(w.dtype)


_einsum_trained.defvjp(_einsum_forward, _einsum_backward)


def map_rows(f: Callable, rows: Any, shared: Any, numerics: Numerics) -> Any:
    """f(row, shared) for every leading index of the tree `rows`; f sees no other row.

    Tiled: one row after another through one compiled body. Batched: `vmap`. Gradients always take
    the batched form, since only the forward pass owes its bits to anyone.
    """
    if numerics.rows != "tiled":
        return jax.vmap(f, in_axes=(0, None))(rows, shared)
    return _map_in_order(f, rows, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_in_order(f, rows, shared):
    return lax.map(lambda row: f(row, shared), rows)


def _map_forward(f, rows, shared):
    return _map_in_order(f, rows, shared), (rows, shared)


def _map_backward(f, saved, g):
    _, pull = jax.vjp(jax.vmap(f, in_axes=(0, None)), *saved)
    return pull(g)


_map_in_order.defvjp(_map_forward, _map_backward)


# -- rows grouped by expert ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Rows sorted by expert and padded to whole tiles: where each row went, whose tile each is."""

    slot: jax.Array  # [M] position of a row among the padded rows
    expert: jax.Array  # [tiles]
    used: jax.Array  # scalar: tiles that hold rows; they come first
    tile: int


def _assign_tiles(ids: jax.Array, experts: int, tile: int) -> _Tiles:
    m = ids.shape[0]
    tiles = min(m, -(-m // tile) + min(experts, m))
    count = jnp.zeros((experts,), jnp.int32).at[ids].add(1, mode="drop")
    each = (count + tile - 1) // tile
    ends = jnp.cumsum(each, dtype=jnp.int32)
    order = jnp.argsort(ids, stable=True)
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    rank = jnp.arange(m, dtype=jnp.int32) - first[ids[order]]
    rank = jnp.zeros((m,), jnp.int32).at[order].set(rank)
    slot = (ends - each)[ids] * tile + rank
    owner = jnp.searchsorted(ends, jnp.arange(tiles, dtype=jnp.int32), side="right")
    return _Tiles(slot, jnp.minimum(owner, experts - 1).astype(jnp.int32), ends[-1], tile)


def map_experts(
    f: Callable, rows: Any, ids: jax.Array, shared: Any, experts: int, numerics: Numerics
) -> jax.Array:
    """f(rows of one expert [tile, ...], expert id, shared) for rows grouped by `ids` [M].

    Rows are sorted by expert (stable), each expert's rows padded to whole tiles; a row sees neither
    how many rows its expert has nor which. No capacity, nothing is dropped. Returns [M, ...] in row
    order.
    """
    m = ids.shape[0]
    if numerics.rows != "tiled":
        tile = 128 if m >= 4096 else 16
    else:
        tile = numerics.row_tile if m < 4 * numerics.long_rows else numerics.long_row_tile
    tiles = _assign_tiles(ids, experts, tile)
    n = tiles.expert.shape[0]

    def spread(x):
        out = jnp.zeros((n * tile, *x.shape[1:]), x.dtype).at[tiles.slot].set(x)
        return out.reshape(n, tile, *x.shape[1:])

    parts = jax.tree.map(spread, rows)
    if numerics.rows != "tiled":
        y = jax.vmap(f, in_axes=(0, 0, None))(parts, tiles.expert, shared)
    else:
        y = cast(jax.Array, _map_tiles(f, parts, tiles.expert, tiles.used, shared))
    return y.reshape(n * tile, *y.shape[2:])[tiles.slot]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_tiles(f, parts, expert, used, shared):
    out = jax.eval_shape(lambda p: f(jax.tree.map(lambda a: a[0], p), expert[0], shared), parts)

    def body(t, acc):
        return acc.at[t].set(f(jax.tree.map(lambda a: a[t], parts), expert[t], shared))

    empty = jnp.zeros((expert.shape[0], *out.shape), out.dtype)
    return lax.fori_loop(0, used, body, empty)


def _map_tiles_forward(f, parts, expert, used, shared):
    return _map_tiles(f, parts, expert, used, shared), (parts, expert, used, shared)


def _map_tiles_backward(f, saved, g):
    parts, expert, used, shared = saved
    live = (jnp.arange(expert.shape[0]) < used).reshape(-1, *([1] * (g.ndim - 1)))
    _, pull = jax.vjp(lambda p, s: jax.vmap(f, in_axes=(0, 0, None))(p, expert, s), parts, shared)
    parts_bar, shared_bar = pull(jnp.where(live, g, 0).astype(g.dtype))
    return parts_bar, None, None, shared_bar


_map_tiles.defvjp(_map_tiles_forward, _map_tiles_backward)


# -- linears and attention -------------------------------------------------------------------------


def linear(x: jax.Array, weight: Any, numerics: Numerics, quantized: bool = False) -> jax.Array:
    """x [T, K] through a weight leaf [N, K], rounded once to the activation dtype.

    `quantized`: the release stores this weight in FP8 or FP4, so its input is quantized to FP8
    first (`lin8`, `lin4` of model spec 6.4); otherwise `lin16`.
    """
    return round_to(linear_f32(x, weight, numerics, quantized), numerics.dtype)


def linear_f32(x: jax.Array, weight: Any, numerics: Numerics, quantized: bool = False) -> jax.Array:
    """`linear` without the final rounding: float32 [T, N]."""
    if quantized and numerics.quantize_activations:
        x = quant.qdq_fp8(x)
    dtype = jnp.dtype(numerics.dtype)
    return dot(x.astype(dtype), float_weight(weight, dtype), numerics)


def attend(
    q: jax.Array, keys: jax.Array, mask: jax.Array, sink: jax.Array, scale: float
) -> jax.Array:
    """Attention of one query row over its slots, with a sink (model spec 8.7).

    q [H, K], keys [S, K] (keys and values are one vector), mask [S], sink [H] -> float32 [H, K].
    The slots are fixed in number and order; masked ones contribute exact zeros. The global maximum
    comes first, so the rounding of probabilities does not depend on blocking. No valid slot: zeros.
    """
    s = pin(_contract(q, keys) * np.float32(scale))
    s = jnp.where(mask, s, -jnp.inf)
    top = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, np.float32(0))
    p = jnp.where(mask, jnp.exp(jnp.where(mask, s, 0) - top), 0)
    z = row_sum(p) + jnp.exp(sink - top[:, 0])
    value = lax.dot_general(
        round_to(p, keys.dtype), keys, (((1,), (0,)), ((), ())),
        precision=_precision(keys), preferred_element_type=jnp.float32,
    )  # fmt: skip
    return value / z[:, None]


def index_scores(
    q: jax.Array, head_weight: jax.Array, keys: jax.Array, numerics: Numerics
) -> jax.Array:
    """Index scores of one query row: sum over heads of relu(q.k) * weight (model spec 8.4).

    q [H, K], head_weight [H], keys [N, K] -> float32 [N], holding bfloat16 values unless the
    numerics are float32.
    """
    s = _contract(q, keys)
    weight = head_weight.astype(jnp.float32)[:, None]
    if numerics.dtype == "float32":
        return axis_sum(pin(jnp.maximum(s, 0) * weight), 0)
    if numerics.index_rounding == "reference":
        s = round_to(s, jnp.bfloat16).astype(jnp.float32)
        term = round_to(jnp.maximum(s, 0) * weight, jnp.bfloat16).astype(jnp.float32)
    else:
        term = pin(jnp.maximum(s, 0) * weight)
    return round_to(axis_sum(term, 0), jnp.bfloat16).astype(jnp.float32)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Largest k of the last axis in a total order: value, then lower index; -0 equals +0."""
    # Adding zero would turn -0 into +0 too, were it not simplified away.
    values, ids = lax.top_k(jnp.where(x == 0, np.float32(0), x), k)
    return lax.optimization_barrier((values, ids))
