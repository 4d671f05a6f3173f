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


def moved(parts):
    """Elements by collective, of all traffic."""
    total: dict[str, int] = {}
    for part in parts:
        for name, count in part.elements:
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.exhaustive  # compiles two programs of a model
def test_arguments_and_collectives_are_those_of_the_plan():
    decode, prefill = compiled.compile_steps(CFG, LAYOUT, WORK)
    calls = (scale.Call.decode(CFG, LAYOUT, WORK), scale.Call.prompts(CFG, LAYOUT, WORK))
    held = memory.weights(CFG, LAYOUT), memory.caches(CFG, LAYOUT, WORK)
    bytes_held = sum(part.device for parts in held for part in parts)
    for made, call in zip((decode, prefill), calls, strict=True):
        found = {name: elements for name, _, elements in made.collectives}
        assert found == moved(traffic.traffic(CFG, LAYOUT, call, WORK))
        # besides, what a call is given: sampling of every slot, and its state or rows
        state = 25 * call.slots if made.name == "decode" else 13 * call.rows
        assert made.argument_bytes - bytes_held == 12 * call.slots + state


def test_why_a_layout_cannot_be_compiled():
    def reason(**changes):
        return compiled.why_not(dataclasses.replace(LAYOUT, **changes))

    assert compiled.why_not(LAYOUT) == ""
    assert "host" in reason(engram="host")
    sizes = (("data", 1), ("context", 2), ("expert", 2), ("tensor", 1))
    assert "share no rows over the mesh axis context" in reason(mesh=sizes)
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
