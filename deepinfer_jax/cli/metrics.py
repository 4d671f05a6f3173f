"""`--metrics FILE`: a line for every step of the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_jax.cli.appending import LineFile, check_folder
from deepinfer_jax.cli.refusal import Failed, Refused

if TYPE_CHECKING:
    from deepinfer_jax.engine import StepRecord


class Metrics:
    """Observes an engine. Without a path, nothing; a file that cannot go on does not stop a run."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        """Raises Refused for a file that cannot be written, or holds something already."""
        self._file: LineFile | None = None
        if path is None:
            return
        check_folder(path, "--metrics")
        if path.is_file() and path.stat().st_size and not resume:
            raise Refused(
                f"--metrics {path} holds something already: add --resume to append to it, or give "
                "another file"
            )
        self._file = LineFile(path, name="--metrics")

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
