"""Figures of the released configuration, and the report of a small one."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_jax import info, params
from deepinfer_jax.config import ModelConfig
from tests.small import CONFIG, WINDOW_ONLY


@pytest.fixture(scope="module")
def released() -> info.Info:
    folder = Path(__file__).parent / "golden" / "released-config"
    return info.describe(ModelConfig.from_json(folder))


def test_released_components(released: info.Info) -> None:
    """The counts of docs/model.md 13, part by part."""
    counts = {part.name: part.parameters for part in released.components}
    assert counts == {
        "compressors": 18_352_128,
        "index keys": 262_656,
        "index queries": 43_253_760,
        "attention": 5_064_696_320,
        "routed experts": 543_581_798_400,
        "shared experts": 1_415_577_600,
        "routers": 78_673_920,
        "hyper-connections": 39_323_760,
        "block norms": 409_600,
        "Engram tables": 196_613_849_600,
        "Engram dense": 314_654_720,
        "embedding": 661_913_600,
        "head": 661_913_600,
        "final norm": 5_120,
        "DSpark draft": 14_225_362_530,
        "vision tower": 411_842_560,
        "aligner and delimiters": 73_410_560 + 15_360,
    }
    assert sum(counts.values()) == released.census.parameters == 763_205_315_794


def test_released_active_parameters(released: info.Info) -> None:
    """ "8B prefill" and "16B decode": docs/model.md 13 says 7.89B and 16.13B."""
    assert round(sum(part.prefill for part in released.components) / 1e9, 2) == 7.89
    assert round(sum(part.decode for part in released.components) / 1e9, 2) == 16.13


def test_released_bytes(released: info.Info) -> None:
    assert released.census.tensors == 96_085
    assert released.census.total_bytes == 510_286_023_000
    assert sum(part.nbytes for part in released.components) == 510_286_023_000
    assert (released.main_kv_bytes, released.index_key_bytes) == (720, 170)
    assert released.kv_bytes_per_token == 890


def test_released_state(released: info.Info) -> None:
    """docs/model.md 10: rings of 134 rows in 43 layers, pending pooling of 7 slots in 3."""
    state = dict(released.state)
    assert state["window rings"] + state["draft rings"] == 3_042_336
    assert state["pending pooling"] == 86_016


def test_released_layer_groups(released: info.Info) -> None:
    assert [(run.first, run.last) for run in released.layers][:6] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 7),
        (8, 8),
        (9, 13),
    ]
    assert [run.last for run in released.layers][-1] == 39
    sources = {run.first: (run.kv, run.index, run.candidates) for run in released.layers}
    assert sources[0] == (None, None, None)
    assert sources[3] == (2, 2, None)
    assert sources[20] == (20, 20, None)
    assert sources[24] == (20, 24, 20)
    assert sources[25] == (20, 24, None)


@pytest.mark.parametrize("cfg", [CONFIG, WINDOW_ONLY])
def test_every_leaf_has_one_component(cfg: ModelConfig) -> None:
    described = info.describe(cfg)
    assert sum(part.parameters for part in described.components) == params.census(cfg).parameters
    assert sum(part.nbytes for part in described.components) == params.census(cfg).total_bytes


def test_report(released: info.Info) -> None:
    text = info.format_info(released)
    assert "96,085 tensors" in text
    assert "510,286,023,000" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["global", "KV", "per", "token", "890"] in lines
    assert ["3..7", "reuse", "encoder", "2", "2", "2", "-", "-", "-"] in lines
    assert ["24", "reindex", "decoder", "1", "20", "24", "20", "-", "-"] in lines
    assert max(len(line) for line in text.splitlines()) <= 100


def test_report_of_a_model_without_global_kv() -> None:
    text = info.format_info(info.describe(WINDOW_ONLY))
    assert ["global", "KV", "per", "token", "0"] in [line.split() for line in text.splitlines()]
