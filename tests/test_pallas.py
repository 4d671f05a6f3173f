"""The forms of a GPU in Pallas' interpreter: values, gradients, rows, and what is refused.

What the compiled kernels do to bits is tested on a device, in test_gpu.py.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.numerics import Numerics, rows_for, startup
from deepinfer_jax.numerics.pallas import grouped, products, schedule
from deepinfer_jax.numerics.pallas import stored as addressing
from deepinfer_jax.numerics.pallas.schedule import Schedule
from tests import test_numerics as primitives
from tests.test_numerics import as_dtype, normal

FLOAT32, NATIVE = (
    dataclasses.replace(n, rows="pallas", interpret=True)
    for n in (Numerics.fp32(), Numerics.native())
)
STORAGES = ("bf16_bits", "fp8_block", "fp8_group", "fp4_group")
# One program makes less than the whole result, and walks K in more than one step.
SMALL = Schedule(16, 16, 32, 1, 1)


def rows(dtype: str, count: int) -> dict[str, np.ndarray]:
    return {name: value[:count] for name, value in primitives.all_rows(dtype).items()}


@functools.cache
def made(dtype: str, count: int) -> dict[str, np.ndarray]:
    numerics = FLOAT32 if dtype == "float32" else NATIVE
    out = primitives.everything(rows(dtype, count), primitives.shared(dtype), numerics)
    return {name: np.asarray(value) for name, value in out.items()}


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [pytest.param("float32", 3e-6, marks=pytest.mark.exhaustive), ("bfloat16", 1e-2)],
)
def test_values_are_those_of_the_forms_of_a_cpu(dtype, bound):
    """In float32 both are good to a few units of the last place; bfloat16 rounds probabilities."""
    count = 20
    want, real = primitives.expected(dtype), rows(dtype, count)["ids"] < primitives.EXPERTS
    for name, got in made(dtype, count).items():
        keep = real if name == "experts" else slice(None)
        left, right = (v[:count][keep].astype(np.float64) for v in (got, want[name]))
        size = np.abs(right).max()
        np.testing.assert_allclose(left, right, atol=bound * size, err_msg=name)


def test_rows_do_not_see_each_other():
    few, more = made("float32", 3), made("float32", 20)
    for name, got in few.items():
        np.testing.assert_array_equal(bits(got), bits(more[name][:3]), err_msg=name)


@pytest.mark.exhaustive
def test_gradients_are_those_of_the_forms_of_a_cpu():
    x, names = normal(11, 5, primitives.WIDTH), ("square", "groups", "experts", "keys", "gain")
    w = {n: primitives.shared("float32")[n] for n in (*names, "sink")}

    def slopes(numerics):
        def total(x, w):
            out = primitives.plain_sums(x, w, numerics)
            return sum(jnp.sum(jnp.sin(v) * v) for v in out.values())

        return jax.jit(jax.grad(total, argnums=(0, 1)))(x, w)

    for left, right in zip(
        jax.tree.leaves(slopes(FLOAT32)), jax.tree.leaves(slopes(Numerics.fp32())), strict=True
    ):
        np.testing.assert_allclose(left, right, atol=2e-5 * float(jnp.abs(right).max()))


# -- stored weights --------------------------------------------------------------------------------


def stored(format: str, *shape: int):
    weight = jnp.asarray(normal(3, *shape)).astype(jnp.bfloat16)
    if format == "bf16_bits":
        return quant.decode_to_bits(weight)
    return quant.quantize(weight, format)


@functools.partial(jax.jit, static_argnames=("how", "apart"))
def product(x, weight, how=SMALL, apart=None):
    return products.product(x, weight, "float32", True, how, apart)


@pytest.mark.parametrize("format", STORAGES)
def test_a_weight_decoded_in_the_kernel_is_the_weight_it_stands_for(format):
    """Rows, columns and K leave a rest in every tile."""
    weight = stored(format, 40, 96)
    x = jnp.asarray(normal(4, 19, 1, 96)).astype(jnp.bfloat16)
    got = product(x, weight)
    np.testing.assert_array_equal(bits(got), bits(product(x, quant.dequantize(weight))))
    want = np.asarray(x[:, 0], np.float64) @ np.asarray(quant.dequantize(weight), np.float64).T
    np.testing.assert_allclose(got[:, 0], want, atol=2e-6 * np.abs(want).max())


def test_every_code_is_decoded_exactly():
    """All FP8 and FP4 codes with scales from 2^-100 to 2^100 against the codecs of `quant`."""
    for format, codes in (("fp8_group", 256), ("fp4_group", 256)):
        code = np.tile(np.arange(codes, dtype=np.uint8), (3, 1))
        code = np.where(code & 127 == 127, 1, code) if format == "fp8_group" else code
        width = code.shape[1] * (2 if format == "fp4_group" else 1)
        scale = np.array([27, 120, 227], np.uint8)[:, None] + np.zeros((1, width // 32), np.uint8)
        weight = quant.Quantized(jnp.asarray(code), jnp.asarray(scale), format)
        eye = jnp.eye(width, dtype=jnp.bfloat16)[:, None]
        want = np.asarray(quant.dequantize(weight, jnp.float32)).T
        np.testing.assert_array_equal(product(eye, weight)[:, 0], want)


@pytest.mark.parametrize("turned", [False, True])
def test_float32_weights_lose_nothing_to_bfloat16_rows(turned):
    weight, x = normal(1, 24, 160), as_dtype(normal(2, 5, 1, 160), "bfloat16")
    how = dataclasses.replace(SMALL, turned=turned)
    want = x[:, 0].astype(np.float64) @ weight.astype(np.float64).T
    got = product(jnp.asarray(x), jnp.asarray(weight), how)[:, 0]
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


def test_parts_in_one_program_or_in_several():
    """A narrow weight is summed in parts; how many programs share them changes no bit."""
    k, n = 2048, 7
    assert schedule.parts(k, n) > 1
    weight = jnp.asarray(normal(1, n, k)).astype(jnp.bfloat16)
    x = jnp.asarray(normal(2, 20, 1, k)).astype(jnp.bfloat16)
    how = Schedule(16, 16, 64, 1, 1)
    one, several = (product(x, weight, how, apart) for apart in (False, True))
    np.testing.assert_array_equal(bits(one), bits(several))


@pytest.mark.parametrize(("k", "n"), [(5120, 384), (20480, 24), (5120, 32), (1280, 32768), (96, 7)])
def test_parts_divide_k(k, n):
    count = schedule.parts(k, n)
    assert k % count == 0
    if count > 1:
        assert k // count % 128 == 0
    if n > 1024:
        assert count == 1


@pytest.mark.exhaustive
def test_experts_come_from_the_whole_stack():
    weight = stored("fp4_group", 2, 3, 40, 96)
    x = jnp.asarray(normal(4, 64, 96)).astype(jnp.bfloat16)
    expert = jnp.array([0, 2, 1, 1], jnp.int32)
    run = functools.partial(grouped.product, rows=16, dtype="float32", interpret=True, how=SMALL)
    got = np.asarray(jax.jit(run)(x, weight, jnp.int32(1), expert, jnp.int32(3)))
    table = np.asarray(quant.dequantize(weight, jnp.float32), np.float64)[1]
    tiles = np.asarray(x, np.float64).reshape(4, 16, 96)[:3]
    want = np.einsum("tmk,tnk->tmn", tiles, table[[0, 2, 1]]).reshape(48, 40)
    np.testing.assert_allclose(got[:48], want, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize(
    ("shape", "alone"),
    [((3, 128, 2304, 2560), True), ((2, 128, 2304, 2560), False), ((6, 128, 2304, 2560), False)],
    ids=["drafter as released", "up to 2 GiB", "over 4 GiB"],
)
def test_entries_beyond_32_bits_are_reached(shape, alone):
    """Nothing is computed: only shapes of gigabytes are looked at."""
    weight = jax.ShapeDtypeStruct(shape, jnp.uint8)
    left, place = jax.eval_shape(addressing.addressable, weight, jnp.int32(1))
    assert left.shape == ((1, *shape[1:]) if alone else shape)
    assert place.shape == ()


def test_the_layer_that_is_cut_out(monkeypatch):
    monkeypatch.setattr(addressing, "_out_of_reach", lambda shape, _: len(shape) == 4)
    weight = stored("fp4_group", 3, 2, 40, 96)
    alone, place = addressing.addressable(weight, jnp.int32(2))
    assert int(place) == 0
    for one, whole in zip(jax.tree.leaves(alone), jax.tree.leaves(weight), strict=True):
        np.testing.assert_array_equal(one[0], whole[2])


def test_a_layer_out_of_reach_is_refused():
    weight = jax.ShapeDtypeStruct((1, 384, 2304, 2560), jnp.uint8)
    with pytest.raises(ValueError, match="spread it over several devices"):
        jax.eval_shape(addressing.addressable, weight, jnp.int32(0))


def test_gradients_ignore_what_no_product_has_written():
    """Few rows, many experts: most tiles of the first product are never computed."""
    w = jnp.asarray(normal(1, 1, 6, 32, 32))
    x, ids = jnp.asarray(normal(2, 9, 32)), jnp.array([4, 0, 4, 4, 0, 9, 4, 0, 9], jnp.int32)

    def loss(w, x, numerics):
        groups = nx.group_rows(ids, w, numerics)
        linear = functools.partial(
            nx.grouped_linear, weight=w, layer=0, groups=groups, numerics=numerics
        )
        y = nx.collect(groups, linear(jnp.sin(linear(nx.spread(groups, x)))))
        return jnp.sum(y * y)

    slope = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    for left, right in zip(slope(w, x, FLOAT32), slope(w, x, Numerics.fp32()), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5 * float(jnp.abs(right).max()))


# -- which form runs where -------------------------------------------------------------------------


def test_forms_of_back_ends():
    assert rows_for("cpu") == "tiled"
    assert rows_for("gpu") == rows_for("cuda") == "pallas"
    with pytest.raises(ValueError, match="no form of numerics is invariant on back end 'tpu'"):
        rows_for("tpu")


@pytest.mark.parametrize(
    ("form", "around", "reason"),
    [
        ("tiled", {"backend": "gpu"}, "invariant on a CPU only"),
        ("pallas", {"backend": "cpu"}, "kernels for an NVIDIA GPU"),
        ("tiled", {"xla_flags": "--xla_cpu_enable_fast_math=true"}, "reassociate"),
        ("tiled", {"xla_flags": "--a --xla_cpu_enable_fast_math"}, "reassociate"),
        ("tiled", {"xla_flags": "--xla_cpu_enable_fast_math=TRUE --b"}, "reassociate"),
        ("tiled", {"xla_flags": "--xla_cpu_enable_fast_math='true'"}, "reassociate"),
        ("tiled", {"xla_flags": "--xla_cpu_enable_fast_math=1"}, "reassociate"),
        ("tiled", {"xla_flags": "flags.txt"}, "names a file"),
        ("pallas", {"backend": "gpu", "matmul_precision": "tensorfloat32"}, "'tensorfloat32'"),
        ("tiled", {"x64": True}, "64-bit"),
        ("tiled", {"disable_jit": True}, "one by one"),
    ],
)
def test_settings_that_break_the_promise_are_refused(form, around, reason):
    numerics = dataclasses.replace(Numerics.native(), rows=form)
    with pytest.raises(ValueError, match=reason):
        startup.check(numerics, startup.Surroundings(**{"backend": "cpu", **around}))


@pytest.mark.parametrize("form", ["batched", "dense"])
def test_no_promise_no_refusal(form):
    numerics = dataclasses.replace(Numerics.native(), rows=form)
    flags = "--xla_cpu_enable_fast_math=true"
    assert not startup.refusals(numerics, startup.Surroundings("tpu", flags, "high", True))


def test_harmless_settings_are_let_through():
    flags = "--xla_cpu_enable_fast_math=false --xla_allow_excess_precision=true"
    assert not startup.refusals(Numerics.native(), startup.Surroundings("cpu", flags))
    assert not startup.refusals(NATIVE, startup.Surroundings("cpu"))
    assert not startup.refusals(
        Numerics.native(rows=rows_for("gpu")), startup.Surroundings("gpu", "")
    )
