"""The parameter tree: the released tensor table, random weights, paths and differences."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import axes, params, quant
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.quant import Quantized
from tests.small import CONFIG, PLAIN, WINDOW_ONLY, bits, random_bits

RELEASED = Path(__file__).parent / "golden" / "released-config"
BYTES = {"F32": 4, "BF16": 2}


def expand(pattern: str, experts: int) -> Iterator[str]:
    """`layers.{0..2}.x` and `layers.{1,14}.x` -> names; `{E}` counts the experts."""
    parts = re.split(r"\{(.*?)\}", pattern)
    choices: list[list[str]] = []
    for number, part in enumerate(parts):
        if number % 2 == 0:
            choices.append([part])
        elif part == "E":
            choices.append([str(e) for e in range(experts)])
        elif ".." in part:
            first, last = part.split("..")
            choices.append([str(n) for n in range(int(first), int(last) + 1)])
        else:
            choices.append(part.split(","))
    return ("".join(words) for words in itertools.product(*choices))


# -- the released table ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return ModelConfig.from_json(RELEASED)


@pytest.fixture(scope="module")
def table(released: ModelConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {}
    with (RELEASED / "tensors.tsv").open() as file:
        for row in csv.DictReader(file, delimiter="\t"):
            experts = released.n_routed_experts
            if row["name_pattern"].startswith("mtp"):
                experts = released.dspark_n_routed_experts
            shape = tuple(int(n) for n in row["shape"].split("x"))
            names = list(expand(row["name_pattern"], experts))
            size = len(names) * math.prod(shape) * BYTES.get(row["dtype"], 1)
            assert (len(names), size) == (int(row["count"]), int(row["bytes_total"])), row
            found.update(dict.fromkeys(names, (shape, row["dtype"])))
    return found


def test_released_tensors(released: ModelConfig, table: dict) -> None:
    ours = {
        name: (spec.tensor_shape, spec.storage)
        for spec in params.specs(released)
        for _, name in spec.tensors()
    }
    assert ours.keys() == table.keys()
    assert {n: (ours[n], table[n]) for n in table if ours[n] != table[n]} == {}


def test_released_totals(released: ModelConfig) -> None:
    census = params.census(released)
    assert census.tensors == 96_085
    assert census.total_bytes == 510_286_023_000
    assert census.parameters == 763_205_315_794
    gigabytes = {k: round(v / 1e9, 3) for k, v in census.bytes_by_storage.items()}
    assert gigabytes == {
        "I8": 278.586,
        "F8_E4M3": 204.015,
        "F8_E8M0": 23.563,
        "BF16": 3.953,
        "F32": 0.169,
    }


# -- the tree --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [CONFIG, PLAIN, WINDOW_ONLY])
def test_specs_are_consistent(cfg: ModelConfig) -> None:
    names = [name for spec in params.specs(cfg) for _, name in spec.tensors()]
    assert len(names) == len(set(names)) == params.census(cfg).tensors
    for path, spec in params.by_path(params.abstract(cfg)).items():
        assert len(spec.axes) == len(spec.shape), path
        assert spec.shape[: len(spec.stack)] == tuple(len(s) for s in spec.stack), path
        assert {axis for axis in spec.axes if axis} <= axes.LOGICAL, path


def test_parts_come_and_go_with_the_config() -> None:
    assert "draft" not in params.abstract(WINDOW_ONLY)
    assert "vision" not in params.abstract(PLAIN)
    names = {name for spec in params.specs(PLAIN) for _, name in spec.tensors()}
    assert not any("bias_vl" in name or name.endswith("wq_a.scale") for name in names)
    # Engram tables are quantized in every model
    assert "layers.2.engram.embed.scale" in names


def test_shapes_mirror_the_specs() -> None:
    specs, shapes = params.specs(CONFIG), jax.tree.leaves(params.shapes(CONFIG))
    assert [(s.shape, s.dtype) for s in specs] == [(s.shape, s.dtype) for s in shapes]
    assert params.differences(params.shapes(CONFIG), CONFIG) == []


def test_differences_are_named_by_path() -> None:
    tree = params.shapes(CONFIG)
    tree["head"] = jax.ShapeDtypeStruct((131, 63), jnp.float32)
    tree["more"] = tree.pop("norm")
    assert params.differences(tree, CONFIG) == [
        "missing norm",
        "head is ((131, 63), 'float32'), expected ((131, 64), 'bfloat16')",
        "unexpected more ((64,), 'bfloat16')",
    ]


def test_a_changed_format_is_a_difference() -> None:
    tree = params.shapes(CONFIG)
    attention = tree["layers"]["attn"]
    attention["wkv"] = dataclasses.replace(attention["wkv"], format="fp8_group")
    assert params.differences(tree, CONFIG) == ["the quantized formats differ"]


# -- weights ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> params.Params:
    return params.init(jax.random.key(3), CONFIG)


def test_random_weights_fit_the_tree(drawn: params.Params) -> None:
    assert params.differences(drawn, CONFIG) == []


def test_random_weights_repeat_and_depend_on_the_key(drawn: params.Params) -> None:
    again = params.init(jax.random.key(3), CONFIG)
    other = params.init(jax.random.key(4), CONFIG)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(bits(a), bits(b))), drawn, again)
    assert all(jax.tree.leaves(same))
    assert not np.array_equal(bits(drawn["embed"]), bits(other["embed"]))


def test_random_weights_are_normal_and_differ_between_leaves(drawn: params.Params) -> None:
    experts = drawn["layers"]["ffn"]["experts"]
    wide = params.widen({"w1": experts["w1"], "w3": experts["w3"], "embed": drawn["embed"]})
    embed = np.asarray(wide["embed"])
    assert abs(embed.mean()) < 0.05
    assert abs(embed.std() - 1) < 0.05
    w1, w3 = np.asarray(wide["w1"]), np.asarray(wide["w3"])
    assert abs(w1.std() * math.sqrt(64) - 1) < 0.05
    assert abs(np.corrcoef(w1.ravel(), w3.ravel())[0, 1]) < 0.05
    assert np.all(np.asarray(drawn["norm"], np.float32) == 1)


@pytest.mark.parametrize("format", ["fp8_block", "fp8_group", "fp4_group"])
def test_tiles_quantize_like_the_whole(format: quant.Format) -> None:
    """Two leading axes, and for blocks edges that are no multiple of 32."""
    shape = (2, 3, 37, 70) if format == "fp8_block" else (2, 3, 37, 96)
    value = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    want = jax.jit(quant.quantize, static_argnums=1)(value, format)
    got = params._in_storage(value, format)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scale, want.scale)


def test_widening_is_exact() -> None:
    """Against plain NumPy on random bits, without the codes that are not numbers."""
    tree = random_bits(CONFIG)
    weight = tree["layers"]["attn"]["wq_a"]
    codes = np.where((weight.codes & 127) == 127, np.uint8(1), weight.codes)
    scale = np.clip(weight.scale, 100, 140)
    tree["layers"]["attn"]["wq_a"] = Quantized(codes, scale, weight.format)
    wide = params.widen({"wq_a": tree["layers"]["attn"]["wq_a"], "norm": tree["norm"]})
    spread = np.repeat(np.repeat(scale, 32, axis=-2), 32, axis=-1)[..., :160, :64]
    want = codes.view(jnp.float8_e4m3fn).astype(np.float64) * 2.0 ** (spread.astype(int) - 127)
    np.testing.assert_array_equal(np.asarray(wide["wq_a"], np.float64), want)
    np.testing.assert_array_equal(bits(wide["norm"]), bits(tree["norm"].astype(np.float32)))


def test_decoding_keeps_every_value(drawn: params.Params) -> None:
    """The decoded tree widens to the same float32 tree; what a token reads by row stays stored."""
    decoded = params.decode(drawn)
    want, got = params.widen(drawn), params.widen(decoded)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    experts = decoded["layers"]["ffn"]["experts"]["w2"]
    assert (experts.format, experts.codes.dtype, experts.scale) == ("bf16_bits", np.uint16, None)
    assert decoded["engram"][0]["embed"].format == "fp8_group"
    assert decoded["engram"][0]["wkv"].format == "bf16_bits"
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(decoded))
    assert params.decoded_bytes(CONFIG) == total
