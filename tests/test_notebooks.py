"""Every notebook runs from the first cell to the last, and readers see that very run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
notebooks = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)


def cells(source: str) -> list[tuple[str, str]]:
    """(kind, text) of the cells of a file in percent format."""
    found = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        text = body.strip()
        if head.strip() == "[markdown]":
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        found.append(("markdown" if "[markdown]" in head else "code", text))
    return found


@notebooks
def test_the_executed_copy_is_of_the_source(path):
    """The same cells, run in order without an error, with something to see."""
    made = json.loads(path.with_suffix(".ipynb").read_text("utf-8"))["cells"]
    shown = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in made]
    assert shown == cells(path.read_text("utf-8"))
    code = [cell for cell in made if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", ())]
    assert not [output for output in outputs if output.get("name") == "stderr"]


@pytest.mark.exhaustive
@notebooks
def test_a_notebook_runs(path):
    """In percent format a notebook is a program; plots are drawn and thrown away."""
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("notebooks draw with matplotlib, which is not installed (extra: notebooks)")
    settings = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(path)],
        env=settings, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
