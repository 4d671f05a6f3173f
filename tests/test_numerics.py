"""Every function of `numerics`: against float64, differentiated, and bit for bit over rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.numerics import Form, Numerics, products, tiles
from deepinfer_jax.numerics import settings as module
from kernels_bridge import building

DTYPES = ("float32", "bfloat16")
# Rows of a call. Tiles of weights this small are 8 rows below 128 and 32 from there on; XLA changes
# its mind at 1, 33, 48, 63 and wherever rows x width passes 4096.
QUICK = (1, 7, 9, 33, 64, 129, 257)
FEW = (1, 9, 129)
EDGES = (63, 64, 65, 127, 128, 129, 255, 256, 257)
EVERY = (*range(1, 41), *EDGES)
MOST, WIDTH = 257, 96
EXPERTS = 5


def numerics_of(dtype: str, rows: Form = "tiled") -> Numerics:
    return Numerics.fp32(rows) if dtype == "float32" else Numerics.native(rows=rows)


def need_compiler() -> None:
    """Skip a test of C++ kernels where they cannot be built."""
    try:
        building.find_compiler()
    except building.NoKernelsError as error:
        pytest.skip(str(error))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


# -- rows do not see each other --------------------------------------------------------------------


@functools.cache
def shared(dtype: str) -> dict[str, np.ndarray]:
    """Weights and keys; their sizes differ from each other and from the rows' width."""
    return {
        "square": as_dtype(normal(1, WIDTH, WIDTH), dtype),
        "narrow": as_dtype(normal(2, 7, WIDTH), dtype),
        "single": as_dtype(normal(3, 1, WIDTH), dtype),
        "wide": as_dtype(normal(4, 520, WIDTH), dtype),
        "groups": as_dtype(normal(5, 60, WIDTH // 3), dtype),
        "experts": as_dtype(normal(6, EXPERTS, 24, WIDTH), dtype),
        "keys": as_dtype(normal(7, 19, WIDTH // 3), dtype),
        "gain": normal(8, WIDTH),
        "sink": normal(9, 3),
    }


def through_experts(x: Any, ids: Any, weight: Any, numerics: Numerics) -> jax.Array:
    """Rows through the weight [E, N, K] of the expert of each, which stands in layer 1 of two."""
    stack = jnp.stack([jnp.zeros_like(weight), weight])
    groups = nx.group_rows(ids, stack, numerics)
    padded = nx.spread(groups, x)
    return nx.collect(groups, nx.grouped_linear(padded, stack, 1, groups, numerics))


@functools.partial(jax.jit, static_argnames="numerics")
def everything(rows: dict[str, Any], w: dict[str, Any], numerics: Numerics) -> dict[str, Any]:
    """Each row function of the module on the same rows; results have the row number in front."""
    x, wide, ids = rows["x"], rows["x"].astype(jnp.float32), rows["ids"]

    def attend(row, w):
        q, mask = row
        return nx.attend(q.reshape(3, -1), w["keys"], mask, w["sink"], 0.3, numerics)

    def score(q, w):
        return nx.index_scores(q.reshape(3, -1), w["sink"], w["keys"], numerics)

    return {
        **{n: nx.dot(x, w[n], numerics) for n in ("square", "narrow", "single", "wide")},
        "group_dot": nx.group_dot(x.reshape(-1, 3, WIDTH // 3), w["groups"], numerics),
        "row_sum": nx.row_sum(wide, numerics),
        "quotient": nx.quotient(wide, nx.row_sum(wide * wide, numerics)[:, None]) + np.float32(0.1),
        "axis_sum": nx.axis_sum(wide.reshape(-1, 4, WIDTH // 4), 1, numerics),
        "mean_square": nx.mean_square(x, numerics),
        "rms_norm": nx.rms_norm(x, w["gain"], 1e-20, numerics),
        "log_softmax": nx.log_softmax(wide),
        "attend": nx.map_rows(attend, (x, rows["mask"]), w, numerics),
        "index_scores": nx.map_rows(score, x, w, numerics),
        "experts": through_experts(x, ids, w["experts"], numerics),
        "top_k": nx.top_k(wide, 5)[1],
    }


@functools.cache
def all_rows(dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": as_dtype(normal(10, MOST, WIDTH), dtype),
        "mask": rng.random((MOST, 19)) < 0.7,
        # Skewed: most rows want expert 0, some are padding for no expert, one expert has no rows.
        "ids": rng.choice([0, 0, 0, 0, 1, 3, 4, 2**31 - 1], MOST).astype(np.int32),
    }


@functools.cache
def expected(dtype: str, form: Form = "tiled") -> dict[str, np.ndarray]:
    """All rows at once: on long tiles."""
    out = everything(all_rows(dtype), shared(dtype), numerics_of(dtype, form))
    return {name: np.asarray(value) for name, value in out.items()}


def check_rows(dtype: str, count: int, form: Form = "tiled") -> None:
    """`count` rows taken from anywhere, in any order, give the bits they have among all."""
    pick = np.random.default_rng(count).permutation(MOST)[:count]
    rows = {name: value[pick] for name, value in all_rows(dtype).items()}
    got = everything(rows, shared(dtype), numerics_of(dtype, form))
    real = rows["ids"] < EXPERTS
    for name, want in expected(dtype, form).items():
        keep = real if name == "experts" else slice(None)
        left, right = np.asarray(got[name])[keep], want[pick][keep]
        np.testing.assert_array_equal(bits(left), bits(right), err_msg=f"{name}, {count} rows")


def sizes(dtype: str):
    """All numbers of rows; the default run takes those of `QUICK`, in float32 those of `FEW`."""
    default = QUICK if dtype == "bfloat16" else FEW
    for count in EVERY:
        yield pytest.param(dtype, count, marks=[] if count in default else pytest.mark.exhaustive)


@pytest.mark.parametrize(("dtype", "count"), [case for dtype in DTYPES for case in sizes(dtype)])
def test_rows_do_not_depend_on_their_number(dtype, count):
    check_rows(dtype, count)


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        ("bfloat16", 9),
        *(pytest.param(dtype, n, marks=pytest.mark.exhaustive) for dtype in DTYPES for n in QUICK),
    ],
)
def test_rows_do_not_depend_on_their_number_in_kernels(dtype, count):
    need_compiler()
    check_rows(dtype, count, "ffi")


def test_a_plain_product_would_be_caught(monkeypatch):
    """One row alone takes another path through the compiler: the reason for tiles."""
    w, numerics = normal(1, 512, 512), Numerics.fp32()
    x = normal(2, 9, 512)

    def differing() -> int:
        f = jax.jit(lambda x, w: nx.dot(x, w, numerics))
        return int((bits(f(x, w))[:1] != bits(f(x[:1], w))).sum())

    assert differing() == 0
    monkeypatch.setattr(products, "_in_tiles", lambda f, x, w, numerics: f(x))
    assert differing() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(24, 20480 // 8), (96, 512), (7, 192), (1, 336), (640, 64)])
def test_short_and_long_tiles_agree(dtype, n, k):
    """The two heights in use give one row the same bits (model sizes and narrow outputs).

    Not so any height of any product: of short sums the compiler makes another loop from some number
    of rows on.
    """
    x, w = as_dtype(normal(1, 64, k), dtype), as_dtype(normal(2, n, k), dtype)
    short, long = (
        dataclasses.replace(numerics_of(dtype), row_tile=tile, long_row_tile=tile)
        for tile in (8, 32)
    )
    dot = jax.jit(nx.dot, static_argnums=2)
    np.testing.assert_array_equal(bits(dot(x, w, short)), bits(dot(x, w, long)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(4096, 64), (512, 512), (205, 1280), (13, 20480)])
def test_tiles_of_any_height_agree_for_large_weights(dtype, n, k):
    """At every number of rows whatever height is chosen gives the bits of the lowest."""
    x, w = as_dtype(normal(1, 300, k), dtype), as_dtype(normal(2, n, k), dtype)
    numerics = numerics_of(dtype)
    low = dataclasses.replace(numerics, tall_tiles=(8,))
    dot = jax.jit(nx.dot, static_argnums=2)
    want, heights = bits(dot(x, w, low)), set()
    for count in (1, 9, 17, 33, 60, 65, 100, 200, 300):
        heights.add(tiles.of_product(count, k, n * k, numerics))
        np.testing.assert_array_equal(bits(dot(x[:count], w, numerics)), want[:count])
    assert heights == set(numerics.tall_tiles)


def test_an_odd_sum_is_not_multiplied_in_tall_tiles():
    """256 rows in one tile gave other bits in column 4032 than eight rows."""
    x, w = normal(1, 256, 65), normal(2, 4033, 65)
    numerics = Numerics.fp32()
    dot = jax.jit(nx.dot, static_argnums=2)
    np.testing.assert_array_equal(bits(dot(x, w, numerics))[:8], bits(dot(x[:8], w, numerics)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "n", "k"), [(8, 512, 64), (128, 7, 320)])
def test_tiles_of_any_height_agree_for_many_groups(dtype, groups, n, k):
    """Large is what the groups are together: the product of each may be a small one."""
    x, w = as_dtype(normal(1, 300, groups, k), dtype), as_dtype(normal(2, groups * n, k), dtype)
    assert n * k < numerics_of(dtype).tall_from <= groups * n * k
    product = jax.jit(nx.group_dot, static_argnums=2)
    made = [
        bits(product(x, w, dataclasses.replace(numerics_of(dtype), tall_tiles=(height,))))
        for height in numerics_of(dtype).tall_tiles
    ]
    for other in made[1:]:
        np.testing.assert_array_equal(other, made[0])


# -- values ----------------------------------------------------------------------------------------


def test_values_against_float64():
    """Float32 results within a few units of the last place of a float64 evaluation."""
    rows, w = all_rows("float32"), shared("float32")
    x = rows["x"].astype(np.float64)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    square = np.mean(x * x, axis=-1)
    heads = x.reshape(MOST, 3, -1)
    dots = np.einsum("thk,sk->ths", heads, w["keys"].astype(np.float64))
    masked = np.where(rows["mask"][:, None], dots * 0.3, -np.inf)
    top = masked.max(axis=-1, keepdims=True)
    p = np.exp(masked - top)
    z = p.sum(axis=-1) + np.exp(w["sink"].astype(np.float64) - top[..., 0])
    experts = w["experts"][np.minimum(rows["ids"], EXPERTS - 1)].astype(np.float64)
    want = {
        **{n: x @ w[n].T.astype(np.float64) for n in ("square", "narrow", "single", "wide")},
        "group_dot": np.einsum(
            "tgk,gnk->tgn", heads, w["groups"].reshape(3, 20, -1).astype(np.float64)
        ),
        "row_sum": x.sum(axis=-1),
        "quotient": x / (x * x).sum(axis=-1, keepdims=True) + np.float64(np.float32(0.1)),
        "axis_sum": x.reshape(MOST, 4, -1).sum(axis=1),
        "mean_square": square,
        "rms_norm": w["gain"] * x / np.sqrt(square + 1e-20)[:, None],
        "log_softmax": x - x.max(-1, keepdims=True) - np.log(e.sum(-1, keepdims=True)),
        "attend": np.einsum("ths,sk->thk", p, w["keys"].astype(np.float64)) / z[..., None],
        "index_scores": np.einsum("ths,h->ts", np.maximum(dots, 0), w["sink"].astype(np.float64)),
        "experts": np.einsum("tk,tnk->tn", x, experts),
    }
    got = expected("float32")
    real = rows["ids"] < EXPERTS
    for name, value in want.items():
        keep = real if name == "experts" else slice(None)
        size = float(np.abs(value[keep]).max())
        np.testing.assert_allclose(got[name][keep], value[keep], atol=3e-6 * size, err_msg=name)


def test_attention_without_keys_is_zero():
    q, keys = normal(1, 3, 8), np.full((5, 8), 0, np.float32)
    out = nx.attend(q, keys, np.zeros(5, bool), normal(2, 3), 0.5, Numerics.fp32())
    np.testing.assert_array_equal(out, np.zeros((3, 8)))


def test_logsumexp_of_infinities():
    x = np.array([[-np.inf, 1, -np.inf, 1], [-np.inf] * 4], np.float32)
    np.testing.assert_allclose(nx.logsumexp(x), [1 + np.log(2), -np.inf], rtol=1e-6)


@given(st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=8))
@settings(max_examples=40)
def test_rounding_is_to_nearest_even(values):
    x = np.array(values + [0.0] * (8 - len(values)), np.float32)
    x = np.where(np.abs(x) < 2.0**-100, np.float32(0), x)  # XLA flushes what is near the end
    np.testing.assert_array_equal(bits(_rounded(x)), bits(x.astype(ml_dtypes.bfloat16)))


@jax.jit
def _rounded(x: jax.Array) -> jax.Array:
    return nx.round_to(x, jnp.bfloat16)


def test_pin_is_the_identity():
    x = np.array([0.0, -0.0, 1.5, -np.inf, np.finfo(np.float32).max, -3e38], np.float32)
    np.testing.assert_array_equal(bits(nx.pin(x)), bits(x))
    assert np.isnan(nx.pin(np.float32(np.nan)))


def test_index_rounding_modes():
    """Once: one rounding of the sum. Reference: products of roundings. Float32: none."""
    q, keys, weight = normal(1, 4, 32), normal(2, 9, 32), normal(3, 4)
    q, keys, weight = (as_dtype(v, "bfloat16") for v in (q, keys, weight))
    dots = np.maximum(q.astype(np.float64) @ keys.T.astype(np.float64), 0)
    scale = weight.astype(np.float64)[:, None]
    rounded = _bf16(_bf16(dots) * scale)
    want = {"once": (dots * scale).sum(0), "reference": rounded.sum(0)}
    for mode, value in want.items():
        numerics = dataclasses.replace(Numerics.native(), index_rounding=mode)
        got = np.asarray(nx.index_scores(q, weight, keys, numerics))
        np.testing.assert_array_equal(got, _bf16(value))


def _bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_stored_and_plain_weights_give_the_same_bits():
    """A weight dequantized inside the dot is the float weight it stands for."""
    stored = quant.quantize(jnp.asarray(normal(1, 64, 96)), "fp8_block")
    for numerics in (Numerics.fp32(), Numerics.native()):
        f = jax.jit(functools.partial(nx.linear, numerics=numerics, quantized=True))
        x = jnp.asarray(normal(2, 5, 96)).astype(numerics.dtype)
        plain = quant.dequantize(stored, jnp.float32)
        np.testing.assert_array_equal(bits(f(x, stored)), bits(f(x, plain)))


# -- total order -----------------------------------------------------------------------------------


@given(
    values=st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0, -np.inf]), min_size=12, max_size=12)
)
@settings(max_examples=60)
def test_top_k_orders_by_value_then_index(values):
    x = np.array(values, np.float32)
    order = sorted(range(12), key=lambda i: (-x[i], i))  # -0 equals 0
    np.testing.assert_array_equal(_top_five(x[None])[1][0], order[:5])


@jax.jit
def _top_five(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return nx.top_k(x, 5)


# -- rows by expert --------------------------------------------------------------------------------


@given(
    ids=st.lists(st.sampled_from([0, 0, 0, 1, 2, 6, 2**31 - 1]), min_size=21, max_size=21),
)
@settings(max_examples=40)
def test_rows_reach_their_expert(ids):
    """Skewed, empty and absent experts: every row comes back in its place, none is dropped."""
    ids = np.array(ids, np.int32)
    x = normal(4, 21, 8)
    got = np.asarray(_tagged(x, ids))
    real = ids < 7
    np.testing.assert_array_equal(got[real, 0], ids[real])
    np.testing.assert_array_equal(bits(got[real, 1:]), bits(x[real]))


@jax.jit
def _tagged(x: jax.Array, ids: jax.Array) -> jax.Array:
    """The number of each row's expert, and the row as that expert would see it."""
    weight = jnp.zeros((1, 7, 1, 1))
    groups = nx.group_rows(ids, weight, Numerics.fp32())
    number = jnp.repeat(groups.expert, groups.tile).astype(jnp.float32)
    return nx.collect(groups, jnp.concatenate([number[:, None], nx.spread(groups, x)], axis=1))


# -- gradients -------------------------------------------------------------------------------------


def _plain(x, w, numerics):
    """The same mathematics in ordinary jnp."""
    heads = x.reshape(-1, 3, WIDTH // 3)
    s = jnp.einsum("thk,sk->ths", heads, w["keys"]) * 0.3
    p = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    z = jnp.sum(p, axis=-1) + jnp.exp(w["sink"][None] - jnp.max(s, axis=-1))
    o = jnp.einsum("ths,sk->thk", p, w["keys"]) / z[..., None]
    norm = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True)) * w["gain"][None]
    expert = jnp.einsum("tk,tnk->tn", x, w["experts"][jnp.arange(x.shape[0]) % EXPERTS])
    return {
        "dot": norm @ w["square"].T,
        "group_dot": jnp.einsum("tgk,gnk->tgn", heads, w["groups"].reshape(3, 20, -1)),
        "attend": o,
        "log_softmax": jax.nn.log_softmax(x, axis=-1),
        "experts": expert,
    }


def plain_sums(x, w, numerics):
    def attend(q, w):
        mask = jnp.ones(w["keys"].shape[0], bool)
        return nx.attend(q.reshape(3, -1), w["keys"], mask, w["sink"], 0.3, numerics)

    ids = jnp.arange(x.shape[0], dtype=jnp.int32) % EXPERTS
    return {
        "dot": nx.dot(nx.rms_norm(x, w["gain"], 1e-20, numerics), w["square"], numerics),
        "group_dot": nx.group_dot(x.reshape(-1, 3, WIDTH // 3), w["groups"], numerics),
        "attend": nx.map_rows(attend, x, w, numerics),
        "log_softmax": nx.log_softmax(x),
        "experts": through_experts(x, ids, w["experts"], numerics),
    }


@pytest.mark.parametrize(
    "rows", ["tiled", pytest.param("ffi", marks=pytest.mark.exhaustive), "batched"]
)
def test_gradients_are_those_of_plain_jnp(rows):
    if rows == "ffi":
        need_compiler()
    numerics = dataclasses.replace(Numerics.fp32(), rows=rows)
    x = normal(11, 13, WIDTH)
    names = ("square", "groups", "experts", "keys", "gain", "sink")
    w = {n: shared("float32")[n] for n in names}

    def loss(f):
        def total(x, w):
            out = f(x, w, numerics)
            return sum(jnp.sum(jnp.sin(v) * v) for v in out.values())

        return jax.jit(jax.grad(total, argnums=(0, 1)))

    got, want = loss(plain_sums)(x, w), loss(_plain)(x, w)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = float(jnp.abs(right).max())
        np.testing.assert_allclose(left, right, atol=2e-5 * size)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float16"), ("rows", "tilde"), ("index_rounding", "never"), ("row_tile", 1),
        ("long_row_tile", 0), ("index_block", 0), ("long_rows", True), ("row_tile", 8.0),
        ("tall_tiles", ()), ("tall_tiles", (1, 8)), ("tall_tiles", [8, 16]), ("tall_from", 0),
        ("long_sum", 0), ("sum_block", 0),
    ],
)  # fmt: skip
def test_settings_that_promise_nothing_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Numerics(**{field: value})


def test_the_fingerprint_names_every_setting(monkeypatch):
    start = Numerics.native()
    other = {
        "dtype": "float32", "index_rounding": "reference", "rows": "batched", "tall_tiles": (8,),
    }  # fmt: skip
    found = {start.fingerprint()}
    for field in dataclasses.fields(Numerics):
        value = getattr(start, field.name)
        change = other.get(field.name, not value if isinstance(value, bool) else None)
        change = value + 1 if change is None else change
        found.add(dataclasses.replace(start, **{field.name: change}).fingerprint())
    assert len(found) == 1 + len(dataclasses.fields(Numerics))
    assert Numerics.native().fingerprint() == start.fingerprint()
    monkeypatch.setattr(module, "FORM", module.FORM + 1)  # constants in code changed
    assert start.fingerprint() not in found
