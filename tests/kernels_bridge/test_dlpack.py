"""The `dlpack` transport on torch's CPU, and inside recorded programs where there is a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kernels_bridge import dlpack
from kernels_bridge.calling import call
from kernels_bridge.machine import named
from kernels_bridge.registry import Capability, Impl, KernelRefusedError, Op

torch: Any = pytest.importorskip("torch", reason="this transport is one into torch")

SEEN: dict[str, Any] = {"calls": 0}


def into_place(results, x):
    """2 x + 1 without any memory of its own."""
    SEEN.update(
        calls=SEEN["calls"] + 1, x=x.data_ptr(), y=results[0].data_ptr(), strides=x.stride(),
        dtype=x.dtype,
    )  # fmt: skip
    torch.mul(x, 2, out=results[0])
    results[0].add_(1)


def line(x, *, graph_safe: bool = True, **options):
    return dlpack.call(into_place, "line", x, x, graph_safe=graph_safe, **options)


OP = Op(
    "line", "2 x + 1", lambda x: x, lambda x: 2 * x + 1,
    (Impl("torch", "dlpack", Capability(batch_invariant=True, graph_safe=True), "torch", line,
          seen="this test"),),
)  # fmt: skip


def test_nothing_is_copied_on_the_way():
    x = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    y = jax.jit(line)(x)
    np.testing.assert_array_equal(y, 2 * np.arange(12).reshape(3, 4) + 1)
    assert SEEN["x"] == x.unsafe_buffer_pointer()
    assert SEEN["y"] == y.unsafe_buffer_pointer()
    assert SEEN["strides"] == (4, 1)


def test_memory_is_taken_over_where_that_is_asked_for():
    x = jnp.ones(64, jnp.float32)
    before = x.unsafe_buffer_pointer()
    jax.block_until_ready(jax.jit(functools.partial(line, aliases={0: 0}), donate_argnums=0)(x))
    assert SEEN["x"] == SEEN["y"] == before


def test_it_stands_in_loops_maps_and_gradients():
    x = np.array([0.5, -2.0], np.float32)

    def loss(x):
        x = lax.fori_loop(0, 2, lambda i, x: call(OP, x, machine=named("cpu")), x)
        return jnp.sum(jax.vmap(lambda each: call(OP, each, machine=named("cpu")))(x) ** 2)

    def plain(x):
        return jnp.sum((2 * (4 * x + 3) + 1) ** 2)

    got, want = (jax.jit(jax.value_and_grad(f))(x) for f in (loss, plain))
    np.testing.assert_allclose(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1])


@pytest.mark.parametrize("name", sorted(dlpack.DTYPES))
def test_types_keep_their_names(name):
    seen = []

    def copy(results, x):
        seen.append(str(x.dtype).removeprefix("torch."))
        results[0].copy_(x)

    x = jnp.zeros((2, 3), jnp.dtype(name))
    jax.block_until_ready(dlpack.call(copy, "copy", x, x))
    assert seen == [name]


def test_a_type_that_torch_cannot_see_is_refused():
    x = jax.ShapeDtypeStruct((4,), jnp.float4_e2m1fn)
    with pytest.raises(KernelRefusedError, match=r"cannot see float4_e2m1fn .* as packed uint8"):
        jax.eval_shape(line, x)


def allocating(results, x):
    results[0].copy_(x * 2 + 1)


def returning(results, x):
    results[0].copy_(x)
    return x


def failing(results, x):
    raise ValueError(f"48 heads of {tuple(x.shape)}")


@pytest.mark.parametrize(
    ("kernel", "graph_safe", "said"),
    [
        (allocating, True, "allocated memory 2 times and is declared fit for CUDA graphs"),
        (returning, False, "results are written in place"),
        (failing, False, r"48 heads of \(3,\)"),
    ],
)
def test_a_kernel_that_breaks_a_rule_says_so(kernel, graph_safe, said):
    x = jnp.ones(3)
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        jax.block_until_ready(dlpack.call(kernel, "kernel", x, x, graph_safe=graph_safe))


def test_a_kernel_may_allocate_where_nothing_records_it():
    x = jnp.ones(3)
    np.testing.assert_array_equal(dlpack.call(allocating, "copied", x, x), [3, 3, 3])


def test_warming_up_runs_what_is_given_for_shapes():
    before = SEEN["calls"]
    y = dlpack.warm_up(line, jax.ShapeDtypeStruct((5,), jnp.float32))
    np.testing.assert_array_equal(y, np.ones(5))
    assert SEEN["calls"] == before + 1


@pytest.mark.parametrize(("graph_safe", "suffix"), [(True, "_cmd_buffer"), (False, "")])
def test_a_program_for_a_gpu_is_made_without_one(graph_safe, suffix):
    x = jax.ShapeDtypeStruct((5,), jnp.float32)
    traced = jax.jit(functools.partial(line, graph_safe=graph_safe)).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"@xla_buffer_python_gpu_callback{suffix}(" in text


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_recorded_program_calls_python_no_more():
    """Sixteen kernels and XLA between them: values of every run, and no call once recorded."""

    def many(x):
        for _ in range(16):
            x = line(x) * 0.5
        return x

    dlpack.warm_up(line, jax.ShapeDtypeStruct((1024,), jnp.float32))
    program, counts = jax.jit(many), []
    for i in range(8):
        x = jnp.full((1024,), float(i))
        before = SEEN["calls"]
        y = np.asarray(program(x))
        counts.append(SEEN["calls"] - before)
        want = np.full(1024, float(i), np.float32)
        for _ in range(16):
            want = (2 * want + 1) * np.float32(0.5)
        np.testing.assert_array_equal(y, want)
    assert dlpack.recordings()["line"] >= 16
    assert counts[-1] < 16, counts
    print("python calls in each run:", counts, "recorded:", dlpack.recordings())


@pytest.mark.gpu
def test_work_is_ordered_with_that_of_xla():
    """Long products before and after: a kernel on another stream would read too early."""

    @jax.jit
    def chain(a, x):
        for _ in range(4):
            a = (a @ a) / 4096
        y = line(x + 0 * a[0, : x.shape[0]])
        return y, jnp.sum(y) + 0 * jnp.sum(a @ a)

    a = jax.random.normal(jax.random.key(0), (4096, 4096))
    for i in range(10):
        x = jnp.arange(256, dtype=jnp.float32) + i
        y, total = chain(a, x)
        np.testing.assert_array_equal(y, 2 * np.asarray(x) + 1)
        assert float(total) == float(np.sum(2 * np.asarray(x) + 1))


@pytest.mark.gpu
def test_a_first_call_inside_a_recording_is_refused():
    """Seen by making the transport forget, after XLA has run the program once."""

    def many(x):
        for _ in range(8):
            x = dlpack.call(into_place, "cold", x, x, graph_safe=True) * 0.5
        return x

    program, x = jax.jit(many), jnp.ones(2048)
    jax.block_until_ready(program(x))
    dlpack._warm.clear()

    def several():
        for i in range(4):
            jax.block_until_ready(program(x + i))

    with pytest.raises(jax.errors.JaxRuntimeError, match="first time while a CUDA graph"):
        several()


@pytest.mark.gpu
def test_an_allocation_is_seen_on_a_gpu():
    x = jnp.ones(3)
    with pytest.raises(jax.errors.JaxRuntimeError, match="declared fit for CUDA graphs"):
        jax.block_until_ready(dlpack.call(allocating, "greedy", x, x, graph_safe=True))
