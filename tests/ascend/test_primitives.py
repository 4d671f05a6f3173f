"""Every primitive of the model's steps against JAX on a CPU: random values, edges, odd indices."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

pytest.importorskip("torch", reason="the executor runs on torch")

from ascend.executor import Executed, UnknownPrimitiveError, fetch, place

EDGES = {
    "float32": [0.0, -0.0, 1.0, -1.5, 2.5, 3.4e38, -3.4e38, 1e-30, 448.0, 464.0, 0.015625],
    "int32": [0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 100],
    "uint32": [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 77],
    "uint16": [0, 1, 2**15 - 1, 2**15, 2**16 - 1],
    "uint8": [0, 1, 127, 128, 255],
}
SHAPE = (3, 5)


def both(function: Any, *args: Any, **more: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What JAX and what torch makes of it."""
    jitted = jax.jit(function)
    wanted = [np.asarray(x) for x in jax.tree.leaves(jitted(*args))]
    found = fetch(Executed(jitted, device="cpu", **more)(*place(args, "cpu")))
    return wanted, jax.tree.leaves(found)


def agree(function: Any, *args: Any, close: float = 0.0, **more: Any) -> None:
    """Equal dtypes, shapes and values; floats in every bit unless `close` says how near."""
    for want, got in zip(*both(function, *args, **more), strict=True):
        assert (want.dtype, want.shape) == (got.dtype, got.shape)
        if close and want.dtype == np.float32:
            np.testing.assert_allclose(got, want, rtol=close, atol=close)
        else:
            np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def values(dtype: str, shape: tuple[int, ...] = SHAPE) -> st.SearchStrategy[np.ndarray]:
    """Arrays with edges among them."""
    if dtype == "float32":
        numbers = st.floats(-1e6, 1e6, width=32) | st.sampled_from(EDGES[dtype])
    else:
        info = np.iinfo(dtype)
        numbers = st.integers(int(info.min), int(info.max)) | st.sampled_from(EDGES[dtype])
    return arrays.arrays(np.dtype(dtype), shape, elements=numbers)


few = hypothesis.settings(max_examples=12)


def integer_work(x, y):
    """What integers of every kind are put through."""
    safe = jnp.where(y == 0, jnp.ones((), y.dtype), y)
    return (
        x + y, x - y, x * y, x & y, x | y, x ^ y, ~x, jnp.maximum(x, y), jnp.minimum(x, y),
        x < y, x <= y, x == y, x > y, x >= y, x != y, lax.div(x, safe), lax.rem(x, safe),
        lax.shift_left(x, jnp.full((), 3, x.dtype)),
        lax.shift_right_logical(x, jnp.full((), 5, x.dtype)),
        x.astype(jnp.float32), x.astype(jnp.int32), x.astype(jnp.uint8), x.astype(bool),
        jnp.max(x, 1), jnp.min(x, 0), jnp.argmax(x, 1), jnp.sort(x, 1), lax.top_k(x, 2),
        lax.clamp(jnp.full((), 1, x.dtype), x, jnp.full((), 100, x.dtype)), lax.sign(x),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint16", "uint8"])
def test_integers_of_every_kind(dtype):
    """One program of all operations, for pairs of random numbers and edges."""
    run = Executed(jax.jit(integer_work), device="cpu")

    @few
    @hypothesis.given(values(dtype), values(dtype))
    def check(x, y):
        wanted = jax.jit(integer_work)(x, y)
        found = fetch(run(*place((x, y), "cpu")))
        for want, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            assert want.dtype == got.dtype
            np.testing.assert_array_equal(got, np.asarray(want))

    check()


def test_floats_bit_by_bit():
    """Exact operations, conversions, orders and bits."""

    def work(x, y):
        near = jnp.clip(x, -400.0, 400.0)
        return (
            x + y, x - y, x * y, jnp.maximum(x, y), jnp.floor(x), jnp.round(x), jnp.abs(x), -x,
            x < y, x == y, jnp.isfinite(x), jnp.where(x > y, x, y), jnp.sign(x),
            x.astype(jnp.int32), x.astype(jnp.uint32), x.astype(jnp.bfloat16),
            lax.reduce_precision(x, 8, 7), lax.reduce_precision(x, 8, 3),
            near.astype(jnp.float8_e4m3fn).astype(jnp.float32),
            lax.bitcast_convert_type(x, jnp.uint32),
            lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint8), jnp.float32),
            jnp.argmax(x, 1), jnp.argmin(x, 1), jnp.max(x, 0), jnp.argsort(x, 1, stable=True),
            lax.sort(x, dimension=1), lax.top_k(jnp.where(x == 0, jnp.float32(0), x), 3),
            lax.optimization_barrier(x), jnp.any(x > 0, 1), jnp.all(x > 0),
        )  # fmt: skip

    run, jitted = Executed(jax.jit(work), device="cpu"), jax.jit(work)

    @few
    @hypothesis.given(values("float32"), values("float32"))
    def check(x, y):
        found = fetch(run(*place((x, y), "cpu")))
        for want, got in zip(jax.tree.leaves(jitted(x, y)), jax.tree.leaves(found), strict=True):
            assert want.dtype == got.dtype
            np.testing.assert_array_equal(got.astype(np.float64), np.asarray(want, np.float64))

    check()


