"""Data sheets: every figure has a source, and what is none is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from deepinfer_jax import scale

NAMES = ("ascend-950", "b200", "h100", "h200", "tpu-v5p", "tpu-v6e")


def test_the_shipped_ones():
    assert scale.hardware_names() == NAMES
    for name in NAMES:
        hardware = scale.load_hardware(name)
        assert set(hardware.figures()) == set(dict(hardware.sources))
        assert hash(hardware) == hash(scale.load_hardware(name))


def test_figures_of_data_sheets():
    h200 = scale.load_hardware("h200")
    assert (h200.memory, h200.bandwidth, h200.domain) == (141e9, 4.8e12, 8)
    assert (h200.rate("bf16"), h200.rate("fp8")) == (989.5e12, 1979e12)
    assert h200.rate("fp4") == h200.rate("fp8")  # no such units: the next wider ones
    assert scale.load_hardware("b200").rate("fp4") == 9000e12
    assert scale.load_hardware("tpu-v6e").rate("fp8") == 918e12


def test_what_was_measured_takes_the_place_of_the_data_sheet():
    h200 = scale.load_hardware("h200")
    found = h200.as_measured()
    assert (found.bandwidth, found.rate("bf16")) == (4.3e12, 790e12)
    assert found.rate("fp8") == pytest.approx(2 * 790e12)
    assert found.memory == h200.memory
    with pytest.raises(ValueError, match=r"nothing was measured on NVIDIA B200 SXM"):
        scale.load_hardware("b200").as_measured()


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown hardware 'h300': give one of .*h200"):
        scale.load_hardware("h300")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": 0}, "bandwidth must be a positive number, got 0"),
        ({"memory": "141 GB"}, "memory must be a positive number, got '141 GB'"),
        ({"domain": True}, "domain must be a positive number, got True"),
        ({"flops": {"fp8": 1e15}}, r"flops must have bf16, got \['fp8'\]"),
        ({"flops": {"bf16": 1e15, "int8": 2e15}}, r"flops has \['int8'\]"),
        ({"flops": 3}, "flops must be an object, got 3"),
        ({"sources": {}}, "no source for .*bandwidth.*; name the data sheet"),
        ({"color": "green"}, "keys must be .*; look at .*color"),
    ],
)
def test_a_file_that_is_no_data_sheet(tmp_path, change, message):
    names = {"flops": dict, "sources": dict, "measured": dict}
    data = dataclasses.asdict(scale.load_hardware("h200"))
    data |= {name: kind(data[name]) for name, kind in names.items()}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(data | change), "utf-8")
    with pytest.raises(ValueError, match=message):
        scale.load_hardware(path)
    path.write_text(json.dumps(data), "utf-8")
    assert scale.load_hardware(path) == scale.load_hardware("h200")
