"""Parts of a layer as single kernels, against the functions in whose place they run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.model import hyper, moe, rope
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import text_rows
from deepinfer_jax.tables import Rotation
from kernels_bridge import ffi
from kernels_bridge.building import NoKernelsError, find_compiler
from tests import small

try:
    find_compiler()
except NoKernelsError as error:
    pytest.skip(str(error), allow_module_level=True)

CFG = small.CONFIG
ROWS = 53  # more than a block of rows, and no multiple of anything
C, D, N, E, K = CFG.hc_mult, CFG.hidden_size, CFG.moe_intermediate_size, CFG.n_routed_experts, 2
FORMS = {"bfloat16": Numerics.native(rows="ffi"), "float32": Numerics.fp32("ffi")}


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: Any = np.float32) -> Any:
    values = np.random.default_rng(seed).normal(scale=scale, size=shape)
    return values.astype(np.float32).astype(dtype)


def plain(numerics: Numerics) -> Numerics:
    return dataclasses.replace(numerics, rows="tiled")


def bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.itemsize])


def stored(seed: int, *shape: int, format: quant.Format = "fp4_group") -> quant.Quantized:
    return quant.quantize(jnp.asarray(normal(seed, *shape, scale=0.3)), format)


@pytest.fixture(params=FORMS, ids=str)
def numerics(request):
    return FORMS[request.param]


def gate() -> dict[str, Any]:
    bias = {"bias": normal(22, E, scale=0.1), "bias_vl": normal(23, E, scale=0.1)}
    return {"weight": normal(21, E, D, dtype=ml_dtypes.bfloat16), **bias}


def mixing() -> dict[str, Any]:
    width = C * (2 + C)
    return {
        "fn": normal(11, width, C * D, scale=0.1), "scale": normal(12, 3), "base": normal(13, width)
    }  # fmt: skip


def shared() -> dict[str, Any]:
    shapes = {"w1": (N, D), "w3": (N, D), "w2": (D, N)}
    return {
        name: quant.decode_to_bits(stored(31 + i, *shape, format="fp8_block"))
        for i, (name, shape) in enumerate(shapes.items())
    }


def chosen(rows: int) -> moe.Route:
    """Some rows name an expert twice, some none at all, and one expert is nobody's."""
    experts = np.random.default_rng(51).integers(0, E - 1, (rows, K)).astype(np.int32)
    experts[::7] = 1 << 20
    return moe.Route(jnp.asarray(experts), jnp.asarray(normal(52, rows, K)), jnp.zeros((rows, E)))


def stacks(format: quant.Format) -> dict[str, Any]:
    shapes = {"w1": (2, E, N, D), "w3": (2, E, N, D), "w2": (2, E, D, N)}
    return {
        name: stored(53 + i, *shape, format=format)
        for i, (name, shape) in enumerate(shapes.items())
    }


def of_experts(numerics: Numerics, x: Any, routed: moe.Route) -> Any:
    rows = text_rows(*[jnp.arange(x.shape[0])] * 3)
    decoded = jax.tree.map(quant.decode_to_bits, stacks("fp4_group"), is_leaf=_is_weight)
    return moe.routed_experts(decoded, 1, x, routed, E, rows, CFG, numerics)


def _is_weight(leaf: Any) -> bool:
    return not isinstance(leaf, dict)


