"""What a GPU must do: give every row its own bits, agree with the recorded numbers, run the model.

Run on a machine with one: `pytest -m gpu -n 8 --dist=worksteal`. Everything here compiles kernels
for the device at hand; their values and gradients are tested in an interpreter too
(test_pallas.py).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax import checkpoint, determinism, params, planning, quant, rows, tables
from deepinfer_jax import numerics as nx
from deepinfer_jax.cache import init_cache
from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.determinism import reference
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.images import encode_images, encoding
from deepinfer_jax.model import forward, head
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.numerics.pallas import products, schedule
from deepinfer_jax.numerics.pallas.schedule import Schedule
from tests import every_role, sighted
from tests import test_numerics as primitives
from tests.golden import adapter_images
from tests.golden.reader import folders
from tests.images import towers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

DTYPES = ("bfloat16", "float32")
COUNTS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 255)
STORAGES = ("plain", "bf16_bits", "fp8_block", "fp8_group", "fp4_group")


def on_gpu(numerics: Numerics) -> Numerics:
    return dataclasses.replace(numerics, rows="pallas")


# -- primitives ------------------------------------------------------------------------------------


@functools.cache
def all_rows(dtype: str) -> dict[str, np.ndarray]:
    numerics = on_gpu(primitives.numerics_of(dtype))
    out = primitives.everything(primitives.all_rows(dtype), primitives.shared(dtype), numerics)
    return {name: np.asarray(value) for name, value in out.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_rows_do_not_depend_on_their_number(dtype, count):
    pick = np.random.default_rng(count).permutation(primitives.MOST)[:count]
    own = {name: value[pick] for name, value in primitives.all_rows(dtype).items()}
    numerics = on_gpu(primitives.numerics_of(dtype))
    got = primitives.everything(own, primitives.shared(dtype), numerics)
    real = own["ids"] < primitives.EXPERTS
    for name, want in all_rows(dtype).items():
        keep = real if name == "experts" else slice(None)
        left, right = np.asarray(got[name])[keep], want[pick][keep]
        np.testing.assert_array_equal(bits(left), bits(right), err_msg=f"{name}, {count} rows")


def weight_of(storage: str, *shape: int):
    weight = jnp.asarray(primitives.normal(1, *shape)).astype(jnp.bfloat16)
    if storage == "plain":
        return weight
    return (
        quant.decode_to_bits(weight) if storage == "bf16_bits" else quant.quantize(weight, storage)
    )


@functools.partial(jax.jit, static_argnames="how")
def product(x, weight, how=None):
    return products.product(x[:, None], weight, "float32", False, how)[:, 0]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("k", "n"), [(1280, 4608), (2560, 1280), (5120, 384), (4096, 24)])
def test_products_of_any_height_and_storage(storage, k, n):
    """Every schedule, the parts of a narrow weight, and stored against decoded weights."""
    weight = weight_of(storage, n, k)
    x = jnp.asarray(primitives.normal(2, 1100, k)).astype(jnp.bfloat16)
    decoded = weight if storage == "plain" else quant.dequantize(weight)
    want = bits(product(x, decoded))
    exact = np.asarray(x[:4], np.float64) @ np.asarray(decoded, np.float64).T
    got = np.asarray(product(x, weight))[:4]
    np.testing.assert_allclose(got, exact, atol=1e-5 * np.abs(exact).max())
    for m in (1, 8, 16, 17, 64, 65, 256, 500, 513, 1100):
        for at in (0, 1100 - m):
            np.testing.assert_array_equal(bits(product(x[at : at + m], weight)), want[at : at + m])


@pytest.mark.parametrize(("format", "values"), [("fp8_group", 256), ("fp4_group", 512)])
def test_every_code_is_decoded_exactly(format, values):
    """All codes with scales from 2^-126 to 2^110, by the instructions of the chip."""
    code = np.tile(np.arange(256, dtype=np.uint8), (64, 1))
    code = np.where(code & 127 == 127, 1, code) if format == "fp8_group" else code
    scale = np.linspace(1, 237, 64).astype(np.uint8)[:, None]
    scale = scale + np.zeros((1, values // 32), np.uint8)
    weight = quant.Quantized(jnp.asarray(code), jnp.asarray(scale), format)
    eye = jnp.eye(values, dtype=jnp.bfloat16)
    want = bits(product(eye, quant.dequantize(weight), schedule.plain(values, values, 64)))
    for how in (Schedule(16, 64, 64, 4, 3, True), Schedule(64, 64, 64, 4, 3, True)):
        np.testing.assert_array_equal(bits(product(eye, weight, how)), want)


def test_mixes_do_not_depend_on_the_number_of_rows():
    raw, scale, base = (jnp.asarray(primitives.normal(5, *s)) for s in ((300, 24), (3,), (24,)))

    @functools.partial(jax.jit, static_argnames="numerics")
    def run(raw, numerics):
        return nx.mixes(raw, scale, base, 4, 20, 1e-6, numerics)

    numerics = on_gpu(Numerics.fp32())
    every, plain = run(raw, numerics), run(raw, Numerics.fp32("batched"))
    for got, want in zip(every, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for m in (1, 31, 32, 33, 257):
        for got, want in zip(run(raw[-m:], numerics), every, strict=True):
            np.testing.assert_array_equal(bits(got), bits(want[-m:]))


@pytest.mark.parametrize("k", [2048, 20480])
def test_products_with_float32_weights(k):
    weight = jnp.asarray(primitives.normal(1, 24, k))
    x = jnp.asarray(primitives.normal(2, 1100, k)).astype(jnp.bfloat16)
    want = bits(product(x, weight))
    exact = np.asarray(x[:4], np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(product(x[:4], weight), exact, atol=2e-6 * np.abs(exact).max())
    for m in (1, 16, 64, 65, 512):
        np.testing.assert_array_equal(bits(product(x[-m:], weight)), want[-m:])


@pytest.mark.parametrize("storage", STORAGES)
def test_experts_of_any_load(storage):
    """Tiles of 16, 64 and 128 rows of an expert, chosen by the number of rows."""
    weight, numerics = weight_of(storage, 1, 6, 96, 512), on_gpu(Numerics.native(False))
    x = jnp.asarray(primitives.normal(2, 700, 512)).astype(jnp.bfloat16)
    ids = np.random.default_rng(3).choice([0, 0, 0, 1, 3, 5], 700).astype(np.int32)

    @jax.jit
    def run(x, ids, weight):
        groups = nx.group_rows(ids, weight, numerics)
        return nx.collect(
            groups, nx.grouped_linear(nx.spread(groups, x), weight, 0, groups, numerics)
        )

    want = bits(run(x, ids, weight))
    for m in (1, 5, 40, 150, 300, 699):
        np.testing.assert_array_equal(bits(run(x[-m:], ids[-m:], weight)), want[-m:])


@pytest.mark.parametrize(("width", "k"), [(384, 6), (4096, 512), (129280, 20), (129280, 1)])
def test_top_k_is_a_total_order(width, k):
    """Value, then lower index; -0 equals +0: many ties at the widths of the released model."""
    x = np.round(primitives.normal(1, 8, width) * 8) / 8
    got = jax.jit(nx.top_k, static_argnums=1)(jnp.asarray(x), k)[1]
    np.testing.assert_array_equal(got, np.argsort(-x, axis=1, kind="stable")[:, :k])


# -- the contract ----------------------------------------------------------------------------------


@functools.cache
def setup(dtype: str) -> reference.Setup:
    """Requests on the model with every role: each alone, one token at a time."""
    model = every_role.model(dtype, "pallas")
    return reference.make_setup(model, tokens=22, seed=1, count=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", determinism.CHECKS, ids=lambda check: check.name)
def test_nothing_changes_a_bit(check, dtype):
    finding = determinism.run_check(check, setup(dtype))
    assert finding.first is None
    assert finding.differing == 0


# -- images ----------------------------------------------------------------------------------------

# The released width, so that tiles and parts of K are those in use; two of its layers.
WIDE = dataclasses.replace(
    towers.CFG,
    hidden_size=640,
    vision=VisionConfig(2, 1024, 16, 2816, 14, 10000.0, 3, 1024, 544**2),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("cfg", "shapes"),
    [(towers.CFG, [(1, 1), (7, 5), (8, 8), (11, 7)]), (WIDE, [(39, 39), (35, 46), (1, 40)])],
    ids=["small", "released width"],
)
def test_pictures_do_not_see_each_other(cfg, shapes, dtype):
    """Alone, in a call with others, and in a call of a larger size."""
    numerics, weights = on_gpu(primitives.numerics_of(dtype)), towers.weights(0, cfg)
    if dtype == "float32":
        weights = params.widen(weights)
    given = [towers.picture(*shape, side=cfg.vision.patch_size) for shape in shapes]
    alone = [encode_images(weights, [each], cfg, numerics)[0].rows for each in given]
    together = encode_images(weights, given, cfg, numerics, batch=4)
    for each, want, features in zip(given, alone, together, strict=True):
        np.testing.assert_array_equal(bits(features.rows), bits(want))
        packed = encoding.pack([each], 2304, cfg.vision)
        larger = encoding.encode(weights["vision"], packed, cfg.vision, numerics)
        np.testing.assert_array_equal(bits(np.asarray(larger)[0, : len(want)]), bits(want))


def test_recorded_images(golden_root, tmp_path):
    folder = next(f for f in folders(golden_root) if f.name == "micro-vl")
    where = folder.unpacked_model(tmp_path)
    weights, cfg = params.widen(checkpoint.load_params(where)), ModelConfig.from_json(where)
    made = adapter_images.encoded(folder, weights, cfg, on_gpu(Numerics.fp32()))
    for name, got in made.items():
        np.testing.assert_allclose(got, folder.golden("fp32")[name], rtol=0, atol=2e-5)


def test_pictures_in_the_engine_are_those_of_a_request_alone():
    """In any company, shown as pictures or as features, with drafts and without."""
    model = sighted.model()
    model = dataclasses.replace(model, numerics=on_gpu(model.numerics))
    shown = [sighted.picture(*grid, seed) for seed, grid in enumerate([(6, 9), (8, 8), (2, 3)])]
    made = encode_images(model.params, shown[:1], model.cfg, model.numerics)
    given = [
        ([31, 42, sighted.TOKEN, 53], shown[:1]),
        ([31, 42, sighted.TOKEN, 53], list(made)),
        ([sighted.TOKEN, 64, 75, sighted.TOKEN], shown[1:]),
        ([31, 42, 53, 64, 75], []),
    ]
    prompts = [{"tokens": tokens, "images": images, "seed": 5} for tokens, images in given]
    ask = functools.partial(deepinfer_jax.generate, model, max_tokens=9)
    alone = [(reply.tokens, reply.logprobs) for each in prompts for reply in ask([each])]
    for policy in (planning.OFF, planning.Fixed(2)):
        together = ask(prompts, speculative=policy)
        assert [(reply.tokens, reply.logprobs) for reply in together] == alone
    assert alone[0] == alone[1] != alone[2]


# -- recorded numbers, and the shipped model -------------------------------------------------------


@pytest.mark.parametrize("form", ["pallas", "batched"])
def test_recorded_logits(form, golden_root, tmp_path):
    folder = next(f for f in folders(golden_root) if f.name == "micro-bf16")
    where = folder.unpacked_model(tmp_path)
    cfg = dataclasses.replace(ModelConfig.from_json(where), quantized=False)
    numerics = dataclasses.replace(Numerics.fp32(), rows=form)
    weights = params.widen(checkpoint.load_params(where))
    recorded, tokens = folder.golden("fp32"), folder.inputs["tokens"]
    count, length = tokens.shape[0], recorded["prefill.argmax"].shape[1]
    made = tables.make_tables(cfg, folder.inputs["engram_token_map"], tokens.shape[1])
    cache = init_cache(cfg, numerics, count, tokens.shape[1])

    @jax.jit
    def run(weights, made, batch, cache):
        hidden, _ = forward.forward(weights, made, batch, cache, cfg, numerics)
        return head.logits(weights, hidden.output, numerics), hidden.routed

    batch = rows.batch_rows(jnp.asarray(tokens[:, :length]), jnp.full((count,), length))
    logits, routed = run(weights, made, batch, cache)
    logits = np.asarray(logits).reshape(count, length, -1)[:, recorded["prefill.logits_pos"]]
    np.testing.assert_allclose(logits, recorded["prefill.logits"], rtol=0, atol=1e-4)
    routed = np.asarray(routed).reshape(cfg.num_hidden_layers, count, length, -1)
    np.testing.assert_array_equal(routed, recorded["prefill.router_i"])


def test_the_shipped_model_does_not_see_its_neighbours():
    model = deepinfer_jax.load("spark-tiny")
    prompts = [[0, *model.tokenizer.encode_user(text)] for text in ("Once upon a time", "7 + 5 =")]
    both = deepinfer_jax.generate(model, prompts, max_tokens=24, seed=3)
    again = deepinfer_jax.generate(model, prompts, max_tokens=24, seed=3)
    alone = deepinfer_jax.generate(model, prompts[:1], max_tokens=24, seed=3)
    assert [r.tokens for r in both] == [r.tokens for r in again]
    assert [r.logprobs for r in both] == [r.logprobs for r in again]
    assert both[0].tokens == alone[0].tokens
    assert both[0].logprobs == alone[0].logprobs


def test_scores_are_the_samplers_bits_with_the_best_tokens_beside():
    """`LLM` compares the two itself and raises where one bit differs."""
    llm = deepinfer_jax.LLM("spark-tiny")
    params = deepinfer_jax.SamplingParams(n=2, max_tokens=24, top_logprobs=5, temperature=0)
    (output,) = llm.generate(["Once upon a time"], params)
    for one in output.outputs:
        assert [next(iter(top.items())) for top in one.top_logprobs] == list(
            zip(one.token_ids, one.logprobs, strict=True)
        )
