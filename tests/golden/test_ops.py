"""Unit vectors of single operations, through the package's own functions.

Bit for bit where nothing but the roundings of the model decides the result; within 5e-7 where a
library exponential or an order of summation does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import cache, config, numerics, quant, resources, tables
from deepinfer_jax.model import attention, compress, draft, engram, hyper, index, moe, rope
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.quant import Quantized
from deepinfer_jax.rows import Rows, spans_of, text_rows
from tests.golden import reader
from tests.golden.reader import Arrays

NEAR = 5e-7
FP32, NATIVE = Numerics.fp32(), Numerics.native()


@pytest.fixture(scope="module")
def ops(golden_root: Path) -> Arrays:
    path = reader.find(golden_root / "ops", "ops.safetensors")
    if path is None:
        reader.missing(golden_root, "ops/ops.safetensors")
    return reader.read(path)


@pytest.fixture(scope="module")
def released() -> config.ModelConfig:
    return config.ModelConfig.from_json(resources.config_file("deepseek-v4.1-flash"))


def bits(x) -> np.ndarray:
    """Any array as unsigned integers, so that -0 differs from 0 and a NaN equals itself."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def same_bits(got, want: np.ndarray) -> None:
    got = np.asarray(got)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(bits(got), bits(want))


def near(got, want: np.ndarray, bound: float = NEAR) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=bound, atol=bound)


def run(f: Callable, *args: Any) -> Any:
    """f(*args) as one program; op by op it would be many, each compiled on its own."""
    return jax.jit(f)(*args)


def codes(x: np.ndarray) -> jax.Array:
    """Storage bytes as the package keeps them."""
    return jnp.asarray(bits(x))


# -- quantizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "_f32"])
def test_fp8_round_trip(ops: Arrays, suffix: str) -> None:
    x = jnp.asarray(ops[f"act_quant.x{suffix}"])
    same_bits(run(quant.qdq_fp8, x), ops[f"act_quant.roundtrip{suffix}"])


def test_fp8_codes_and_scales(ops: Arrays) -> None:
    packed = np.asarray(run(quant.pack_window, jnp.asarray(ops["act_quant.x"])))
    width = ops["act_quant.x"].shape[-1]
    same_bits(packed[:, :width], bits(ops["act_quant.q"]))
    same_bits(packed[:, width:], bits(ops["act_quant.scale"]))
    back = run(lambda row: quant.unpack_window(row, width, jnp.bfloat16), jnp.asarray(packed))
    same_bits(back, ops["act_quant.roundtrip"])


@pytest.mark.parametrize("suffix", ["", "_f32"])
def test_fp4_round_trips(ops: Arrays, suffix: str) -> None:
    x = jnp.asarray(ops[f"fp4.x{suffix}"])
    same_bits(run(quant.qdq_index, x), ops[f"fp4.e8m0_32{suffix}"])
    same_bits(run(quant.qdq_main, x), ops[f"fp4.e4m3_16{suffix}"])


def test_fp4_codes_and_scales(ops: Arrays) -> None:
    x = jnp.asarray(ops["fp4.x_f32"])
    half = x.shape[-1] // 2
    packed = np.asarray(run(quant.pack_index, x))
    same_bits(packed[:, :half], ops["fp4.codes_f32_e8m0_packed"])
    same_bits(packed[:, half:], bits(ops["fp4.scale_f32_e8m0"]))
    same_bits(run(quant.pack_main, x)[:, half:], bits(ops["fp4.scale_f32_e4m3"]))


# -- linears ---------------------------------------------------------------------------------------


def _weight(ops: Arrays, name: str) -> Quantized:
    form = "fp8_block" if name == "fp8" else "fp4_group"
    return Quantized(codes(ops[f"gemm.w_{name}"]), codes(ops[f"gemm.w_{name}_scale"]), form)