def cases(numerics: Numerics) -> dict[str, tuple[Any, list[Any]]]:
    """Every function that has a kernel: (function of rows and numerics, its rows [T, ...])."""
    x = functools.partial(normal, dtype=numerics.dtype)
    turn = normal(4, ROWS, CFG.qk_rope_head_dim // 2)
    streams, image = x(1, ROWS, C, D), np.arange(ROWS) % 3 == 0
    mixed = hyper.Mix(*(normal(5 + i, *s) for i, s in enumerate(((ROWS, C), (ROWS, C),
                                                                  (ROWS, C, C)))))  # fmt: skip
    return {
        "rms_norm": (lambda n, x: nx.rms_norm(x, normal(3, D), 1e-6, n), [x(2, ROWS, D)]),
        "rotated": (
            lambda n, x, cos, sin: rope.rotated(x, Rotation(cos, sin), True, n),
            [x(2, ROWS, 3, CFG.head_dim), np.cos(turn), np.sin(turn)],
        ),
        "mix": (lambda n, s: hyper.mix(mixing(), s, CFG, n), [streams]),
        "normed": (
            lambda n, pre, s: hyper.normed(normal(3, D), pre, s, CFG, n), [mixed.pre, streams],
        ),
        "expand": (
            lambda n, y, m, s: hyper.expand(y, m, s, n), [x(2, ROWS, D), mixed, streams],
        ),
        "route": (
            lambda n, x, image: moe.route(gate(), x, image, K, CFG, n), [x(2, ROWS, D), image],
        ),
        "shared": (lambda n, x: moe.shared_expert(shared(), x, CFG, n), [x(2, ROWS, D)]),
        "experts": (of_experts, [x(2, ROWS, D), chosen(ROWS)]),
    }  # fmt: skip


NAMES = tuple(cases(FORMS["float32"]))
SAME_BITS = ("rotated", "expand")  # no sum but short ones, no exponential


@functools.partial(jax.jit, static_argnames=("f", "numerics"))
def run(f, numerics, *rows):
    return f(numerics, *rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_gives_what_its_function_gives(name, numerics):
    f, rows = cases(numerics)[name]
    made, want = run(f, numerics, *rows), run(f, plain(numerics), *rows)
    assert jax.tree.structure(made) == jax.tree.structure(want)
    close = 2e-6 if numerics.dtype == "float32" else 2e-2
    for own, other in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        assert own.dtype == other.dtype
        if name in SAME_BITS or own.dtype == jnp.int32:
            np.testing.assert_array_equal(own, other)
        else:
            own, other = (np.asarray(a, np.float64) for a in (own, other))
            np.testing.assert_allclose(own, other, rtol=close, atol=close * np.abs(other).max())


@pytest.mark.parametrize("name", NAMES)
def test_a_row_depends_on_itself_alone(name, numerics):
    f, rows = cases(numerics)[name]
    whole = run(f, numerics, *rows)
    for part in (slice(0, 1), slice(50, 53), slice(7, 30)):
        few = run(f, numerics, *jax.tree.map(lambda a, part=part: a[part], rows))
        for own, all_rows in zip(jax.tree.leaves(few), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(bits(own), bits(all_rows)[part])


@pytest.mark.parametrize("name", NAMES)
def test_not_a_number_stays_where_it_is(name, numerics):
    """A request whose numbers are poisoned must be seen, and its neighbours must not."""
    f, rows = cases(numerics)[name]
    sound = run(f, numerics, *rows)
    spoilt = [rows[0].copy(), *rows[1:]]
    spoilt[0][5] = np.nan
    poisoned = run(f, numerics, *spoilt)
    others = np.arange(ROWS) != 5
    for own, all_rows in zip(jax.tree.leaves(poisoned), jax.tree.leaves(sound), strict=True):
        np.testing.assert_array_equal(bits(own)[others], bits(all_rows)[others])
    floats = [leaf for leaf in jax.tree.leaves(poisoned) if leaf.dtype != jnp.int32]
    assert all(np.isnan(np.asarray(leaf[5], np.float32)).any() for leaf in floats)


@pytest.mark.parametrize("name", NAMES)
def test_the_slope_is_that_of_the_function(name):
    numerics = FORMS["float32"]
    f, rows = cases(numerics)[name]

    def total(rows, numerics):
        floats = (a for a in jax.tree.leaves(f(numerics, *rows)) if a.dtype != jnp.int32)
        return sum(jnp.sum(jnp.sin(a)) for a in floats)

    slope = jax.jit(jax.grad(total, allow_int=True), static_argnums=1)
    for own, other in zip(
        jax.tree.leaves(slope(rows, numerics)),
        jax.tree.leaves(slope(rows, dataclasses.replace(numerics, rows="batched"))),
        strict=True,
    ):
        if own.dtype == np.float32:
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


# -- products and quantizers -----------------------------------------------------------------------


def hard_rows(count: int, k: int) -> Any:
    """Rows of all sizes, with ties, zeros of both signs, the largest and the smallest numbers."""
    x = normal(41, count, k) * np.exp2(np.arange(count) - count // 2)[:, None].astype(np.float32)
    x[1] = np.float32([0.0, -0.0, 448.0, -1e30, 1e-38, 17.0, 2.5, -0.05])[np.arange(k) % 8]
    x[2] = np.round(x[2] * 8) / 16
    return x


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("rows", [1, 5, ROWS, 211])
def test_a_product_quantizes_as_the_quantizer_does(rows, dtype):
    x, w = hard_rows(max(rows, 5), 96)[:rows].astype(dtype), normal(42, 17, 96, dtype=dtype)
    quantized = jax.jit(quant.qdq_fp8)(x)
    own = ffi.product(x[:, None], w, dtype, quantized=True)
    np.testing.assert_array_equal(bits(own), bits(ffi.product(quantized[:, None], w, dtype)))


@pytest.mark.parametrize("rows", [3, 211])
def test_a_layer_is_read_in_its_stack(rows):
    x, w = normal(43, rows, 2, 40), normal(44, 3, 2 * 9, 40, dtype=ml_dtypes.bfloat16)
    for layer in range(3):
        own = jax.jit(ffi.product)(x, (w.view(np.uint16), layer))
        np.testing.assert_array_equal(own, ffi.product(x, w[layer]))


def test_a_layer_that_is_none_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="with its layer"):
        jax.block_until_ready(ffi.product(normal(1, 2, 1, 8), (normal(2, 3, 4, 8), 3)))


# -- experts ---------------------------------------------------------------------------------------


def test_experts_are_the_same_bits_however_they_are_stored(numerics):
    """Packed ones are decoded tile by tile, where the kernel of whole stacks does not run."""
    x = jnp.asarray(normal(56, ROWS, D, dtype=numerics.dtype))
    rows = text_rows(*[jnp.arange(ROWS)] * 3)
    routed = jax.jit(
        lambda s: moe.routed_experts(s, 1, x, chosen(ROWS), E, rows, CFG, numerics)
    )  # fmt: skip
    packed = stacks("fp4_group")
    want = bits(routed(storages(packed)["bits"]))
    for name, weights in storages(packed).items():
        np.testing.assert_array_equal(bits(routed(weights)), want, err_msg=name)
    assert not want[::7].any()


def storages(packed: dict[str, Any]) -> dict[str, Any]:
    """The same weights in every way that they can be stored, and in different ways at once."""
    ways = {
        "packed": lambda a: a,
        "bits": quant.decode_to_bits,
        "bfloat16": lambda a: quant.dequantize(a, jnp.bfloat16),
        "float32": lambda a: quant.dequantize(a, jnp.float32),
    }
    made = {way: {name: f(w) for name, w in packed.items()} for way, f in ways.items()}
    for first in ways:
        for last in ways:
            if first != last:
                made[f"{first} and {last}"] = {**made[first], "w2": made[last]["w2"]}
    return made


def test_a_shared_expert_is_the_same_bits_however_it_is_stored(numerics):
    """Also where some of its weights are read in a stack of layers and others are not."""
    x = jnp.asarray(normal(56, ROWS, D, dtype=numerics.dtype))
    run = jax.jit(lambda p: moe.shared_expert(p, x, CFG, numerics))
    shapes = {"w1": (2, N, D), "w3": (2, N, D), "w2": (2, D, N)}
    packed = {
        name: stored(61 + i, *shape, format="fp8_block")
        for i, (name, shape) in enumerate(shapes.items())
    }
    every = storages(packed)
    want = bits(run(nx.at_layer(every["bits"], 1, numerics)))
    for name, weights in every.items():
        own = run(nx.at_layer(weights, jnp.int32(1), numerics))
        np.testing.assert_array_equal(bits(own), want, err_msg=name)


# -- edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_give_no_rows(name, numerics):
    f, rows = cases(numerics)[name]
    none = jax.tree.map(lambda a: a[:0], rows)
    made, want = run(f, numerics, *none), run(f, numerics, *rows)
    for own, other in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        assert own.shape == (0, *other.shape[1:])


@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7FFF0000, 0xFFFF0000, 0x7FFFFFFF, 0x7F800000])
def test_numbers_that_are_none_are_seen_behind_the_quantizer(pattern):
    """Whatever the bits of a NaN; a group that has an infinity is none at all, as in `quant`."""
    x, w = normal(71, 3, 64), normal(72, 5, 64)
    sound = np.asarray(ffi.product(x[:, None], w, quantized=True))[:, 0]
    x.view(np.uint32)[1, 40] = pattern
    spoilt = np.asarray(ffi.product(x[:, None], w, quantized=True))[:, 0]
    assert np.isnan(spoilt[1]).all()
    np.testing.assert_array_equal(spoilt[[0, 2]], sound[[0, 2]])
    each = np.asarray(ffi.product(x[:, None], jnp.eye(64), quantized=True))
    assert np.isnan(each).any(axis=(1, 2)).tolist() == [False, True, False]


@pytest.mark.parametrize("streams", [1, 2, 5, 8, 9])
def test_any_number_of_streams_gives_a_row_its_own_bits(streams, numerics):
    """Nine are more than the kernels hold: the functions run themselves."""
    cfg = dataclasses.replace(CFG, hc_mult=streams)
    width = streams * (2 + streams)
    p = {
        "fn": normal(81, width, streams * 32, scale=0.1), "scale": normal(82, 3),
        "base": normal(83, width),
    }  # fmt: skip
    x = normal(84, 37, streams, 32, dtype=numerics.dtype)

    def through(numerics, x):
        mixed = hyper.mix(p, x, cfg, numerics)
        y = hyper.normed(normal(85, 32), mixed.pre, x, cfg, numerics)
        return mixed, hyper.expand(y, mixed, x, numerics)

    whole, want = run(through, numerics, x), run(through, plain(numerics), x)
    for part in (slice(0, 1), slice(15, 18)):
        few = run(through, numerics, x[part])
        for own, all_rows in zip(jax.tree.leaves(few), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(bits(own), bits(all_rows)[part])
    close = 1e-5 if numerics.dtype == "float32" else 5e-2
    for own, other in zip(jax.tree.leaves(whole), jax.tree.leaves(want), strict=True):
        own, other = (np.asarray(a, np.float64) for a in (own, other))
        np.testing.assert_allclose(own, other, rtol=close, atol=close * np.abs(other).max())


@pytest.mark.parametrize("k", [1, E])
def test_of_equal_experts_the_lower_ones_are_chosen(k, numerics):
    """One of them, or all."""
    even = {**gate(), "weight": np.zeros((E, D), np.float32), "bias": np.zeros(E, np.float32)}
    routed = moe.route(even, normal(91, 5, D), jnp.zeros(5, bool), k, CFG, numerics)
    np.testing.assert_array_equal(routed.experts, np.tile(np.arange(k), (5, 1)))


@pytest.mark.parametrize("format", ["fp4_group", "fp8_block", "bf16_bits"])
def test_a_product_takes_a_stored_weight_as_it_takes_its_values(format, numerics):
    """`dot` decodes what the kernel cannot read, and hands over what it can."""
    x = jnp.asarray(normal(61, 5, 64, dtype=numerics.dtype))
    weight = stored(62, 33, 64, format="fp4_group" if format == "bf16_bits" else format)
    values = quant.dequantize(weight, numerics.dtype)
    weight = quant.decode_to_bits(weight) if format == "bf16_bits" else weight
    np.testing.assert_array_equal(nx.dot(x, weight, numerics), nx.dot(x, values, numerics))
