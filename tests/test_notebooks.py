"""Every notebook runs from the first cell to the last."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
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