def test_fp4_weight_decode(ops: Arrays) -> None:
    decoded = run(lambda w: quant.dequantize(w, jnp.float32), _weight(ops, "fp4"))
    same_bits(decoded, ops["gemm.w_fp4_dequant"])


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_quantized_linear(ops: Arrays, name: str) -> None:
    a, weight = jnp.asarray(ops["gemm.a"]), _weight(ops, name)

    def both(a, weight):
        rounded = numerics.linear(a, weight, NATIVE, quantized=True)
        return rounded, numerics.linear_f32(a, weight, NATIVE, quantized=True)

    rounded, exact = run(both, a, weight)
    same_bits(rounded, ops[f"gemm.{name}_out"])
    near(exact, ops[f"gemm.{name}_out_f32"], 2e-6)


# -- norm, rotation --------------------------------------------------------------------------------


def test_rms_norm(ops: Arrays) -> None:
    x, w = jnp.asarray(ops["rms.x"]), jnp.asarray(ops["rms.w"])
    near(run(lambda x, w: numerics.rms_norm(x, w, 1e-20, FP32), x, w), ops["rms.y_f32"])
    narrow = x.astype(jnp.bfloat16)
    rounded = run(lambda x, w: numerics.rms_norm(x, w, 1e-20, NATIVE), narrow, w)
    same_bits(rounded, ops["rms.y_bf16"])


def _frequencies(name: str, released: config.ModelConfig) -> np.ndarray:
    make = tables.base_frequencies if name == "window" else tables.yarn_frequencies
    return make(released)


@pytest.mark.parametrize("name", ["window", "compress"])
def test_rotation_tables(ops: Arrays, released: config.ModelConfig, name: str) -> None:
    frequency = _frequencies(name, released)
    same_bits(frequency, ops[f"rope.{name}.inv_freq"])
    at = ops["rope.pos"]
    low = at < 5000
    small = tables.rotation(frequency, 5000)
    near(np.asarray(small.cos)[at[low]], ops[f"rope.{name}.cos"][low])
    near(np.asarray(small.sin)[at[low]], ops[f"rope.{name}.sin"][low])
    columns = [0, 1, 16, 31]  # a table of all columns up to 2^20 would take a gigabyte to build
    far = tables.rotation(frequency[columns], 1 << 20)
    near(np.asarray(far.cos)[at], ops[f"rope.{name}.cos"][:, columns])
    near(np.asarray(far.sin)[at], ops[f"rope.{name}.sin"][:, columns])


def test_rotation_of_vectors(ops: Arrays) -> None:
    cos, sin = (jnp.asarray(ops[f"rope.window.{part}"]) for part in ("cos", "sin"))
    angle = tables.Rotation(cos, sin)
    x = jnp.asarray(ops["rope.x"][0])  # [position, head, feature]
    near(run(rope.rotate, x, angle), ops["rope.y"][0])
    inverse = run(lambda x, angle: rope.rotate(x, angle, inverse=True), x, angle)
    near(inverse, ops["rope.y_inverse"][0])


# -- hyper-connections, router ---------------------------------------------------------------------


def test_hyper_connection(ops: Arrays, released: config.ModelConfig) -> None:
    p = {"base": jnp.asarray(ops["hc.base"]), "scale": jnp.asarray(ops["hc.scale"])}

    def rows(name: str) -> jax.Array:
        value = ops[name]
        return jnp.asarray(value.reshape(-1, *value.shape[2:]))

    mixed = run(lambda m, p: hyper.split(m, p, released, FP32), rows("hc.mixes"), p)
    near(mixed.pre, np.asarray(rows("hc.pre")))
    near(mixed.comb, np.asarray(rows("hc.comb")))
    same_bits(mixed.post, np.asarray(rows("hc.post")))
    recorded = hyper.Mix(rows("hc.pre"), rows("hc.post"), rows("hc.comb"))
    streams = rows("hc.residual")
    collapsed = run(lambda *a: hyper.collapse(*a, FP32), recorded.pre, streams)
    near(collapsed, np.asarray(rows("hc.pre_applied")))
    expanded = run(lambda *a: hyper.expand(*a, FP32), rows("hc.x"), recorded, streams)
    near(expanded, np.asarray(rows("hc.post_applied")))


