"""Runs pages of the documentation, each in a folder of its own: `python -m tests.docs_page PAGE...`

The Python blocks of a page share one namespace, as in a session; its bash blocks run between them,
in the same folder. Blocks of other kinds are for reading. Several pages share a process, so that
what one of them traced and compiled is there for the next.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[tuple[str, str, int]]:
    """(language, content, line where the content begins) of every block that is run."""
    return [
        (found[1], found[2], text.count("\n", 0, found.start(2)) + 1)
        for found in BLOCK.finditer(text)
    ]


def run(page: Path) -> None:
    """Every block; an error names the page and the line."""
    space: dict[str, object] = {"__name__": page.stem}
    tools = str(Path(sys.executable).parent)
    settings = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    for language, content, line in blocks(page.read_text("utf-8")):
        print(f"-- {page.name}:{line}", flush=True)
        if language == "bash":
            subprocess.run(["bash", "-euo", "pipefail", "-c", content], check=True, env=settings)
        else:
            exec(compile("\n" * (line - 1) + content, str(page), "exec"), space)


def run_all(pages: list[Path]) -> None:
    """One after the other, and the processor seconds of each."""
    for page in [page.absolute() for page in pages]:  # before the folder changes
        start = os.times()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            run(page)
            os.chdir(page.parent)
        spent = sum(os.times()[:4]) - sum(start[:4])
        print(f"-- {page.name}: {spent:.0f} s of a core", flush=True)


if __name__ == "__main__":
    run_all([Path(name) for name in sys.argv[1:]])
