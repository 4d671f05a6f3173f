"""The scripts of `bench/`: what they say about where they ran."""

import importlib.util
import json
from importlib import metadata
from pathlib import Path

import deepinfer_jax

BENCH = Path(__file__).parents[1] / "bench"


def environment():
    spec = importlib.util.spec_from_file_location("environment", BENCH / "environment.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_versions_are_known_without_an_installation(monkeypatch):
    """A checkout on the path is enough to run, and what is installed may be another version."""
    installed = metadata.version

    def version(name):
        if name.replace("_", "-").startswith("deepinfer"):
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    script = environment()
    monkeypatch.setattr(metadata, "version", version)
    assert script.versions()["deepinfer-jax"] == deepinfer_jax.__version__


def test_every_result_begins_with_where_it_comes_from(tmp_path):
    about = "Does it?\n\nIt does."
    path = environment().write_result("a", "b", about, {"name": "c"}, {"results": [1]}, tmp_path)
    assert path == tmp_path / "a-b.json"
    data = json.loads(path.read_text("utf-8"))
    assert list(data) == ["question", "machine", "versions", "config", "results"]
    assert (data["question"], data["config"], data["results"]) == ("Does it?", {"name": "c"}, [1])
    assert {"cpu", "cores", "memory_bytes", "load_average"} <= set(data["machine"])


def test_the_readme_names_every_script():
    text = (BENCH / "README.md").read_text("utf-8")
    for path in BENCH.glob("*.py"):
        if "write_result(" in path.read_text("utf-8"):
            assert path.name == "environment.py" or f"| `{path.stem}` |" in text, path.name