@few
@hypothesis.given(arrays.arrays(np.float32, SHAPE, elements=st.floats(-20, 20, width=32)))
def test_inexact_functions_come_near(x):
    """2e-6: two libraries' last bits, and a sum of five."""

    def work(x):
        return (
            jnp.exp(x), jnp.log1p(jnp.abs(x)), jnp.log(jnp.abs(x) + 1), jax.nn.sigmoid(x),
            jax.nn.softplus(x), lax.rsqrt(jnp.abs(x) + 1), jnp.sqrt(jnp.abs(x)), x / (x * x + 1),
            jnp.sum(x, 1), jax.nn.log_softmax(x), jnp.tanh(x), jnp.expm1(x / 8), x**3,
        )  # fmt: skip

    agree(work, x, close=2e-5)


INDICES = st.lists(st.integers(-9, 9), min_size=4, max_size=4).map(
    lambda found: np.array(found, np.int32)
)


@few
@hypothesis.given(values("float32", (5, 7)), INDICES, INDICES, values("float32", (4, 7)))
def test_reading_and_writing_at_any_index(x, i, j, new):
    """Inside and outside, at both ends; two updates never fight for one place in `set`."""

    def work(x, i, j, new):
        apart = jnp.arange(4, dtype=jnp.int32) * 2 + (i % 2)
        return (
            x[i], x[i, j], x[i[:, None], j[None]], x.at[i, j].get(mode="fill", fill_value=7.0),
            jnp.take_along_axis(x, jnp.broadcast_to(j % 7, (5, 4)), 1),
            x.at[apart].set(new, mode="drop"), x.at[apart, j].set(new[:, 0], mode="drop"),
            x.at[apart + 20].set(new, mode="drop"),
            x[:, 0].at[i].max(new[:, 0], mode="drop"), x[:, 0].at[i].min(new[:, 0], mode="drop"),
            jnp.zeros(5, jnp.int32).at[i].add(j, mode="drop"),
            lax.dynamic_slice(x, (i[0], j[0]), (2, 3)),
            lax.dynamic_update_slice(x, new[:2, :3], (i[0], j[0])),
            x.at[2, 1:4].set(new[0, :3]), x.at[:, j[0] % 7].set(new[0, :5]),
        )  # fmt: skip

    agree(work, x, i, j, new)


