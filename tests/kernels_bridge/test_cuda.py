"""CUDA kernels without a GPU: that they compile, how codes are decoded, which order a sum has.

What runs on a GPU is tested there (tests/test_gpu.py).
"""

from __future__ import annotations

import ctypes
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.numerics import Numerics, cuda, forms, startup, stored
from kernels_bridge import building, handlers
from kernels_bridge import cuda as kernels
from kernels_bridge.building import NoKernelsError
from kernels_bridge.machine import CUDA_COMPILER, Found, Machine, named
from tests.kernels_bridge.test_building import COUNTING, put_compiler

NVCC = Found(CUDA_COMPILER)
HOPPER = Machine("cuda", (9, 0), found=(NVCC,))


def _compiler(toolchain: building.Toolchain) -> str:
    try:
        return building.find_compiler(toolchain=toolchain)
    except NoKernelsError as error:
        pytest.skip(str(error))


# -- codes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """The kernels' own decoding, compiled for a CPU."""
    source = building.CUDA_SOURCE.parents[3] / "tests" / "kernels_bridge" / "codes_on_cpu.cc"
    made = tmp_path_factory.mktemp("codes") / "codes.so"
    include = str(building.CUDA_SOURCE.parent)
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-I", include)
    command = [_compiler(building.HOST), *flags, str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


def _words(array: np.ndarray):
    return np.ascontiguousarray(array).view(np.uint32).ctypes.data_as(ctypes.c_void_p)


def decoded(library, bits: int, block: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """A block of 128 values of a row as the four threads multiply them: bfloat16 [8, 2, 4, 2].

    Axes: step, half of it, thread, pair; NaN everywhere where a thread saw one.
    """
    out = np.zeros((4, 16), np.uint32)
    word = int(scales.astype(np.uint32) @ (1 << 8 * np.arange(4)))
    bad = [
        library.decode(bits, _words(block), ctypes.c_uint32(word), t, _words(out[t]))
        for t in range(4)
    ]
    values = out.view(jnp.bfloat16).reshape(4, 8, 2, 2).transpose(1, 2, 0, 3)
    return np.where(np.any(bad), np.array(np.nan, jnp.bfloat16), values)


def paired(library, bits: int, x: np.ndarray) -> np.ndarray:
    """128 entries of 16 bits of a row of x as they meet those of `decoded` [8, 2, 4, 2]."""
    out = np.zeros((4, 16), np.uint32)
    for t in range(4):
        library.pair(bits, _words(x), t, _words(out[t]))
    return out.view(np.uint16).reshape(4, 8, 2, 2).transpose(1, 2, 0, 3)


STORAGE = {4: "fp4_group", 8: "fp8_block"}


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_and_weights_meet_in_the_order_that_numerics_names(codes, bits):
    """`in_order` is what makes a kernel that walks K from its first element to its last agree."""
    number = np.arange(128, dtype=np.uint16)
    places = paired(codes, bits, number).reshape(-1)
    assert sorted(places) == list(range(128))
    want = cuda.in_order(
        jnp.asarray(np.stack([number, number + 128])).reshape(1, 256), STORAGE[bits]
    )
    np.testing.assert_array_equal(places, want[0, :128])
    np.testing.assert_array_equal(places + 128, want[0, 128:])


# In float64, since a compiler for a CPU makes zeros of subnormal numbers.
VALUES = {
    4: lambda row: np.asarray(quant.decode_e2m1(quant.unpack_nibbles(row)), np.float64),
    8: lambda row: np.asarray(quant.decode_e4m3(row), np.float64),
}


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_with_every_scale_is_what_it_stands_for(codes, bits):
    """At the place of the value of x that it is multiplied with; subnormal results among them."""
    places = paired(codes, bits, np.arange(128, dtype=np.uint16))
    every = np.arange(256, dtype=np.uint8)
    if bits == 8:
        every = np.where(every & 127 == 127, 1, every).astype(np.uint8)
    for row in every.reshape(-1, 16 * bits):
        value = VALUES[bits](row)
        for scale in range(256):
            scales = np.array([scale, 255 - scale, scale // 2, min(scale + 64, 255)])
            by = np.where(scales == 255, np.inf, 2.0 ** (scales - 127.0)).repeat(32)
            want = (value * by)[places].astype(np.float32).astype(jnp.bfloat16)
            got = decoded(codes, bits, row, scales)
            same = got.view(np.uint16) == want.view(np.uint16)
            assert (same | (np.isnan(want) & np.isnan(got))).all(), (scale, row)


@pytest.mark.parametrize("place", [0, 31, 64, 127])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("scale", [100, 140])
def test_a_nan_is_seen_wherever_it_stands(codes, place, code, scale):
    row = np.arange(128, dtype=np.uint8) % 127
    assert not np.isnan(decoded(codes, 8, row, np.full(4, scale))).any()
    row[place] = code
    assert np.isnan(decoded(codes, 8, row, np.full(4, scale))).all()


# -- building --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_kernels_compile_and_their_handlers_are_registered():
    _compiler(building.CUDA)
    kernels.load()
    x, codes = jnp.zeros((3, 2, 256), jnp.bfloat16), jnp.zeros((1, 64, 256), jnp.uint8)
    scale = jnp.zeros((1, 2, 8), jnp.uint8)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"deepinfer_cuda_product .*Host"):
        kernels.product(x, codes, scale, 0, None, "float32", 2, 16)


def test_without_nvcc_the_message_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NoKernelsError, match=r"install the CUDA toolkit .*rows=\"pallas\""):
        handlers._register.__wrapped__(kernels._STORED)


def test_a_library_of_another_toolchain_does_not_depend_on_the_processor(monkeypatch, tmp_path):
    put_compiler(monkeypatch, tmp_path / "bin", COUNTING)
    (tmp_path / "bin" / "c++").rename(tmp_path / "bin" / "nvcc")
    made = []
    for processor in ("one", "another"):
        monkeypatch.setattr(building, "_processor", lambda named=processor: named)
        made.append(
            building.build(
                jax.ffi.include_dir(), tmp_path / "kept", building.CUDA_SOURCE,
                toolchain=building.CUDA,
            )
        )  # fmt: skip
    assert made[0] == made[1]


# -- choice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (HOPPER, None),
        (named("h200"), r"nvcc is not here: the kernels are built by NVIDIA's compiler: install"),
        (Machine("cuda", (8, 0), found=(NVCC,)), "compiled for sm_9x, this is cuda sm_80"),
        (Machine("cuda", (10, 0), found=(NVCC,)), "compiled for sm_9x, this is cuda sm_100"),
        (Machine("cpu", found=(NVCC,)), "it is for cuda, this is cpu"),
    ],
)
def test_where_the_form_can_run(here, said):
    refused = startup.refusals(Numerics(rows="cuda"), startup.Surroundings(here))
    if said is None:
        assert not refused
        assert forms.choose(here, "cuda") == "cuda"
    else:
        (reason,) = refused
        with pytest.raises(ValueError, match=said):
            startup.check(Numerics(rows="cuda"), startup.Surroundings(here))
        assert forms.mend(here) in reason
    assert forms.choose(here) in ("pallas", "tiled")  # it is asked for