def test_router(ops: Arrays, released: config.ModelConfig) -> None:
    logits = jnp.asarray(ops["router.logits"])
    identity = {"weight": jnp.eye(logits.shape[1], dtype=jnp.float32)}
    bias = jnp.asarray(ops["router.bias"])[None, :]

    def route(gate, logits, bias):
        scores = moe.router_scores(gate, logits, released, FP32)
        return scores, moe.choose_experts(scores, bias, 4, released)

    scores, chosen = run(route, identity, logits, bias)
    near(scores, ops["router.scores"])
    same_bits(chosen.experts, ops["router.idx"])
    near(chosen.weights, ops["router.weights"])


# -- attention -------------------------------------------------------------------------------------


def _attend(ops: Arrays, dtype) -> np.ndarray:
    index, sink = ops["attn.idx"], jnp.asarray(ops["attn.sink"])
    q, kv = (jnp.asarray(ops[f"attn.{part}"]).astype(dtype) for part in ("q", "kv"))
    attend = jax.jit(lambda *args: numerics.attend(*args, 1 / 8, FP32))
    out = np.zeros(q.shape, np.float32)
    for b, t in np.ndindex(index.shape[:2]):
        at = index[b, t]
        out[b, t] = attend(q[b, t], kv[b, jnp.asarray(np.maximum(at, 0))], at >= 0, sink)
    return out


def test_attention_over_gathered_rows(ops: Arrays) -> None:
    near(_attend(ops, jnp.float32), ops["attn.out_f32"])


def test_attention_in_bfloat16(ops: Arrays) -> None:
    """The reference rounds a probability relative to the maximum of the blocks of 64 slots so far,
    we relative to that of all slots. With its blocks every bit was seen to agree, with one 85 %.
    """
    got = np.asarray(jnp.asarray(_attend(ops, jnp.bfloat16)).astype(jnp.bfloat16))
    want = ops["attn.out"]
    assert (bits(got) == bits(want)).mean() > 0.8
    near(got, want.astype(np.float32), 2**-7)


def _rows(positions: np.ndarray) -> Rows:
    return text_rows(np.zeros_like(positions), np.zeros_like(positions), positions)


POSITIONS = 10  # more than any case below reaches


@functools.partial(jax.jit, static_argnames="window")
def _attended(names: jax.Array, ring: jax.Array, rows: Rows, window: int) -> jax.Array:
    codec = cache.Codec(POSITIONS, False, POSITIONS, lambda x: x, lambda x, *_: x)
    reach = attention.Reach(window, 0, codec, codec, 1.0)
    count = rows.positions.shape[0]
    floor, nothing = jnp.zeros((count,), jnp.int32), jnp.zeros((count, 0), jnp.int32)
    q, sink = jnp.zeros((count, 1, POSITIONS), jnp.float32), jnp.zeros((1,), jnp.float32)
    return attention.attend(
        q, names[rows.positions], attention.Ring(ring, 0), None, nothing, floor, sink, rows,
        spans_of(rows, 1), reach, FP32,
    )  # fmt: skip


def _read_positions(window: int, positions: np.ndarray) -> np.ndarray:
    """Which positions each row attends to [rows, positions]; every vector names its position."""
    names, size = jnp.eye(POSITIONS, dtype=jnp.float32), window + 2
    ring = np.zeros((1, 1, size, POSITIONS), np.float32)
    earlier = np.arange(max(0, int(positions[0]) - window), int(positions[0]))
    ring[0, 0, earlier % size] = np.asarray(names)[earlier]
    return np.asarray(_attended(names, jnp.asarray(ring), _rows(positions), window))[:, 0] > 0


WINDOW_CASES = [(4, 3, 0), (4, 7, 0), (4, 1, 1), (4, 1, 2), (4, 1, 3), (4, 1, 4), (4, 1, 9)]


@pytest.mark.parametrize(("window", "count", "start"), WINDOW_CASES)
def test_window_entries(ops: Arrays, window: int, count: int, start: int) -> None:
    recorded = ops[f"window_idx.w{window}_s{count}_p{start}"]
    positions = np.arange(start, start + count, dtype=np.int32)
    for read, want in zip(_read_positions(window, positions), recorded, strict=True):
        seen = np.flatnonzero(read)
        if start:  # recorded as slots of the reference's ring
            seen = np.sort(seen % window)
        np.testing.assert_array_equal(seen, np.sort(want[want >= 0]))


