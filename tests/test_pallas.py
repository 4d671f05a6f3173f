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
from deepinfer_jax.numerics import stored as addressing
from deepinfer_jax.numerics.pallas import grouped, products, schedule
from deepinfer_jax.numerics.pallas.schedule import Schedule
from kernels_bridge.machine import named
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
    few, more = made("bfloat16", 3), made("bfloat16", 20)
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
    """Rows, columns and K leave a rest in every tile, whichever operand the weight is."""
    weight = stored(format, 40, 96)
    x = jnp.asarray(normal(4, 19, 1, 96)).astype(jnp.bfloat16)
    got = product(x, weight)
    turned = product(x, weight, dataclasses.replace(SMALL, turned=True))
    np.testing.assert_array_equal(bits(turned), bits(got))
    np.testing.assert_array_equal(bits(got), bits(product(x, quant.dequantize(weight))))
    want = np.asarray(x[:, 0], np.float64) @ np.asarray(quant.dequantize(weight), np.float64).T
    np.testing.assert_allclose(got[:, 0], want, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize(
    "format", [pytest.param("fp8_block", marks=pytest.mark.exhaustive), "fp4_group"]
)
def test_a_layer_stays_in_its_stack(format):
    """Cut out of it, read from it, and cut out because the stack is out of reach: equal bits."""
    stack = stored(format, 3, 40, 96)
    x = jnp.asarray(normal(4, 5, 96)).astype(jnp.bfloat16)

    @functools.partial(jax.jit, static_argnames="numerics")
    def run(x, stack, layer, numerics):
        return nx.dot(x, nx.at_layer(stack, layer, numerics), numerics)

    alone = jax.tree.map(lambda a: a[2], stack)
    want = product(x[:, None], alone, None)[:, 0]
    np.testing.assert_array_equal(bits(run(x, stack, 2, NATIVE)), bits(want))
    slope = jax.grad(lambda x: jnp.sum(run(x, stack, 2, NATIVE)))(x)
    columns = np.asarray(quant.dequantize(alone, jnp.float32)).sum(axis=0)
    np.testing.assert_allclose(slope[3].astype(np.float32), columns, atol=0.05)


def test_a_stack_out_of_reach_is_cut():
    stack = quant.Quantized(
        jax.ShapeDtypeStruct((60, 8192, 5120), jnp.uint8),
        jax.ShapeDtypeStruct((60, 256, 160), jnp.uint8), "fp8_block",
    )  # fmt: skip
    assert 1 << 31 < 60 * 8192 * 5120 < 1 << 32
    cut = jax.eval_shape(lambda s: addressing.reachable(addressing.at_layer(s, 1)), stack)
    assert isinstance(cut, quant.Quantized)
    assert cut.codes.shape == (8192, 5120)


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
    expert, live = jnp.array([0, 2, 1, 1], jnp.int32), jnp.array([16, 3, 16, 0], jnp.int32)
    x = x.at[19:32].set(jnp.nan)  # nobody reads what does not count
    run = functools.partial(grouped.product, rows=16, dtype="float32", interpret=True, how=SMALL)
    got = np.asarray(jax.jit(run)(x, weight, jnp.int32(1), expert, live, jnp.int32(3)))
    table = np.asarray(quant.dequantize(weight, jnp.float32), np.float64)[1]
    tiles = np.asarray(x, np.float64).reshape(4, 16, 96)[:3]
    want = np.einsum("tmk,tnk->tmn", tiles, table[[0, 2, 1]]).reshape(48, 40)
    got[19:32] = want[19:32] = 0
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
    monkeypatch.setattr(addressing, "out_of_reach", lambda shape, _: len(shape) == 4)
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


# -- other kernels ---------------------------------------------------------------------------------


def mixed(raw, numerics):
    scale, base = np.float32([1, 0.7, 1.3]), normal(5, 24)
    return nx.mixes(raw, scale, base, 4, 20, 1e-6, numerics)


def test_mixes_are_those_of_a_cpu_wherever_the_row_stands():
    rows = normal(6, 20, 24)
    raw = jnp.asarray(np.concatenate([rows, rows[::-1]]))
    run = jax.jit(mixed, static_argnums=1)
    for got, want in zip(run(raw, FLOAT32), run(raw, Numerics.fp32()), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)
        np.testing.assert_array_equal(bits(got[:20]), bits(got[20:][::-1]))


@pytest.mark.exhaustive
def test_gradients_of_mixes_are_those_of_a_cpu():
    raw = jnp.asarray(normal(6, 5, 24))

    def slope(numerics):
        return jax.jit(jax.grad(lambda x: sum(jnp.sum(jnp.sin(v)) for v in mixed(x, numerics))))

    left, right = slope(FLOAT32)(raw), slope(Numerics.fp32())(raw)
    np.testing.assert_allclose(left, right, atol=1e-6)


def test_index_keys_at_once():
    """On a GPU few rows look at many keys, so that the host is asked seldom."""
    assert nx.index_width(1, Numerics.native()) == 512
    assert [nx.index_width(t, NATIVE) for t in (1, 64, 4096)] == [65536, 8192, 512]


# -- which form runs where -------------------------------------------------------------------------

CPU, GPU = named("cpu"), named("sm_90")


def test_forms_of_back_ends():
    assert rows_for("cpu") == "tiled"
    assert rows_for("gpu") == rows_for("cuda") == "pallas"
    with pytest.raises(ValueError, match="no form of numerics is invariant on back end 'tpu'"):
        rows_for("tpu")


@pytest.mark.parametrize(
    ("form", "around", "reason"),
    [
        ("tiled", {"machine": GPU}, 'is for cpu, this is cuda: use rows="pallas"'),
        ("pallas", {"machine": CPU}, 'is for cuda, this is cpu: use rows="tiled"'),
        ("tiled", {"xla_flags": "--xla_cpu_enable_fast_math=true"}, "reassociate"),
        ("tiled", {"xla_flags": "--a --xla_cpu_enable_fast_math"}, "reassociate"),
        ("tiled", {"xla_flags": "--xla_cpu_enable_fast_math=TRUE --b"}, "reassociate"),
        ("tiled", {"xla_flags": "--xla_cpu_enable_fast_math='true'"}, "reassociate"),
        ("tiled", {"xla_flags": "--xla_cpu_enable_fast_math=1"}, "reassociate"),
        ("tiled", {"xla_flags": "flags.txt"}, "names a file"),
        ("pallas", {"machine": GPU, "matmul_precision": "tensorfloat32"}, "'tensorfloat32'"),
        ("tiled", {"x64": True}, "64-bit"),
        ("tiled", {"disable_jit": True}, "one by one"),
    ],
)
def test_settings_that_break_the_promise_are_refused(form, around, reason):
    numerics = dataclasses.replace(Numerics.native(), rows=form)
    with pytest.raises(ValueError, match=reason):
        startup.check(numerics, startup.Surroundings(**{"machine": CPU, **around}))


@pytest.mark.parametrize("form", ["batched", "dense"])
def test_no_promise_no_refusal(form):
    numerics = dataclasses.replace(Numerics.native(), rows=form)
    flags = "--xla_cpu_enable_fast_math=true"
    assert not startup.refusals(numerics, startup.Surroundings(named("tpu"), flags, "high", True))


def test_harmless_settings_are_let_through():
    flags = "--xla_cpu_enable_fast_math=false --xla_allow_excess_precision=true"
    assert not startup.refusals(Numerics.native(), startup.Surroundings(CPU, flags))
    assert not startup.refusals(NATIVE, startup.Surroundings(CPU))
    assert not startup.refusals(
        Numerics.native(rows=rows_for("gpu")), startup.Surroundings(GPU, "")
    )
