"""Steps compiled over virtual devices: their arguments and collectives are those of the plan."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from deepinfer_jax import scale
from deepinfer_jax.axes import Rules
from deepinfer_jax.scale import compiled, memory, traffic
from tests.scale import released
from tests.training import small_training

CFG = dataclasses.replace(
    small_training.CONFIG, n_routed_experts=8, dspark_n_routed_experts=8, dspark_block_size=2,
    vocab_size=68,
)  # fmt: skip
LAYOUT = scale.over_experts(4)
WORK = scale.Workload(context=32, concurrency=8, drafts=2, prefill=6, page=8)
# Two devices share the sequences of each of two. Two layers choose among the candidates, and three
# more use each of their choices, in loops as those of the released model.
SHARING = dataclasses.replace(
    scale.load_layout("h200-16-context"),
    mesh=(("data", 1), ("context", 2), ("expert", 2), ("tensor", 1)),
)
REINDEXED = dataclasses.replace(
    CFG, num_hidden_layers=11, compress_ratios=(0, 2, *(1,) * 9, 0),
    index_source_layer_ids=(1, 2, 3, 7), dspark_target_layer_ids=(8, 9, 10),
)  # fmt: skip


def moved(parts):
    """Elements by collective, of all traffic."""
    total: dict[str, int] = {}
    for part in parts:
        for name, count in part.elements:
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.exhaustive  # compiles two programs of a model
@pytest.mark.parametrize(
    ("cfg", "layout", "prefill"),
    # Vectors of shared KV travel for 64 rows of a device at once.
    [(CFG, LAYOUT, 6), (REINDEXED, SHARING, 6), (REINDEXED, SHARING, 70)],
)
def test_arguments_and_collectives_are_those_of_the_plan(cfg, layout, prefill):
    work = dataclasses.replace(WORK, prefill=prefill)
    decode, prefill = compiled.compile_steps(cfg, layout, work)
    calls = (scale.Call.decode(cfg, layout, work), scale.Call.prompts(cfg, layout, work))
    held = memory.weights(cfg, layout), memory.caches(cfg, layout, work)
    bytes_held = sum(part.device for parts in held for part in parts)
    for made, call in zip((decode, prefill), calls, strict=True):
        found = {name: elements for name, _, elements in made.collectives}
        assert found == moved(traffic.traffic(cfg, layout, call, work))
        # besides, what a call is given: sampling of every slot, and its state or rows
        state = 25 * call.slots if made.name == "decode" else 13 * call.shared
        assert made.argument_bytes - bytes_held == 12 * call.slots + state


def test_why_a_layout_cannot_be_compiled():
    def reason(**changes):
        return compiled.why_not(dataclasses.replace(LAYOUT, **changes))

    assert compiled.why_not(LAYOUT) == ""
    assert "host" in reason(engram="host")
    sizes = (("data", 1), ("context", 2), ("expert", 2), ("tensor", 1))
    assert "split entry over it, slot and page over the other axes" in reason(mesh=sizes)
    assert compiled.why_not(SHARING) == ""
    assert "expert over the mesh axis" in reason(rules=Rules.of(expert="data"))
    assert "do not split embed" in reason(rules=Rules.of(embed="data"))
    with pytest.raises(ValueError, match=r"4 devices cannot be compiled: steps read Engram"):
        compiled.compile_steps(CFG, dataclasses.replace(LAYOUT, engram="host"), WORK)


def test_too_few_devices_are_refused():
    with pytest.raises(ValueError, match=r"needs 64 devices, .*jax_num_cpu_devices"):
        compiled.compile_steps(released.config(), scale.over_experts(64), scale.Workload())


def test_shipped_layouts_that_cannot_be_compiled_say_why():
    reasons = {n: compiled.why_not(scale.load_layout(n)) for n in scale.layout_names()}
    assert {n for n, why in reasons.items() if why} == {"h200-8-host"}
    assert jax.device_count() >= 4  # what the exhaustive test above needs
