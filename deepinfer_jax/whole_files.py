"""Files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: str | Path, *, text: bool = False) -> Iterator[IO[Any]]:
    """A file for writing that takes the place of `path` in one step of the system on success.

    It stands beside `path`, as NAME.partial, and vanishes on failure; what was at `path` stays
    then. A link is followed, and a file that was there passes on its permissions.

    Args:
      path: where the file shall be.
      text: write text (UTF-8, lines end as in the text), not bytes.

    Raises OSError where the system refuses.
    """
    path = Path(path).resolve()
    partial = path.with_name(path.name + ".partial")
    how: dict[str, Any] = {"encoding": "utf-8", "newline": "\n"} if text else {}
    try:
        with partial.open("w" if text else "wb", **how) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
