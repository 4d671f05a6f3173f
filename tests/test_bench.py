"""The scripts of `bench/`: what they say about where they ran."""

import importlib.util
from importlib import metadata
from pathlib import Path

import deepinfer_jax

BENCH = Path(__file__).parents[1] / "bench"


def test_versions_are_known_without_an_installation(monkeypatch):
    """A checkout on the path is enough to run, and what is installed may be another version."""
    installed = metadata.version

    def version(name):
        if name.replace("_", "-").startswith("deepinfer"):
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    spec = importlib.util.spec_from_file_location("environment", BENCH / "environment.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(metadata, "version", version)
    assert script.versions()["deepinfer-jax"] == deepinfer_jax.__version__
