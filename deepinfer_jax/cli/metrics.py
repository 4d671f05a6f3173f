"""`--metrics FILE`: a line for every step of the engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_jax.cli.appending import LineFile, check_folder
from deepinfer_jax.cli.refusal import Failed, Refused

if TYPE_CHECKING:
    from deepinfer_jax.engine import StepRecord


_BEGIN = b'{"time": '  # of a line
_LONGEST = 65536  # bytes of a line, and more


class Metrics:
    """Observes an engine. Without a path, nothing; a file that cannot go on does not stop a run."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        """Raises Refused for a file that cannot be written, or holds something that is not ours."""
        self._file: LineFile | None = None
        if path is None:
            return
        check_folder(path, "--metrics")
        if path.is_file() and path.stat().st_size:
            if not resume:
                raise Refused(
                    f"--metrics {path} holds something already: add --resume to append to it, or "
                    "give another file"
                )
            if not _is_ours(path):
                raise Refused(f"--metrics {path} is no file of steps: give another one")
        self._file = LineFile(path, name="--metrics")
        if path.is_file():
            _cut_torn(path)

    def __call__(self, record: StepRecord) -> None:
        """Write the line of a step."""
        from deepinfer_jax.engine import metrics

        if self._file is None:
            return
        try:
            self._file.write(metrics.to_line(record))
        except Failed as error:
            print(f"{error}; no more of them are written", file=sys.stderr)
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Nothing more will come."""
        if self._file is not None:
            self._file.close()


def _is_ours(path: Path) -> bool:
    """Whether it begins with a record of a step, whole or not."""
    with open(path, "rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN


def _cut_torn(path: Path) -> None:
    """Leave whole lines: the next one would be joined to the beginning of one."""
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _LONGEST)
        file.seek(start)
        tail = file.read()
    if not tail.endswith(b"\n"):
        os.truncate(path, start + tail.rfind(b"\n") + 1)