DRAFT_CASES = [(4, 3, 1), (4, 3, 2), (4, 3, 3), (4, 3, 4), (4, 3, 9)]


@pytest.mark.parametrize(("window", "size", "last"), DRAFT_CASES)
def test_draft_entries(
    ops: Arrays, released: config.ModelConfig, window: int, size: int, last: int
) -> None:
    """Context up to position `last`, then the whole draft block, for every row of the block."""
    width = 32  # one feature per vector: positions first, then the rows of the block
    cfg = dataclasses.replace(
        released,
        sliding_window=window,
        head_dim=width,
        index_head_dim=width,
        qk_rope_head_dim=width,
    )
    codec = cache.Codec(width, False, width, lambda x: x, lambda x, *_: x)
    names, ring = np.eye(width, dtype=np.float32), np.zeros((1, 1, window + 5, width), np.float32)
    context = np.arange(max(0, last - window), last + 1)
    ring[0, 0, context % ring.shape[2]] = names[context]
    new = jnp.asarray(names[last + 1 : last + 1 + size])

    def attend(ring, new, number):
        row = (jnp.zeros((1, width)), number, jnp.int32(0), jnp.int32(last + 1), jnp.bool_(True))
        shared = (new, ring, jnp.int32(0), jnp.zeros((1,)))
        return draft._attend_row(row, shared, size, codec, cfg, FP32)[0]

    over_rows = jax.vmap(attend, in_axes=(None, None, 0))
    out = run(over_rows, jnp.asarray(ring), new, jnp.arange(size, dtype=jnp.int32))
    for row, want in zip(
        np.asarray(out), ops[f"dspark_idx.w{window}_b{size}_p{last}"], strict=True
    ):
        seen = np.flatnonzero(row > 0)
        place = np.where(seen <= last, seen % window, seen - last - 1 + window)
        np.testing.assert_array_equal(np.sort(place), np.sort(want[want >= 0]))


# -- compressor, candidate blocks ------------------------------------------------------------------


def _compressor(ops: Arrays, ratio: int) -> dict[str, jax.Array]:
    names = {"wkv": "wkv", "wgate": "wgate"}
    p = {k: jnp.asarray(ops[f"compressor.r{ratio}.{v}"]) for k, v in names.items()}
    return {**p, "norm": jnp.ones((p["wkv"].shape[0],), jnp.float32)}


@pytest.mark.parametrize("ratio", [2, 4])
def test_compressor(ops: Arrays, released: config.ModelConfig, ratio: int) -> None:
    def of(name: str) -> np.ndarray:
        return ops[f"compressor.r{ratio}.{name}"][0]

    p, x, after = _compressor(ops, ratio), of("x"), of("next_x")
    count, size = len(x), ratio + 3

    @jax.jit
    def latents(p, x, pending, rows):
        pair = compress.raw_pair(p, x, FP32)
        members = compress.group_pairs(pair, pending, rows, spans_of(rows, 1), ratio)
        return pair, compress.latent(compress.pool(members), p, released, FP32)

    def step(x: np.ndarray, start: int, pending):
        positions = np.arange(start, start + len(x), dtype=np.int32)
        pair, lat = latents(p, jnp.asarray(x), jnp.asarray(pending), _rows(positions))
        pending = pending.copy()
        for row in range(len(x)):
            pending[0, positions[row] % size] = pair[row]
        return pending, np.asarray(lat)[(positions + 1) % ratio == 0]

    pending, made = step(x, 0, np.zeros((1, size, 2, x.shape[1]), np.float32))
    near(made, of("latents"))
    unfinished = count % ratio
    places = np.arange(count - unfinished, count) % size
    # Not bit for bit: a float32 dot of one row adds in another order than our tiles of rows.
    near(pending[0, places, 0], of("state_kv")[:unfinished])
    near(pending[0, places, 1], of("state_score")[:unfinished])
    later = []
    for i in range(len(after)):
        pending, made = step(after[i : i + 1], count + i, pending)
        later.append(made)
    near(np.concatenate(later), of("next_latents"))


