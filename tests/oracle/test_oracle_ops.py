"""Single operations of the oracle against unit vectors: recorded ones and known ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import attention, engram, hyper, memory, moe, quant, rope, weights
from tests.oracle.basics import Params, norm
from tests.oracle.golden_runs import golden_folder
from tests.oracle.inventory import inventory

RELEASED = Path(__file__).parents[2] / "configs" / "deepseek-v4.1-flash" / "config.json"
ROUNDING = 1e-6  # float64 here against float32 there, on values of order one


@pytest.fixture(scope="module")
def ops() -> dict[str, np.ndarray]:
    file = "ops.safetensors"
    return weights.read_values(golden_folder("ops", file) / file)


@pytest.fixture(scope="module")
def raw_ops() -> weights.Tensors:
    file = "ops.safetensors"
    return weights.read_tensors(golden_folder("ops", file) / file)


@pytest.fixture(scope="module")
def released() -> dict:
    return json.loads(RELEASED.read_text())


def test_fp8_activations(ops):
    assert np.array_equal(quant.fp8(ops["act_quant.x"]), ops["act_quant.roundtrip"])
    assert np.array_equal(quant.fp8(ops["act_quant.x_f32"]), ops["act_quant.roundtrip_f32"])
    assert np.array_equal(quant.fp8_scale(ops["act_quant.x"]), ops["act_quant.scale"])


@pytest.mark.parametrize("suffix", ["", "_f32"])
def test_fp4_round_trips(ops, suffix):
    x = ops[f"fp4.x{suffix}"]
    assert np.array_equal(quant.index_fp4(x), ops[f"fp4.e8m0_32{suffix}"])
    assert np.array_equal(quant.main_fp4(x), ops[f"fp4.e4m3_16{suffix}"])


def test_fp4_scales(ops):
    x = ops["fp4.x_f32"]
    assert np.array_equal(quant.index_fp4_scale(x), ops["fp4.scale_f32_e8m0"])
    assert np.array_equal(quant.main_fp4_scale(x), ops["fp4.scale_f32_e4m3"])


def test_quantizers_on_a_known_vector():
    x = np.float32(3.3) * np.sin(0.37 * np.arange(32, dtype=np.float32))
    x = ((x.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    assert list(quant.fp8(x)[:8]) == [0, 1.25, 2.25, 3, 3.25, 3.25, 2.5, 1.75]
    assert list(quant.index_fp4(x)[:8]) == [0, 1, 2, 3, 3, 3, 3, 1.5]
    expected = [0, 1.125, 2.25, 3.375, 3.375, 3.375, 2.25, 1.6875]
    assert list(quant.main_fp4(x)[:8]) == expected


def test_linears_over_stored_weights(ops, raw_ops):
    stored = {f"{name}.weight": raw_ops[f"gemm.w_{name}"] for name in ("fp8", "fp4")}
    stored |= {f"{name}.scale": raw_ops[f"gemm.w_{name}_scale"] for name in ("fp8", "fp4")}
    values = weights.dequantize(stored)
    assert np.array_equal(values["fp4.weight"], ops["gemm.w_fp4_dequant"])
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    params = Params(wide, quantize_inputs=True)
    for name in ("fp8", "fp4"):
        for x, expected in zip(ops["gemm.a"], ops[f"gemm.{name}_out_f32"], strict=True):
            np.testing.assert_allclose(
                params.quantized_linear(name, x), expected, rtol=1e-5, atol=1e-5
            )


def test_norm(ops):
    y = norm(ops["rms.x"].astype(np.float64), ops["rms.w"], 1e-20)
    np.testing.assert_allclose(y, ops["rms.y_f32"], rtol=ROUNDING, atol=0)


def test_released_frequencies_and_rotation(ops, released):
    text = released["text_config"]
    base = rope.base_frequencies(text)
    assert np.array_equal(base, ops["rope.window.inv_freq"])
    assert np.array_equal(rope.yarn_frequencies(text), ops["rope.compress.inv_freq"])
    for i, position in enumerate(ops["rope.pos"]):
        for name, sign in (("y", 1), ("y_inverse", -1)):
            turned = rope.rotate(ops["rope.x"][0, i], position, base, sign)
            np.testing.assert_allclose(turned, ops[f"rope.{name}"][0, i], rtol=0, atol=ROUNDING)


def test_the_formula_gives_the_released_frequencies(released):
    text = dict(released["text_config"])
    exact = rope.base_frequencies(text), rope.yarn_frequencies(text)
    nudged = text | {"rope_theta": np.nextafter(1e4, 2e4), "compress_rope_theta": 160000.00001}
    formula = rope.base_frequencies(nudged), rope.yarn_frequencies(nudged)
    for bits, powers in zip(exact, formula, strict=True):
        np.testing.assert_allclose(powers, bits, rtol=3e-7, atol=0)


def test_hyper_connection(ops):
    for batch in np.ndindex(ops["hc.mixes"].shape[:2]):
        mix = hyper.split(ops["hc.mixes"][batch], ops["hc.base"], ops["hc.scale"], 20, 1e-6)
        for name in ("pre", "post", "comb"):
            np.testing.assert_allclose(
                getattr(mix, name), ops[f"hc.{name}"][batch], rtol=0, atol=ROUNDING
            )
        streams = ops["hc.residual"][batch].astype(np.float64)
        spread = hyper.expand(mix, ops["hc.x"][batch], streams)
        np.testing.assert_allclose(spread, ops["hc.post_applied"][batch], rtol=0, atol=ROUNDING)
        collapsed = mix.pre @ streams
        np.testing.assert_allclose(collapsed, ops["hc.pre_applied"][batch], rtol=0, atol=ROUNDING)


def test_router(ops):
    text = {"routed_scaling_factor": 1.5}
    for row, logits in enumerate(ops["router.logits"]):
        scores = moe.scores_of(logits.astype(np.float64))
        chosen = moe.route(scores, ops["router.bias"], 4, text)
        assert np.array_equal(chosen.experts, ops["router.idx"][row])
        np.testing.assert_allclose(
            chosen.weights, ops["router.weights"][row], rtol=0, atol=ROUNDING
        )


def test_sparse_attention(ops):
    for b, t in np.ndindex(ops["attn.idx"].shape[:2]):
        rows = [ops["attn.kv"][b, i].astype(np.float64) for i in ops["attn.idx"][b, t] if i >= 0]
        out = attention.attend(ops["attn.q"][b, t], rows, ops["attn.sink"])
        np.testing.assert_allclose(out, ops["attn.out_f32"][b, t], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("ratio", [2, 4])
def test_compressor(ops, ratio):
    name = f"compressor.r{ratio}"
    tensors = {
        f"compressor.{key}.weight": ops[f"{name}.{key}"].astype(np.float64)
        for key in ("wkv", "wgate")
    }
    tensors["compressor.norm.weight"] = np.ones(len(ops[f"{name}.wkv"]))
    text = {"rms_norm_eps": 1e-20}
    compressor = memory.Compressor(Params(tensors), text, np.zeros(0), ratio, False)
    pending: memory.Pending = []
    rows = [compressor.latent(x, pending) for x in ops[f"{name}.x"][0]]
    assert len(pending) == len(rows) % ratio
    for part, state in enumerate(("state_kv", "state_score")):
        kept = ops[f"{name}.{state}"][0, : len(pending)]
        np.testing.assert_allclose([t[part] for t in pending], kept, rtol=0, atol=ROUNDING)
    rows = [row for row in rows if row is not None]
    np.testing.assert_allclose(rows, ops[f"{name}.latents"][0], rtol=0, atol=ROUNDING)
    more = [compressor.latent(x, pending) for x in ops[f"{name}.next_x"][0]]
    more = [row for row in more if row is not None]
    np.testing.assert_allclose(more, ops[f"{name}.next_latents"][0], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(("blocks", "size"), [(2, 4), (3, 2), (50, 4)])
def test_candidate_blocks(ops, blocks, size):
    for scores, length, expected in zip(
        ops["cand.logits"][0],
        ops["cand.lens"][0, :, 0],
        ops[f"cand.mask.t{blocks}_b{size}"][0],
        strict=True,
    ):
        marks, _ = memory.candidate_blocks(scores[:length].astype(np.float64), blocks, size)
        allowed = np.zeros(len(scores), bool)
        allowed[:length] = np.repeat(marks, size)[:length]
        reachable = np.arange(len(scores)) < length
        assert np.array_equal(allowed, expected.astype(bool) & reachable)


def test_released_engram_rows(ops, released):
    constants = engram.hashes(released["text_config"])
    primes = [hashed.primes for hashed in constants.values()]
    assert np.array_equal(primes, ops["engram.released.primes"])
    multipliers = [hashed.multipliers for hashed in constants.values()]
    assert np.array_equal(multipliers, ops["engram.released.multipliers"])
    for ids, dead, expected in zip(
        ops["engram.released.ids"],
        ops["engram.released.dead"],
        ops["engram.released.hash"],
        strict=True,
    ):
        ids, dead = [int(i) for i in ids], [bool(d) for d in dead]
        for position, rows in enumerate(expected):
            got = [hashed.rows(ids, dead, position, 2) for hashed in constants.values()]
            assert np.array_equal(got, rows)


def test_engram_write(ops, raw_ops):
    table = {
        "engram.embed.weight": raw_ops["engram.op.table"],
        "engram.embed.scale": raw_ops["engram.op.table_scale"],
    }
    tensors = {"embed.weight": weights.dequantize(table)["engram.embed.weight"]}
    tensors |= {key: ops[f"engram.op.{key}"] for key in ("q_weight", "k_weight")}
    tensors["wkv.weight"] = ops["engram.op.wkv"]
    params = Params({name: value.astype(np.float64) for name, value in tensors.items()})
    for t, rows in enumerate(ops["engram.op.hash"][0]):
        dead = not ops["engram.op.mask"][0, t]  # recorded as "may be written"
        streams = ops["engram.op.x"][0, t].astype(np.float64)
        out = engram.write(params, streams, list(rows), dead, 1e-20)
        np.testing.assert_allclose(out, ops["engram.op.out"][0, t], rtol=0, atol=ROUNDING)


def test_the_inventory_counts_the_released_checkpoint(released):
    tensors = total = 0
    for _, storage, shape in inventory(released):
        rows, columns = shape if len(shape) == 2 else (1, *shape)
        scales = {"F8": -(-rows // 32) * -(-columns // 32)}.get(storage, rows * columns // 32)
        bits = {"F8": 8, "TABLE": 8, "F4": 4, "BF": 16, "F32": 32}[storage]
        scaled = storage in ("F8", "F4", "TABLE")
        tensors += 1 + scaled
        total += rows * columns * bits // 8 + scales * scaled
    assert (tensors, total) == (96_085, 510_286_023_000)