def test_edges_that_torch_has_otherwise():
    """NaN, -0, what float8 does not hold, zero divisors, counts of shifts, unsigned constants."""

    def work(x, i, zero, count, small):
        high = jnp.full(3, 2**31 + 1, jnp.uint32)
        return (
            lax.sign(x), x.astype(jnp.float8_e4m3fn).astype(jnp.float32), jnp.argmax(x), x**0,
            lax.clamp(jnp.float32(2), x, jnp.float32(1)), lax.sort(x), jnp.max(x), jnp.min(x),
            lax.div(i, zero), lax.rem(i, zero), i // zero, lax.shift_right_arithmetic(i, count),
            lax.shift_left(i, count), lax.shift_right_logical(i, count), jnp.sort(x > 0),
            lax.shift_right_arithmetic(small, jnp.uint8(3)),
            lax.shift_right_arithmetic(small, jnp.uint8(9)),
            jnp.argmax(x).astype(jnp.uint32) < high, jnp.full(3, 7, jnp.uint32) < high,
            high > high - 9,
        )  # fmt: skip

    x = np.array([0, -0.0, np.nan, np.inf, -np.inf, 448, 464, 464.1, -1e5], np.float32)
    i = np.array([0, 1, -1, 2**31 - 1, -(2**31), 7, -7], np.int32)
    count = np.array([-1, 31, 32, 33, -5, 2**31 - 1, 0], np.int32)
    for want, got in zip(
        *both(work, x, i, np.zeros(7, np.int32), count, np.array([255, 128, 1], np.uint8)),
        strict=True,
    ):
        assert want.dtype == got.dtype
        np.testing.assert_array_equal(got, want)
        if want.dtype == np.float32:
            number = ~np.isnan(want)
            np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]))


def test_indices_of_every_dtype():
    def work(x, far, *indices):
        made = [
            (x[i], x.at[i].set(5.0), x.at[i].add(1.0), x.at[i].max(3.0), x.at[i].get(mode="clip"),
             lax.dynamic_slice(x, (i[1],), (3,)), lax.dynamic_update_slice(x, x[:2] * 0, (i[2],)))
            for i in indices
        ]  # fmt: skip
        clipped = x.at[far].get(mode="clip"), x.at[far].get(mode="fill", fill_value=-1)
        return made, clipped, lax.dynamic_slice(x, (far,), (3,)), x.at[far].set(9.0)

    dtypes = ("int8", "uint8", "int16", "uint16", "uint32", "int32")
    indices = [np.array([0, 3, 11, 1], dtype) for dtype in dtypes]
    agree(work, np.arange(12, dtype=np.float32), np.uint32(2**31 + 3), *indices)


def test_axes_without_entries():
    def work(none, x, i):
        column = x[:, None]
        columns = jnp.concatenate([column[:, :0], column, column * 2], 1)
        return (
            jnp.max(none, 0, initial=-5.0), lax.reduce_max(none, (0,)), lax.reduce_min(none, (0,)),
            jnp.sum(none, 0), jnp.prod(none, 0), none.T @ none, columns[:, 0:1], columns[:, 1:2],
            jnp.concatenate([column[:, :0], column], 1)[:, 0:1], x[i], x.at[i].set(1.0),
            x.at[i].add(1.0), x.at[i].max(1.0), x[:0].at[i + 1].set(1.0, mode="drop"),
            lax.scan(lambda c, row: (c + row.sum(), row * 2), jnp.float32(0), none),
        )  # fmt: skip

    agree(work, np.zeros((0, 3), np.float32), np.arange(3, dtype=np.float32), np.zeros(0, np.int32))


def test_arguments_are_taken_as_jit_takes_them():
    """64 bits are narrowed, static arguments told apart by type; what else there is is refused."""
    agree(lambda x, y: (x * 4, y / 3), np.array([2**30]), np.array([0.1]))
    times = jax.jit(lambda x, by: jnp.full(x.shape, by), static_argnums=1)
    run = Executed(times, device="cpu")
    for by in (3, 3.0, True):
        found = fetch(run(np.int32([2]), by))
        assert found.dtype == times(np.int32([2]), by).dtype
    with pytest.raises(TypeError, match=r"takes 2 arrays that are not static, 1 came.*np.int32"):
        Executed(jax.jit(lambda x, n: x * n), device="cpu")(np.ones(3, np.float32), 3)


def test_what_was_fetched_outlives_a_donation():
    (x,) = place((np.arange(3, dtype=np.float32),), "cpu")
    before = fetch(x)
    Executed(jax.jit(lambda cache: cache.at[0].set(9.0)), device="cpu", donated=("cache",))(x)
    np.testing.assert_array_equal(before, np.arange(3))


