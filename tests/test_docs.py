"""The documentation: its blocks run, its links lead somewhere, its reference is the code's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs_page import blocks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.parent.name != "api"]
# README's installation is run by .ci/run itself.
RUN = [page for page in WRITTEN if page.name != "README.md" and blocks(page.read_text("utf-8"))]
# A group of pages shares a process: "shared" the programs of the README's example, "learning" a
# rollout and a gradient. Pages with programs of their own, or with many processes, are "special";
# that of meshes sets the number of devices, which a process does once.
KINDS = {
    "special": {"determinism", "images", "options", "structured-output", "tutorial-pipeline"},
    "learning": {"rl", "tutorial-trainer"},
    "meshes": {"parallel"},
    "torch": {"ascend", "ascend_executor"},
}
GROUPS = {kind: [page for page in RUN if page.stem in names] for kind, names in KINDS.items()}
GROUPS["shared"] = [page for page in RUN if page.stem not in set().union(*KINDS.values())]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", GROUPS)
def test_every_block_runs(group):
    if group == "torch":
        pytest.importorskip("torch", reason="the executor of these pages runs programs by torch")
    settings = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs_page", *map(str, GROUPS[group])],
        env=settings, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_no_block_escapes(page):
    """An indented block has no language, so nothing runs it; a fence of another name neither."""
    text = page.read_text("utf-8")
    fences = re.findall(r"^```(\S*)\n.*?^```$", text, re.DOTALL | re.MULTILINE)
    assert set(fences) <= {"python", "bash", "console", "json", "text"}
    unfenced = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"^[ \t]*\n(?: {4}|\t).*", unfenced, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    found = [page.parent / target for target in LINK.findall(page.read_text("utf-8"))]
    assert not [str(target) for target in found if not target.exists()]


def test_the_reference_is_that_of_the_docstrings():
    command = [sys.executable, str(ROOT / "docs" / "build_api.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_page_is_found_from_the_index():
    """docs/README.md leads to every page of the folder."""
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    linked = {(ROOT / "docs" / target).resolve() for target in LINK.findall(index)}
    missing = [page.name for page in WRITTEN if page.parent == ROOT / "docs"
               and page.name != "README.md" and page.resolve() not in linked]  # fmt: skip
    assert not missing
