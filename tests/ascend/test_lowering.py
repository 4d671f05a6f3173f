"""Committed AscendC: hashes of what it was made from, and that the compiler still makes it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ascend import kernels, lower, manifest

ROOT = Path(__file__).parents[2]


def test_committed_files_are_those_of_the_manifest():
    assert manifest.differences() == []
    assert {each["tilelang"] for each in manifest.kept().values()} == {lower.RELEASE}


def test_a_change_of_source_parameters_or_output_is_named(tmp_path, monkeypatch):
    folder, sources = tmp_path / "generated", tmp_path / "kernels"
    shutil.copytree(manifest.FOLDER, folder)
    shutil.copytree(manifest.SOURCES, sources)
    monkeypatch.setattr(manifest, "SOURCES", sources)
    form, other = kernels.SMALL[0], dataclasses.replace(kernels.SMALL[0], sizes={"N": 64, "R": 10})
    assert manifest.changed(form, folder) is None
    assert "norm_rope-small: parameters changed" in (manifest.changed(other, folder) or "")
    with manifest.generated_path(form, folder).open("a") as file:
        file.write("\n")
    (sources / "select_best.py").write_text("")
    (folder / "nobody.cce").write_text("")
    said = manifest.differences(folder)
    assert said[0].startswith("norm_rope-small: output_sha256 changed: run python -m ascend.lower")
    assert sum("select_best" in line and "source_sha256" in line for line in said) == 2
    assert said[-1].startswith("nobody belongs to no form")
    (folder / "manifest.json").write_text(json.dumps({}))
    assert "norm_rope-small was never lowered" in manifest.differences(folder)[0]


def test_every_kernel_has_a_small_form_and_one_of_the_model():
    names = sorted(path.stem for path in manifest.SOURCES.glob("*.py") if path.stem != "__init__")
    for forms in (kernels.SMALL, kernels.FLASH):
        assert sorted(form.kernel.name for form in forms) == names


def test_the_pins_of_the_extra_are_those_of_the_command():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'"tilelang=={lower.RELEASE}' in text


def test_without_tilelang_the_command_says_what_to_install():
    text = "import sys; sys.modules['tilelang'] = None; from ascend import lower; "
    text += "lower.importlib.metadata.version = lambda name: lower.RELEASE; "
    text += "sys.exit(lower.main(['--check']))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "pip install '.[ascend]' in an environment of its own" in done.stderr


def test_lowering_makes_the_committed_files():
    pytest.importorskip("tilelang", reason="needs the extra ascend, an environment of its own")
    assert lower.stale() == []
