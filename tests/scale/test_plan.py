"""The roofline and the plan: counts by hand, what they grow with, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import jax
import pytest

from deepinfer_jax import params, scale
from deepinfer_jax.scale import memory, traffic, work
from tests.scale import released

H200, NODE = scale.load_hardware("h200"), scale.over_experts(8)
SHARING = scale.load_layout("h200-16-context")
CONTEXTS = (1, 100, 4096, 65536, 1 << 20)


def planned(layout=NODE, **changes):
    return scale.plan(released.config(), layout, H200, scale.Workload(**changes))


def section(cfg, layout, name, **changes):
    asked = scale.Workload(**changes)
    call = scale.Call.decode(cfg, layout, asked)
    return next(s for s in work.sections(cfg, layout, call, asked) if s.name == name), call


# -- counts --------------------------------------------------------------------------------------


def test_products_of_a_token_are_the_published_ones():
    """Multiply-adds of one row: per layer, head, and all that is at work on a decoded token."""
    cfg, one = released.config(), scale.over_experts(1)
    asked = {"concurrency": 1, "drafts": 0, "context": 1}

    def macs(name):
        found, _ = section(cfg, one, name, **asked)
        return found.operations / 2

    assert macs("routed experts") == 40 * 6 * 35_389_440
    assert macs("shared experts") == 40 * 35_389_440
    assert macs("head and sampling") == 661_913_600
    mixes = 2 * 2 * 491_520  # float32 counts twice
    assert macs("streams, routers") == 40 * (1_966_080 + mixes)
    dense = 40 * 126_615_552 + 3 * 5_242_880 + 2_621_440 + 4 * 65_536 + 8 * 5_406_720
    assert macs("attention") == dense + 2 * 157_286_400


def test_attention_over_keys_by_hand():
    found, _ = section(
        released.config(), scale.over_experts(1), "attention over keys", concurrency=1, drafts=0,
        context=65536,
    )  # fmt: skip
    assert found.operations / 2 == 65_536 * (40 * 128 + 38 * 512)
    assert found.read == 40 * 129 * 528 + 38 * 512 * 288


def test_index_scores_by_hand():
    cfg, context = released.config(), 1 << 20
    found, _ = section(
        cfg, scale.over_experts(1), "index scores", concurrency=1, drafts=0, context=context
    )
    seen = 3 * context // 2 + context + 4 * 16384
    assert found.operations / 2 == 4096 * seen
    assert found.read == 68 * seen + 2 * 4 * (3 * context // 2 + context)


def test_experts_are_read_as_far_as_rows_choose_them():
    cfg, one = released.config(), scale.over_experts(1)
    sizes = []
    for count in (1, 33, 128, 4096):
        found, call = section(cfg, one, "routed experts", concurrency=count, drafts=0)
        assert call.rows == count
        sizes.append(found.read / (40 * 18_800_640))
    assert [round(size) for size in sizes] == [6, 156, 333, 384]


def test_traffic_of_an_exchange():
    cfg = released.config()
    call = scale.Call(rows=10, sampled=10, slots=10, context=64, drafted=0, shared=10)
    asked = scale.Workload(drafts=0)
    (rows, *_) = traffic.traffic(cfg, NODE, call, asked)
    assert rows.sent == 40 * 7 * 10 * (2 * 5120 + 6 * 8 + 6 * 2 * 5120)
    routed = dataclasses.replace(asked, exchange="routed")
    (fewer, *_) = traffic.traffic(cfg, NODE, call, routed)
    there = 8 * (1 - (7 / 8) ** 6) * 7 / 8 * 5120 * (1 + 1 / 32)
    assert fewer.sent == pytest.approx(40 * 10 * (there + 6 * 7 / 8 * 2 * 5120))
    assert traffic.traffic(cfg, scale.over_experts(1), call, asked) == ()


def test_links_within_and_beyond_a_domain():
    assert traffic.seconds(traffic.Traffic("", 7.0), NODE, H200) == 7.0 / H200.link
    beyond = traffic.seconds(traffic.Traffic("", 63.0), scale.over_experts(64), H200)
    assert beyond == pytest.approx(56.0 / H200.network)
    # Those who share global KV are as far apart as a group of experts is large.
    sent = traffic.Traffic("", 3.0, axis="context")
    near, far = (
        dataclasses.replace(SHARING, mesh=(("data", 1), ("context", 4), *others))
        for others in ((("expert", 2), ("tensor", 1)), (("expert", 8), ("tensor", 1)))
    )
    assert traffic.seconds(sent, near, H200) == 3.0 / H200.link
    assert traffic.seconds(sent, far, H200) == 3.0 / H200.network


def test_shared_global_kv_by_hand():
    """What a row sends another device that has its sequence: docs/parallel.md 5."""
    cfg, work = released.config(), scale.Workload(context=1 << 20, concurrency=64, drafts=5)
    call = scale.Call.decode(cfg, SHARING, work)
    assert (call.rows, call.shared, call.slots) == (24, 48, 8)
    rows, searches, vectors, *_ = traffic.traffic(cfg, SHARING, call, work)
    assert {each.axis for each in (rows, searches, vectors)} == {"context"}
    assert rows.sent == 24 * 2 * (40 * 512 + (4 + 1 + 3) * 5120)
    assert vectors.sent == 24 * 512 * (8 * 4 + 38 * 288)  # places of the eight that choose
    queries, best = 8 * (32 * 128 * 2 + 32 * 4), 8 * 2 * 512 * 4
    candidates = 4 * 2048 + 4 * (1 << 20) / 8  # shown once, found for all blocks
    assert searches.sent == 24 * (queries + best + candidates)
    alone = dataclasses.replace(work, concurrency=8)
    mine, one = (
        {part.kind: part.device for part in memory.caches(cfg, layout, asked)}
        for layout, asked in ((SHARING, work), (scale.over_experts(1), alone))
    )
    for kind in ("compressed KV", "index keys"):
        assert 2 * mine[kind] == one[kind]
    assert mine["window rings"] == one["window rings"]


def test_devices_that_share_a_context_share_the_work():
    """Of rows and searches, but not of entries, drafts and logits, at the cost of links."""
    cfg, context = released.config(), 1 << 20
    asked = {"concurrency": 64, "context": context}
    two, one = (
        {s.name: s for s in scale.plan(cfg, layout, H200, scale.Workload(**more)).decode.sections}
        for layout, more in ((SHARING, asked), (NODE, asked))
    )
    for name in ("attention over keys", "index scores", "shared experts"):
        assert 2 * two[name].flops == one[name].flops
    assert one["attention"].flops < 2 * two["attention"].flops < 1.2 * one["attention"].flops
    assert two["head and sampling"].flops == one["head and sampling"].flops
    assert set(two) - set(one) == {"shared rows", "shared searches", "shared KV"}
    assert {two[name].limit for name in set(two) - set(one)} == {"links"}


# -- properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["gathered", "routed"])
def test_time_and_memory_grow_with_context_and_batch(exchange):
    for field, values in (("context", CONTEXTS), ("concurrency", (8, 64, 512, 4096))):
        plans = [planned(exchange=exchange, **{field: value}) for value in values]
        for before, after in itertools.pairwise(plans):
            assert before.decode.seconds < after.decode.seconds
            assert before.needed < after.needed
            assert before.prefill.seconds <= after.prefill.seconds


def test_the_largest_batch_fits_and_one_more_a_device_does_not():
    for context in (4096, 1 << 20):
        most = planned(context=context).largest
        assert planned(context=context, concurrency=most).feasible
        assert not planned(context=context, concurrency=most + 1).feasible
    assert planned(context=1 << 20).largest < planned(context=4096).largest


def test_a_larger_batch_gives_more_tokens_and_none_gives_more_than_full_acceptance():
    rates = [planned(concurrency=count) for count in (8, 64, 512)]
    assert [p.tokens_per_second for p in rates] == sorted(p.tokens_per_second for p in rates)
    for each in rates:
        assert each.tokens_per_second < each.full_acceptance
    plain = planned(drafts=0)
    assert plain.tokens_per_second == plain.full_acceptance
    sure = planned(acceptance=1.0)
    assert sure.tokens_per_second == pytest.approx(sure.full_acceptance)


def test_better_hardware_is_no_slower():
    faster = dataclasses.replace(H200, bandwidth=2 * H200.bandwidth, link=2 * H200.link)
    asked = scale.Workload()
    slow, fast = (scale.plan(released.config(), NODE, h, asked) for h in (H200, faster))
    for before, after in zip(slow.decode.sections, fast.decode.sections, strict=True):
        assert after.seconds <= before.seconds


def test_busy_devices_and_stored_arithmetic():
    assert planned(balance=2.0).prefill.seconds > planned().prefill.seconds
    assert planned(arithmetic="stored").prefill.seconds < planned().prefill.seconds


# -- the released model --------------------------------------------------------------------------


def test_the_released_model_fits_on_eight_h200():
    made = scale.plan(
        released.config(), scale.load_layout("h200-8"), H200, scale.Workload(concurrency=256)
    )
    assert made.feasible
    assert 71e9 < sum(part.device for part in made.weights) < 72e9
    assert made.largest > 256
    assert "it fits" in scale.format_plan(made)


def test_what_does_not_fit_says_so():
    made = scale.plan(
        released.config(), scale.over_experts(8), scale.load_hardware("tpu-v6e"), scale.Workload()
    )
    assert (made.feasible, made.largest) == (False, 0)
    assert "it does not fit" in scale.format_plan(made)


def test_a_plan_as_json_is_plain():
    data = json.loads(json.dumps(scale.as_json(planned())))
    assert data["feasible"] is True
    assert data["layout"]["mesh"]["expert"] == 8
    assert data["decode"]["limit"] in ("memory", "arithmetic", "links")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "context must be an integer of at least 1, got 0"),
        ({"concurrency": 2.5}, "concurrency must be an integer of at least 1, got 2.5"),
        ({"drafts": 6}, "drafts=6, but one pass of this model's drafter makes at most 5"),
        ({"context": (1 << 20) + 1}, "exceeds max_position_embeddings=1048576"),
        ({"acceptance": 1.5}, "acceptance must lie in 0..1, got 1.5"),
        ({"balance": 0.5}, "balance .* must be >= 1, got 0.5"),
        ({"exchange": "fast"}, "exchange must be gathered or routed, got 'fast'"),
    ],
)
def test_workloads_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        planned(**changes)


# -- against what was measured -------------------------------------------------------------------


def test_measured_rounds_are_compared(tmp_path):
    cfg = released.config()
    call = scale.Call(rows=12, sampled=12, slots=2, context=64, drafted=10, shared=12)
    one = scale.over_experts(1)
    seconds = scale.step(cfg, one, H200, call, scale.Workload(drafts=0)).seconds
    path = tmp_path / "rounds.json"
    each = {"slots": 2, "rows": 12, "context": 64, "drafted": 10}
    rounds = [each | {"seconds": 4 * seconds}, each | {"seconds": 5 * seconds}]
    path.write_text(json.dumps({"machine": "mine", "rounds": rounds}), "utf-8")
    found = scale.compare(cfg, H200, scale.read_measured(path))
    assert found.ratios == pytest.approx((4, 5))
    assert found.errors == pytest.approx((0.75, 0.8))
    assert found.factor == pytest.approx(4.5)
    assert found.spread == pytest.approx((4.5 / 4 - 1, 1 - 4.5 / 5))
    path.write_text(json.dumps({"rounds": [each]}), "utf-8")
    with pytest.raises(ValueError, match=r"round 0 must have .*'seconds'"):
        scale.read_measured(path)
    path.write_text(json.dumps({"rounds": [each | {"seconds": -1}]}), "utf-8")
    with pytest.raises(ValueError, match=r"round 0: seconds must be positive, got -1"):
        scale.read_measured(path)


def test_devices_with_the_same_sequences_do_no_more_together():
    """Along `context`, which no rule of slots names, every device has what its neighbour has."""
    sizes = dict(NODE.mesh) | {"context": 2, "expert": 4}
    table = dict(NODE.rules.table) | {"slot": ("data", "expert"), "page": ("data", "expert")}
    rules = dataclasses.replace(NODE.rules, table=tuple(sorted(table.items())))
    shared = planned(dataclasses.replace(NODE, mesh=tuple(sizes.items()), rules=rules))
    assert "64 on a device, the same ones on 2 devices" in scale.format_plan(shared)
    assert "32 on a device; " in scale.format_plan(planned())
    assert shared.slots_share == planned().slots_share == 32
    rows = shared.prefill_tokens_per_second * shared.prefill.seconds
    assert (rows, shared.prefill.rows) == (pytest.approx(512), 1024)


def test_kinds_hold_every_parameter():
    """Nine of them, and together the bytes of the whole tree."""
    parts = memory.weights(released.config(), scale.over_experts(1))
    assert len(parts) == 9
    leaves = jax.tree.leaves(params.shapes(released.config()))
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    assert sum(part.device for part in parts) == held
