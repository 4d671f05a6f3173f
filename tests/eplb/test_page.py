"""The example of docs/eplb.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_example_runs_and_does_what_the_page_says(capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    text = (Path(__file__).parents[2] / "docs/eplb.md").read_text("utf-8")
    space = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/eplb.md", "exec"), space)
    pyplot.close("all")
    plan = space["plan"]
    assert 1.9 < plan.before < 2.1
    assert 1.02 < plan.after < 1.05
    assert 14 < plan.moved.remote < 26
    assert len(capsys.readouterr().out.splitlines()) == 4
