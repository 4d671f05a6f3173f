"""Bytes of weights and caches, against the published tables to the byte."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest

from deepinfer_jax import numerics as nx
from deepinfer_jax import scale
from deepinfer_jax.scale import memory
from tests.scale import released

ONE = scale.over_experts(1)
BENCH = Path(__file__).parents[2] / "bench"


def by_kind(parts):
    return {part.kind: part.device for part in parts}


def test_weights_are_the_published_bytes():
    found = by_kind(memory.weights(released.config(), ONE))
    assert sum(found.values()) == 510_286_023_000
    assert found["routed experts"] == 40 * 384 * 18_800_640
    assert found["Engram tables"] == (384_006_168 + 384_016_682) * 264
    assert found["shared experts"] == 40 * 35_424_000
    assert found["embedding and head"] == 2 * 1_323_827_200
    # FP8 of every layer, index queries, compressors and index keys; the rest are norms and sinks
    attention = 40 * 126_739_200 + 8 * 5_575_680 + 3 * 10_485_760 + 5_242_880 + 4 * 131_072
    norms = 40 * (2 * (1280 + 512) + 4 * 64) + 4 * 2 * (512 + 128)
    assert found["attention"] == attention + norms


@pytest.mark.parametrize("name", scale.layout_names())
def test_devices_together_hold_every_weight(name):
    """Of every kind: what is split adds up to the whole, the rest is whole on every device."""
    cfg, layout = released.config(), scale.load_layout(name)
    cut = {name for name in ("expert", "vocab") if layout.parts(name) > 1}
    split = dict.fromkeys(by_kind(memory.weights(cfg, ONE)), 0)
    whole = dict(split)
    for kind, spec in memory.specs(cfg):
        sizes = split if cut.intersection(spec.axes) else whole
        sizes[kind] += math.prod(spec.shape) * spec.dtype.itemsize
    copies = layout.devices // layout.size("expert")
    for part in memory.weights(cfg, layout):
        if part.kind != "Engram tables":
            held = copies * split[part.kind] + layout.devices * whole[part.kind]
            assert part.device * layout.devices == held, part.kind
        elif layout.engram == "device":
            spare = part.device * layout.parts("engram_rows") - whole[part.kind]
            assert 0 <= spare < 2 * 264 * layout.devices
        else:
            assert (part.device, part.host) == (0, whole[part.kind])


def test_caches_are_the_published_bytes(recorded):
    want = recorded("engine_misc/kv_bytes.json")["fp4_main"]
    cfg = released.config()
    work = scale.Workload(context=128, concurrency=1, drafts=5, page=128)
    found = by_kind(memory.caches(cfg, ONE, work))
    block = found["compressed KV"] + found["index keys"]
    assert block == want["kv_bytes_per_block_unpadded"]
    assert block / want["block_tokens"] == want["kv_bytes_per_token"]
    assert found["window rings"] == 40 * want["swa_bytes_per_layer"]
    assert found["draft rings"] == 3 * want["swa_bytes_per_layer"]
    assert found["pending pooling"] == want["compression_state_bytes"]


@pytest.mark.parametrize(("context", "size"), [(4096, 3_645_440), (1 << 20, 933_232_640)])
def test_global_kv_of_a_sequence(context, size):
    work = scale.Workload(context=context, concurrency=24)
    found = by_kind(memory.caches(released.config(), scale.over_experts(8), work))
    assert found["compressed KV"] + found["index keys"] == 3 * size  # three on each of eight


def test_more_drafts_need_longer_rings(recorded):
    want = recorded("engine_misc/kv_bytes.json")["backtracking_12"]
    work = scale.Workload(context=128, concurrency=1, drafts=11)  # a cache's matter alone
    found = by_kind(memory.caches(released.config(), ONE, work))
    assert found["window rings"] == 40 * want["swa_bytes_per_layer"]
    assert found["pending pooling"] == want["compression_state_bytes"]


def test_intermediate_values_grow_with_what_makes_them():
    cfg, layout = released.config(), scale.over_experts(8)

    def parts(**changes):
        work = scale.Workload(**changes)
        return memory.activations(cfg, layout, scale.Call.decode(cfg, layout, work), work)

    def size(**changes):
        return memory.at_once(parts(**changes))

    assert size(concurrency=64) < size(concurrency=256) < size(concurrency=1024)
    assert size(context=1 << 20) > size(context=4096)
    gathered, routed = (by_kind(parts(exchange=each)) for each in ("gathered", "routed"))
    assert gathered["routed experts"] > routed["routed experts"]


def test_intermediate_values_are_near_those_of_an_h200(monkeypatch):
    """Temporaries as XLA reported them there. That version held every weight that a prefill
    decodes, where now one exists at a time, and blocks of decoded index keys.
    """
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("activations")
    cfg = bench.slice_config(small=False)
    dense = [
        math.prod(spec.shape)
        for kind, spec in memory.specs(cfg)
        if spec.storage == "F8_E4M3" and kind not in ("Engram tables", "drafter")
    ]
    largest = 25_600 * 6_144  # keys and values of Engram
    recorded = json.loads((BENCH / "results" / "activations-h200.json").read_text("utf-8"))
    for row in recorded["results"]:
        case = bench.Case(row["call"], row["slots"], row["size"])
        parts = case.accounting(cfg, recorded["config"]["room"])["accounted"]
        looked = row["rows"] * nx.index_width(row["rows"], memory.STORED)
        parts["index scores"] += looked * cfg.index_head_dim * 2
        estimate = parts.pop("kept throughout") + max(parts.values())
        if case.call == "prefill":
            estimate += 2 * (sum(dense) - largest)
        assert 0.8 < row["temporaries_bytes"] / estimate < 1.25, case