@pytest.mark.parametrize(("blocks", "size"), [(2, 4), (3, 2), (50, 4)])
def test_candidate_blocks(
    ops: Arrays, released: config.ModelConfig, blocks: int, size: int
) -> None:
    cfg = dataclasses.replace(
        released, candidate_topk_blocks=blocks, candidate_block_size=size, index_topk=1
    )
    score, visible = ops["cand.logits"][0], ops["cand.lens"][0, :, 0]
    count = score.shape[1]
    seen = np.arange(count) < visible[:, None]
    masked = jnp.asarray(np.where(seen, score, -np.inf))

    def choose(score, visible):
        return index.members(index.candidate_blocks(score, visible, cfg, Numerics.fp32()), size)

    ids = np.asarray(run(choose, masked, jnp.asarray(visible)))
    mask = np.zeros((len(score), count + size + 1), np.uint8)
    np.put_along_axis(mask, np.where(ids < 0, -1, ids), 1, axis=1)
    same_bits(mask[:, :count], ops[f"cand.mask.t{blocks}_b{size}"][0])


# -- Engram ----------------------------------------------------------------------------------------


def test_engram_constants(ops: Arrays, released: config.ModelConfig) -> None:
    constants = engram.hash_constants(released)
    np.testing.assert_array_equal([c.primes for c in constants], ops["engram.released.primes"])
    multipliers = np.array([c.multipliers for c in constants], np.int64)
    np.testing.assert_array_equal(multipliers, ops["engram.released.multipliers"])


def _engram_rows(compressed: np.ndarray, split: int, cfg: config.ModelConfig) -> np.ndarray:
    """Table rows [positions, layers, columns]: `split` positions at once, then one by one."""
    constants = engram.hash_constants(cfg)
    history = jnp.zeros((1, cfg.engram_lookback + 6), jnp.int32)

    @jax.jit
    def call(ids, rows, history):
        spans = spans_of(rows, 1)
        tokens = engram.lookback(ids, history, rows, spans, cfg)
        found = [engram.table_rows(tokens, jnp.int32(2), c) for c in constants]
        return jnp.stack(found, axis=1), engram.store_history(history, ids, rows, spans)

    out, cuts = [], [0, *range(split, len(compressed) + 1)]
    for start, stop in itertools.pairwise(cuts):
        positions = np.arange(start, stop, dtype=np.int32)
        found, history = call(jnp.asarray(compressed[start:stop]), _rows(positions), history)
        out.append(np.asarray(found))
    return np.concatenate(out)


@pytest.mark.parametrize("split", [30, 40])
def test_engram_table_rows(ops: Arrays, released: config.ModelConfig, split: int) -> None:
    compressed = np.where(ops["engram.released.dead"] > 0, -1, ops["engram.released.ids"])
    for ids, want in zip(compressed, ops["engram.released.hash"], strict=True):
        same_bits(_engram_rows(ids.astype(np.int32), split, released), want)


def test_engram_write(ops: Arrays, released: config.ModelConfig) -> None:
    x = ops["engram.op.x"][0]
    cfg = dataclasses.replace(released, hidden_size=x.shape[-1])
    table = Quantized(
        codes(ops["engram.op.table"]), codes(ops["engram.op.table_scale"]), "fp8_group"
    )
    weights = {n: jnp.asarray(ops[f"engram.op.{n}"]) for n in ("wkv", "q_weight", "k_weight")}
    dead = jnp.asarray(ops["engram.op.mask"][0] == 0)
    hashed = jnp.asarray(ops["engram.op.hash"][0])

    def write(p, index_rows, x, dead):
        return engram.write(p, index_rows, x, dead, cfg, FP32)[0]

    out = run(write, {"embed": table, **weights}, hashed, jnp.asarray(x), dead)
    near(out, ops["engram.op.out"][0], 2e-6)
