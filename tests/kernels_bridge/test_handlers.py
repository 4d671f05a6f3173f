"""The `ffi` transport with a handler of this test's own, built by the system's compiler."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_bridge import building, handlers
from kernels_bridge.calling import call
from kernels_bridge.machine import named
from kernels_bridge.registry import Capability, Impl, Op

try:
    building.find_compiler()
except building.NoKernelsError as error:
    pytest.skip(str(error), allow_module_level=True)

SOURCE = Path(__file__).with_name("affine") / "affine.cc"
LIBRARY = handlers.Library(SOURCE, ("affine",), "deepinfer_test_")


def affine(x, *, scale: float):
    """scale * x + 1, over the memory of x."""
    return handlers.call(
        LIBRARY, "affine", jax.ShapeDtypeStruct(x.shape, x.dtype), x,
        attributes={"scale": np.float32(scale)}, aliases={0: 0}, mapped="broadcast_all",
    )  # fmt: skip


OP = Op(
    "affine", "a straight line", lambda x, *, scale: x, lambda x, *, scale: scale * x + 1,
    (Impl("handler", "ffi", Capability(("cpu",), batch_invariant=True, graph_safe=True), "C++",
          affine, seen="this test"),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def kept(tmp_path_factory, monkeypatch):
    """Built once for this file, outside the user's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "handlers"))


def test_a_handler_is_built_and_runs_inside_a_program():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)

    def f(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: call(OP, x, machine=named("cpu"), scale=2.0), x)

    np.testing.assert_array_equal(jax.jit(f)(x), 8 * x + 7)
    mapped = jax.vmap(lambda row: affine(row, scale=3.0))(x)
    np.testing.assert_array_equal(mapped, 3 * x + 1)
    kept = Path(building.cache_folder())
    assert [path.name.split("-")[0] for path in kept.iterdir()] == ["affine"]


def test_the_gradient_is_that_of_the_twin():
    def loss(x):
        return jnp.sum(call(OP, x, machine=named("cpu"), scale=2.0) ** 2)

    x = np.array([1.0, -2.0], np.float32)
    np.testing.assert_array_equal(jax.grad(loss)(x), 4 * (2 * x + 1))


def test_what_a_handler_refuses_arrives_with_its_words():
    with pytest.raises(jax.errors.JaxRuntimeError, match="affine takes float32"):
        jax.block_until_ready(affine(jnp.zeros(3, jnp.bfloat16), scale=1.0))


def test_a_handler_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"affine\.cc has no handler 'linear'"):
        handlers.call(LIBRARY, "linear", jax.ShapeDtypeStruct((3,), jnp.float32))