def test_the_form_has_a_fingerprint_of_its_own():
    assert Numerics(rows="cuda").fingerprint() != Numerics(rows="pallas").fingerprint()


# -- order and which products ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "n", "copies"),
    [(128, 32, 1), (256, 96, 1), (5120, 512, 1), (5120, 1280, 1), (1280, 32768, 1),
     (8192, 5120, 1), (2304, 5120, 4), (5120, 2304, 4), (5120, 129280, 1), (128, 1 << 20, 4)],
)  # fmt: skip
def test_parts_of_k_are_a_few_of_whole_blocks(k, n, copies):
    count = cuda.parts(k, n, copies)
    assert count in (1, 2, 4, 8)
    assert k % (cuda.BLOCK * count) == 0


def test_wide_weights_are_added_in_one_run_and_narrow_ones_in_eight():
    assert cuda.parts(5120, 129280) == 1
    assert cuda.parts(5120, 512) == 8


WEIGHT = quant.quantize(jax.random.normal(jax.random.key(0), (96, 256)), "fp4_group")


def test_which_products_the_kernels_take():
    x = jnp.zeros((3, 256), jnp.bfloat16)
    assert cuda.takes(x, WEIGHT)
    assert cuda.takes(x, stored.Layered(jax.tree.map(lambda a: a[None], WEIGHT), jnp.int32(0)))
    assert cuda.takes(x, WEIGHT, 3)
    assert not cuda.takes(x, WEIGHT, 2)  # 48 outputs in a group
    assert not cuda.takes(x.astype(jnp.float32), WEIGHT)
    assert not cuda.takes(x, quant.decode_to_bits(WEIGHT))
    assert not cuda.takes(x, quant.dequantize(WEIGHT))
    assert not cuda.takes(x[:, :96], jax.tree.map(lambda a: a[:, : a.shape[1] * 3 // 8], WEIGHT))


def _stand_in(x, codes, scale, layer, bias, dtype, parts, rows):
    """`kernels.product` in plain JAX, all of K in the first part."""
    kind = "fp4_group" if 2 * codes.shape[-1] == x.shape[-1] else "fp8_block"
    one = quant.Quantized(codes[layer], scale[layer], kind)
    w = quant.dequantize(one, jnp.float32).reshape(x.shape[1], -1, x.shape[2])
    w = cuda.in_pairs(w, kind) if rows == kernels.MANY else w
    y = jnp.einsum("mgk,gnk->mgn", x.astype(jnp.float32), w, precision="highest")
    y = y if bias is None else y + bias.reshape(1, x.shape[1], -1)
    if rows < kernels.MANY:
        return y.astype(dtype)[None]
    assert bias is None
    return jnp.concatenate([y[None], jnp.zeros((parts - 1, *y.shape), y.dtype)])


def _experts_stand_in(x, codes, scale, numbers, dtype, parts):
    layer, expert, _, _ = numbers
    one = quant.Quantized(codes[layer], scale[layer], "fp4_group")
    w = quant.dequantize(one, jnp.float32)[expert]
    w = cuda.in_pairs(w, "fp4_group") if x.shape[0] == 64 * expert.shape[0] else w
    tiles = x.reshape(expert.shape[0], -1, x.shape[1]).astype(jnp.float32)
    y = jnp.einsum("trk,tnk->trn", tiles, w, precision="highest")
    return y.reshape(x.shape[0], -1).astype(dtype)


def _twice_stand_in(x, one, other, numbers, dtype, parts):
    return tuple(
        _experts_stand_in(x, codes, scale, numbers, dtype, parts) for codes, scale in (one, other)
    )


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(kernels, "product", _stand_in)
    monkeypatch.setattr(kernels, "experts", _experts_stand_in)
    monkeypatch.setattr(kernels, "experts_twice", _twice_stand_in)


def _numerics(rows):
    return Numerics(rows=rows, interpret=rows == "cuda")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("storage", ["fp4_group", "fp8_block"])
@pytest.mark.parametrize(("layered", "rows"), [(False, 5), (True, 20), (True, 40), (True, 130)])
def test_products_reach_the_kernels_as_they_are(storage, layered, rows):
    """Values, a bias, groups and gradients are those of plain XLA; many rows go to another kernel,
    with K in the order of the first.
    """
    stack = quant.quantize(jax.random.normal(jax.random.key(1), (3, 96, 256)), storage)
    one = jax.tree.map(lambda a: a[1], stack)
    weight = stored.Layered(stack, jnp.int32(1)) if layered else one
    x = jax.random.normal(jax.random.key(2), (5, 256)).astype(jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(3), (96,))
    x = jnp.tile(x, (rows // 5 + 1, 1))[:rows]

    def value(x, weight, rows):
        linear = nx.linear(x, weight, _numerics(rows), bias=bias)
        grouped = nx.group_dot(x[:, None].repeat(3, 1), weight, _numerics(rows))
        return linear, grouped

    def total(x, weight, rows):
        return sum(jnp.sum(jnp.sin(each.astype(jnp.float32))) for each in value(x, weight, rows))

    for got, want in zip(value(x, weight, "cuda"), value(x, one, "batched"), strict=True):
        np.testing.assert_allclose(
            got.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-2, atol=1e-4
        )
    got, want = jax.grad(total)(x, weight, "cuda"), jax.grad(total)(x, one, "batched")
    got, want = (a.astype(jnp.float32) for a in (got, want))
    np.testing.assert_allclose(got, want, atol=0.03 * float(jnp.abs(want).max()))


def _two_of_three(linear, x, stack):
    """Two weights at once, then one."""
    turned = jax.tree.map(lambda a: a[:, ::-1], stack)
    gate, up = linear(x, stack, turned)
    return linear(jnp.concatenate([gate, up], 1), stack)[0]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("count", "tile"), [(20, 8), (40, 16), (140, 64)])
def test_experts_reach_the_kernels_as_they_are(count, tile):
    stack = quant.quantize(jax.random.normal(jax.random.key(1), (2, 5, 128, 256)), "fp4_group")
    x = jax.random.normal(jax.random.key(2), (count, 256)).astype(jnp.bfloat16)
    ids = jax.random.randint(jax.random.key(3), (count,), 0, 6)
    assert nx.group_rows(ids, stack, _numerics("cuda")).tile == tile

    def run(x, rows):
        groups = nx.group_rows(ids, stack, _numerics(rows))
        y = nx.map_groups(_two_of_three, nx.spread(groups, x), stack, 1, groups, _numerics(rows))
        return nx.collect(groups, y).astype(jnp.float32)

    np.testing.assert_allclose(run(x, "cuda"), run(x, "batched"), rtol=1e-2, atol=1e-4)
    got, want = (jax.grad(lambda x, r: run(x, r).sum())(x, r) for r in ("cuda", "batched"))
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), rtol=2e-2, atol=2e-2
    )
