"""Building the kernels: what is kept, and what is said where it cannot be done."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import jax
import pytest

from kernels_bridge import building
from kernels_bridge.building import NoKernelsError


def put_compiler(monkeypatch, folder: Path, script: str) -> None:
    """Make `script` the only C++ compiler on the path."""
    folder.mkdir()
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


COUNTING = """
for last; do :; done
[ "$1" = --version ] && { echo one; exit; }
echo built > "$last"
echo . >> "$(dirname "$0")/runs"
"""


def test_a_library_is_built_once(monkeypatch, tmp_path):
    put_compiler(monkeypatch, tmp_path / "bin", COUNTING)
    first = building.build(jax.ffi.include_dir(), tmp_path / "kept")
    assert building.build(jax.ffi.include_dir(), tmp_path / "kept") == first
    assert first.read_text() == "built\n"
    assert (tmp_path / "bin" / "runs").read_text() == ".\n"
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [first.name]


def test_what_a_killed_build_left_is_removed_by_a_later_one(monkeypatch, tmp_path):
    put_compiler(monkeypatch, tmp_path / "bin", COUNTING)
    left, at_work = (tmp_path / "kept" / f"building-{name}" for name in ("old", "new"))
    for folder in (left, at_work):
        folder.mkdir(parents=True)
        (folder / "rows.so").write_text("half")
    os.utime(left, (0, 0))
    built = building.build(jax.ffi.include_dir(), tmp_path / "kept")
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {built.name, at_work.name}


def test_what_is_built_needs_no_compiler_any_more(monkeypatch, tmp_path):
    put_compiler(monkeypatch, tmp_path / "bin", COUNTING)
    first = building.build(jax.ffi.include_dir(), tmp_path / "kept")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert building.build(jax.ffi.include_dir(), tmp_path / "kept") == first


def test_kernels_are_possible_without_a_compiler_once_all_are_built(monkeypatch, tmp_path):
    put_compiler(monkeypatch, tmp_path / "bin", COUNTING)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    include = jax.ffi.include_dir()
    path, said = os.environ["PATH"], []
    for source in (building.SOURCE, building.SUBLAYERS):
        monkeypatch.setenv("PATH", path)
        building.build(include, source=source)
        monkeypatch.setenv("PATH", str(tmp_path))
        said.append(building.possible(include))
    assert said == [False, True]


def test_another_source_makes_another_library(monkeypatch, tmp_path):
    put_compiler(monkeypatch, tmp_path / "bin", COUNTING)
    first = building.build(jax.ffi.include_dir(), tmp_path / "kept")
    changed = shutil.copytree(building.SOURCE.parent, tmp_path / "csrc") / building.SOURCE.name
    changed.write_text(changed.read_text() + "// more\n")
    monkeypatch.setattr(building, "SOURCE", changed)
    assert building.build(jax.ffi.include_dir(), tmp_path / "kept") != first


def test_without_a_compiler_the_message_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoKernelsError, match=r"install one .*rows=\"tiled\""):
        building.build(jax.ffi.include_dir(), tmp_path)


def test_what_the_compiler_says_is_in_the_message(monkeypatch, tmp_path):
    script = "echo in file >&2; echo 'error: no such header' >&2; echo more >&2; exit 1"
    put_compiler(monkeypatch, tmp_path / "bin", script)
    with pytest.raises(NoKernelsError, match="no such header") as caught:
        building.build(jax.ffi.include_dir(), tmp_path / "kept")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "kept").iterdir())


def test_without_a_home_a_folder_is_asked_for(monkeypatch):
    def nowhere():
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(building.Path, "home", nowhere)
    with pytest.raises(NoKernelsError, match="set XDG_CACHE_HOME"):
        building.build(jax.ffi.include_dir())


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    put_compiler(monkeypatch, tmp_path / "bin", COUNTING)
    (tmp_path / "file").write_text("")
    with pytest.raises(NoKernelsError, match=r"could not be built in .*XDG_CACHE_HOME"):
        building.build(jax.ffi.include_dir(), tmp_path / "file" / "kept")