def test_shapes_are_moved_as_jax_moves_them():
    x = np.arange(105, dtype=np.float32).reshape(3, 5, 7)

    def work(x):
        return (
            x.transpose(2, 0, 1), x[:, ::2, 1:4], jnp.pad(x, ((1, 2), (0, 0), (3, 0))),
            lax.pad(x, jnp.float32(9), ((1, -1, 0), (0, 0, 1), (-2, 3, 0))), x[:, None].squeeze(1),
            jnp.concatenate([x, x[:, :2]], 1), jnp.stack([x, x], 2), x.reshape(15, 7),
            jnp.repeat(x[:, 0], 4, axis=1), jnp.broadcast_to(x[:, :1], (3, 5, 7)), x[::-1],
            lax.broadcasted_iota(jnp.int32, (3, 4), 1), jnp.tile(x[0], (2, 1)),
            jnp.cumsum(x.astype(jnp.int32), 1), jnp.split(x, [2], axis=1),
            lax.broadcast_in_dim(x[0, 0, 0], (2, 3), ()).reshape(6) + 1,
        )  # fmt: skip

    agree(work, x)


def test_products_of_every_layout():
    """1e-5: sums of at most 35 products in another order."""
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=s).astype(np.float32) for s in ((3, 5, 7), (3, 7, 2)))

    def work(x, y):
        near, far = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        wide = lax.dot_general(
            near, far, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
        )
        return (
            jnp.einsum("bij,bjk->bik", x, y), jnp.einsum("bij,bjk->kib", x, y), x[0] @ y[0],
            jnp.einsum("bij,bij->b", x, x), jnp.einsum("i,j->ij", x[0, 0], y[0, 0]), wide,
        )  # fmt: skip

    agree(work, x, y, close=1e-5)


@pytest.mark.parametrize("branches", ["read", "select"])
def test_loops_and_branches(branches):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)

    def work(x, n):
        def spend(carry):
            turn, total = carry
            return turn + 1, total.at[turn].add(2.0)

        counted = lax.fori_loop(0, 3, lambda i, c: c.at[i].set(c[i + 1] * 2), x)
        waited = lax.while_loop(lambda c: c[0] < n, spend, (jnp.int32(0), x))
        scanned = lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(3), x, reverse=True)
        chosen = lax.cond(n > 2, lambda z: z + 1, lambda z: z * 3, x)
        switched = lax.switch(n, [lambda z: z, lambda z: -z, lambda z: z - 5], x)
        long = lax.map(lambda row: jnp.cumsum(row), jnp.tile(x, (900, 1)))
        return counted, waited, scanned, chosen, switched, long

    for n in (0, 1, 4):
        agree(work, x, np.int32(n), branches=branches)


def test_calls_with_names_are_opened_or_replaced():
    @jax.jit
    def shift(x):
        return x + 1

    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (double(x), None), lambda saved, g: (g,))

    def work(x):
        return jax.checkpoint(lambda z: shift(double(z)))(x)

    x = np.arange(5, dtype=np.float32)
    agree(work, x)
    run = Executed(jax.jit(work), device="cpu", ops={"double": lambda x: 100 * x})
    np.testing.assert_array_equal(fetch(run(*place((x,), "cpu"))), 100 * x + 1)
    assert run.program(x).replaced == {"double"}


def test_what_is_unknown_is_named_with_its_line():
    with pytest.raises(UnknownPrimitiveError, match=r"'lgamma' \(at .*test_primitives.py:\d+\)"):
        Executed(jax.jit(lambda x: lax.lgamma(x) + 1), device="cpu")(np.ones(3, np.float32))
    with pytest.raises(UnknownPrimitiveError, match=r"'reduce' .* its reducer is not a sum"):
        Executed(jax.jit(_odd_reduction), device="cpu")(np.ones(3, np.float32))


def _odd_reduction(x):
    return lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (0,))


def test_work_over_devices_is_refused():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(
        lambda x: x + 1, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"),
        axis_names={"data"},
    )  # fmt: skip
    with pytest.raises(UnknownPrimitiveError, match=r"'shard_map' .* the executor has one"):
        Executed(jax.jit(split), device="cpu")(np.ones(3, np.float32))
