"""Prompts without a reply, in a file of their own: which, why, and the line to try again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer_jax.cli.appending import LineFile, check_folder
from deepinfer_jax.cli.inputs import Given
from deepinfer_jax.cli.refusal import Refused

KEYS = ("stage", "place", "line", "index", "id", "reason", "raw")


def default_path(out: Path | None) -> Path | None:
    """Beside the results: `replies.errors.jsonl` for `replies.jsonl`; none beside a device."""
    if out is None or (out.exists() and not out.is_file()):
        return None
    return out.with_name(out.name.removesuffix(".jsonl") + ".errors.jsonl")


class Failures:
    """Writes a line for every prompt that got no reply; without a path it only counts them.

    The file is of the latest run: whatever failed before is tried again by `--resume`, and stands
    there until that begins. Where nothing has failed there is no file.
    """

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        """Raises Refused for a file that cannot be written or holds something else."""
        self.path = path
        self.refused = self.failed = 0
        self._file: LineFile | None = None
        if path is None:
            return
        check_folder(path, "--errors")
        if path.is_file() and path.stat().st_size:
            if not resume:
                raise Refused(
                    f"--errors {path} holds something already: add --resume to write it anew, or "
                    "give another file"
                )
            if not _is_ours(path):
                raise Refused(f"--errors {path} is no file of errors: give another one")
        self._file = LineFile(path, name="--errors")

    def begin(self) -> None:
        """The run begins: what an earlier one has written is dropped."""
        if self._file is not None and self.path is not None and self.path.is_file():
            self._file.clear()

    def refuse(self, given: Given, index: int, name: Any, reason: str) -> None:
        """A prompt that cannot be run."""
        self.refused += 1
        self._write("input", given, index, name, reason)

    def fail(self, given: Given, index: int, name: Any, reason: str) -> None:
        """A request that ended without a reply."""
        self.failed += 1
        self._write("run", given, index, name, reason)

    def close(self) -> None:
        """Nothing more will come."""
        if self._file is not None and self.path is not None:
            self._file.close()
            if self.path.is_file() and not self.path.stat().st_size:
                self.path.unlink()

    def _write(self, stage: str, given: Given, index: int, name: Any, reason: str) -> None:
        if self._file is not None:
            values = (stage, given.place, given.line, index, name, reason, given.raw)
            line = json.dumps(dict(zip(KEYS, values, strict=True)))
            self._file.write(line + "\n")


def _is_ours(path: Path) -> bool:
    """Whether the first line is one of a file of errors."""
    with open(path, "rb") as file:
        try:
            value = json.loads(file.readline())
        except (ValueError, RecursionError):
            return False
    return isinstance(value, dict) and tuple(value) == KEYS
