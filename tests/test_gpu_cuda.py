"""What the CUDA kernels of products must do on a GPU: exact weights, one order whatever the rows.

Run on a machine with a Hopper GPU and nvcc: `pytest -m gpu tests/test_gpu_cuda.py`. What needs no
GPU is in tests/kernels_bridge/test_cuda.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.numerics import Numerics, cuda, forms, stored
from kernels_bridge import cuda as kernels
from kernels_bridge.machine import probe
from tests import test_numerics as primitives

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
FORM = Numerics(rows="cuda", quantize_activations=False)
STORAGES = ("fp8_block", "fp8_group", "fp4_group")


@pytest.fixture(autouse=True)
def _able():
    said = forms.reasons(FORM, probe())
    if said:
        pytest.skip("; ".join(said))


def normal(seed: int, *shape: int):
    return jnp.asarray(primitives.normal(seed, *shape)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("parts", "rows"))
def product(x, weight, parts, rows):
    """In tiles of `rows` rows."""
    x = cuda.in_pairs(x, weight.format) if rows == kernels.MANY else x
    made = kernels.product(
        x[:, None], weight.codes[None], weight.scale[None], 0, None, "float32", parts, rows
    )
    return functools.reduce(jnp.add, list(made))[:, 0]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rows", cuda.HEIGHTS)
@pytest.mark.parametrize("scales", [(0, 128), (0, 241), (120, 256)])
def test_every_code_is_decoded_exactly(storage, rows, scales):
    """Of small scales, of those that take two products, and of those that make infinities."""
    rng, n, k = np.random.default_rng(1), 64, 256
    code = rng.integers(0, 256, (n, k if storage != "fp4_group" else k // 2)).astype(np.uint8)
    if storage != "fp4_group":
        code = np.where(code & 127 == 127, 1, code).astype(np.uint8)
    each = n // 32 if storage == "fp8_block" else n
    scale = rng.integers(scales[0], scales[1], (each, k // 32)).astype(np.uint8)
    weight = quant.Quantized(jnp.asarray(code), jnp.asarray(scale), storage)
    want = np.asarray(quant.dequantize(weight), np.float32).T
    got = np.asarray(product(jnp.eye(k, dtype=jnp.bfloat16), weight, 2, rows))
    whole = np.isfinite(want).all(0)  # where not, zeros times infinity are NaN
    np.testing.assert_array_equal(got[:, whole], want[:, whole])
    assert np.isnan(got[:, ~whole]).any(0).all()


@pytest.mark.parametrize("rows", cuda.HEIGHTS)
@pytest.mark.parametrize("high", [128, 241])
def test_a_nan_makes_its_output_nan_and_no_other(rows, high):
    rng = np.random.default_rng(2)
    code = (rng.integers(0, 256, (96, 384)) & 0xBB).astype(np.uint8)
    code[[5, 40, 95], [0, 200, 383]] = 0x7F, 0xFF, 0x7F
    scale = jnp.asarray(rng.integers(high - 20, high, (3, 12)).astype(np.uint8))
    weight = quant.Quantized(jnp.asarray(code), scale, "fp8_block")
    got = np.isnan(np.asarray(product(normal(3, 70, 384) * 1e-30, weight, 1, rows)))
    assert np.flatnonzero(got.any(0)).tolist() == [5, 40, 95]
    assert got[:, [5, 40, 95]].all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("k", "n"), [(1280, 4608), (2560, 1280), (5120, 512), (128, 96)])
def test_rows_do_not_depend_on_their_number_nor_on_tiles(storage, k, n):
    """Alone, among others, in tiles of any height, and of a weight that is decoded first."""
    weight = quant.quantize(normal(1, n, k), storage)
    x, parts = normal(2, 700, k), cuda.parts(k, n)
    want = bits(product(x, weight, parts, 8))
    exact = np.asarray(x[:4], np.float64) @ np.asarray(quant.dequantize(weight), np.float64).T
    got = np.asarray(product(x[:4], weight, parts, 8))
    np.testing.assert_allclose(got, exact, atol=1e-5 * np.abs(exact).max())
    for rows in cuda.HEIGHTS[1:]:
        np.testing.assert_array_equal(bits(product(x, weight, parts, rows)), want)
    dot = jax.jit(nx.dot, static_argnums=2)
    for m in (1, 7, 16, 17, 33, 64, 128, 129, 513, 700):
        for at in {0, 700 - m}:
            np.testing.assert_array_equal(
                bits(dot(x[at : at + m], weight, FORM)), want[at : at + m]
            )


@pytest.mark.parametrize("storage", STORAGES)
def test_groups_layers_and_biases(storage):
    """A loop over the layers of a stack, group by group, against every product alone."""
    stack = quant.quantize(normal(1, 3, 2 * 96, 384), storage)
    x, bias = normal(2, 9, 2, 384), normal(3, 192).astype(jnp.float32)

    @jax.jit
    def every(x, stack):
        def one(_, layer):
            weight = nx.at_layer(stack, layer, FORM)
            return None, (
                nx.group_dot(x, weight, FORM),
                nx.linear(x[:, 0], weight, FORM, bias=bias),
            )

        return jax.lax.scan(one, None, jnp.arange(3))[1]

    grouped, linear = every(x, stack)
    for layer in range(3):
        weight = jax.tree.map(lambda a, layer=layer: a[layer], stack)
        wide = np.asarray(quant.dequantize(weight), np.float64).reshape(2, 96, 384)
        exact = np.einsum("tgk,gnk->tgn", np.asarray(x, np.float64), wide)
        np.testing.assert_allclose(grouped[layer], exact, atol=1e-5 * np.abs(exact).max())
        alone = nx.linear(x[3:4, 0], weight, FORM, bias=bias)
        np.testing.assert_array_equal(bits(linear[layer])[3:4], bits(alone))


@pytest.mark.parametrize("storage", STORAGES)
def test_experts_of_any_load(storage):
    """Tiles of 8, 16 and 64 rows of an expert, two weights at once and one after the other."""
    first, second = (quant.quantize(normal(i, 2, 6, 128, 512), storage) for i in (1, 2))
    x = normal(3, 700, 512)
    ids = np.random.default_rng(3).choice([0, 0, 0, 1, 3, 5, 6], 700).astype(np.int32)

    def both(linear, x, stacks):
        return jnp.concatenate(linear(x, *stacks), 1)

    def each(linear, x, stacks):
        return jnp.concatenate([linear(x, stack)[0] for stack in stacks], 1)

    @functools.partial(jax.jit, static_argnames="how")
    def run(x, ids, how):
        groups = nx.group_rows(ids, first, FORM)
        made = nx.map_groups(how, nx.spread(groups, x), (first, second), 1, groups, FORM)
        return nx.collect(groups, made)

    want = bits(run(x, ids, both))
    for m in (1, 5, 40, 150, 699):
        for how in (both, each):
            np.testing.assert_array_equal(bits(run(x[-m:], ids[-m:], how)), want[-m:])
    wide = np.concatenate(
        [np.asarray(quant.dequantize(w), np.float64)[1] for w in (first, second)], 1
    )
    real = np.flatnonzero(ids < 6)[:50]
    exact = np.einsum("tk,tnk->tn", np.asarray(x, np.float64)[real], wide[ids[real]])
    got = np.asarray(run(x, ids, both), np.float64)[real]
    np.testing.assert_allclose(got, exact, rtol=1e-2, atol=1e-3 * np.abs(exact).max())


def test_a_stack_beyond_four_gigabytes():
    """The last expert of the last layer, whose place takes more than 32 bits."""
    layers, experts, n, k = 3, 300, 1024, 10240
    shape = layers, experts, n, k // 2
    codes = jax.jit(lambda: jnp.zeros(shape, jnp.uint8).at[-1, -1].set(0x22))()
    scale = jnp.full((layers, experts, n, k // 32), 127, jnp.uint8)
    stack = quant.Quantized(codes, scale, "fp4_group")
    x, ids = normal(1, 3, k), np.array([experts - 1, 0, experts - 1], np.int32)

    @jax.jit
    def run(x, stack):
        groups = nx.group_rows(jnp.asarray(ids), stack, FORM)
        made = nx.grouped_linear(nx.spread(groups, x), stack, layers - 1, groups, FORM)
        return nx.collect(groups, made)

    got = np.asarray(run(x, stack), np.float64)
    sums = np.asarray(x, np.float64).sum(1)
    np.testing.assert_allclose(got[0], sums[0], rtol=1e-2)
    np.testing.assert_allclose(got[2], sums[2], rtol=1e-2)
    assert not got[1].any()


def test_gradients_are_those_of_plain_xla():
    stack = quant.quantize(normal(1, 2, 96, 256), "fp8_block")
    x = normal(2, 9, 256)

    @functools.partial(jax.jit, static_argnames="numerics")
    def slope(x, numerics):
        def total(x):
            weight = nx.at_layer(stack, 1, numerics)
            return jnp.sum(jnp.sin(nx.linear(x, weight, numerics).astype(jnp.float32)))

        return jax.grad(total)(x).astype(jnp.float32)

    plain = Numerics(rows="batched", quantize_activations=False)
    got, want = slope(x, FORM), slope(x, plain)
    np.testing.assert_allclose(got, want, atol=0.03 * float(jnp.abs(want).max()))


def test_one_device_of_a_mesh():
    weight, x = quant.quantize(normal(1, 64, 256), "fp4_group"), normal(2, 8, 256)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    over = jax.shard_map(
        lambda x, w: nx.dot(x, w, FORM), mesh=mesh, in_specs=(rows, whole), out_specs=rows,
        check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(bits(jax.jit(over)(x, weight)), bits(nx.dot(x, weight, FORM)))


def test_shapes_that_fit_nothing_are_refused():
    x = normal(1, 3, 256)
    weight = quant.quantize(normal(2, 48, 256), "fp4_group")
    with pytest.raises(jax.errors.JaxRuntimeError, match="N must be a multiple of 32"):
        jax.block_until_ready(product(x, weight, 1, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such parts"):
        jax.block_until_ready(product(x, quant.quantize(normal(2, 64, 256), "fp4_group"), 4, 8))
    assert isinstance(nx.at_layer({"w": weight}, 0, FORM)["w"], stored.Layered)
