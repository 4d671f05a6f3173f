"""`deepinfer-jax plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json

import pytest

from deepinfer_jax import cli


def plan(*args):
    """Exit status of the command, without compiling."""
    return cli.main(["plan", "--no-compile", *map(str, args)])


def test_the_released_model_on_eight_h200(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert plan("--devices", 8, "--hardware", "h200", "--json", path) == 0
    text = capsys.readouterr().out
    for expected in (
        "h200-8: 8 x NVIDIA H200 SXM, mesh expert 8",
        "256 sequences of 65,536 tokens, 32 on a device; 5 drafts",
        "divided too: vocabulary and Engram rows",
        "it fits; at most ",
        "routed experts               36.097",
        "decode, full acceptance, 6 a round",
        "longest: exchange of rows, limited by links",
    ):
        assert expected in text
    data = json.loads(path.read_text("utf-8"))
    assert data["feasible"] is True
    assert data["programs"] == []
    assert data["slots"] == 32


def test_what_does_not_fit_ends_with_status_1(capsys):
    assert plan("--devices", 8, "--hardware", "tpu-v6e", "--concurrency", 8) == 1
    assert "it does not fit" in capsys.readouterr().out


def test_other_settings_and_a_model_of_ones_own(capsys):
    assert plan("--config", "spark-tiny", "--devices", 2, "--context", 512, "--drafts", 0,
                "--as-measured", "--exchange", "routed") == 0  # fmt: skip
    text = capsys.readouterr().out
    assert "2 devices: 2 x NVIDIA H200 SXM" in text
    assert "0 drafts" in text


def test_a_picture(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    path = tmp_path / "plan.png"
    assert plan("--devices", 8, "--plot", path) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_in_no_format(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert plan("--devices", 8, "--plot", tmp_path / "plan.xyz") == 1
    assert "plan.xyz: Format 'xyz' is not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--devices", 7], "'expert' of size 128 is not divisible by the 7 parts"),
        (["--devices", 0], "--devices must be at least 1, got 0"),
        (["--devices", 10**23], "a mesh has at most 2147483647 devices"),
        (["--devices", 8, "--hardware", "h300"], "unknown hardware 'h300': give one of"),
        (["--devices", 8, "--rules", "mine"], "unknown layout 'mine': give one of"),
        (["--devices", 8, "--rules", "h200-64"], "is a mesh of 64 devices, but --devices is 8"),
        (["--devices", 8, "--drafts", 9], "makes at most 5"),
        (["--devices", 8, "--config", "gpt"], "unknown model 'gpt': give one of"),
        (["--devices", 8, "--hardware", "b200", "--as-measured"], "nothing was measured on NVIDIA"),
    ],
)
def test_what_is_refused(capsys, args, message):
    assert plan(*args) == 2
    assert message in capsys.readouterr().err


def test_layouts_that_cannot_be_compiled_say_why(capsys):
    assert cli.main(["plan", "--devices", "8", "--rules", "h200-8-host"]) == 0
    text = capsys.readouterr().out
    assert "not compiled: steps read Engram tables from the memory of the device" in text
    assert "Engram tables                 0.000      202.758" in text
