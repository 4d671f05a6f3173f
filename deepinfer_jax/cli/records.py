"""Results as JSON Lines: written as they finish, taken up again after an interruption."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deepinfer_jax.cli.refusal import Refused

if TYPE_CHECKING:
    from deepinfer_jax.requests import Request, Result


def record(result: Result, index: int) -> dict[str, Any]:
    """A result as it stands on a line; `index` is its place among the prompts."""
    return {
        "id": result.id,
        "index": index,
        "prompt": result.prompt,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "tokens": result.tokens,
        "logprobs": result.logprobs,
        "logprobs_processed": result.logprobs_processed,
        "kept_mass": result.kept_mass,
        "seed": result.seed,
        "timing": dataclasses.asdict(result.timing),
    }


class Lines:
    """Writes one line per result and hands each to the system at once.

    `in_order`: hold a line back until those before it are written; `close` writes what is held.
    """

    def __init__(self, stream: TextIO, *, in_order: bool, indices: Sequence[int]):
        """`indices`: the places of the results to come."""
        self._stream = stream
        self._in_order = in_order
        self._due = sorted(indices, reverse=True)
        self._held: dict[int, str] = {}

    def write(self, result: Result, index: int) -> None:
        line = json.dumps(record(result, index), ensure_ascii=False, allow_nan=False)
        if not self._in_order:
            self._put(line)
            return
        self._held[index] = line
        while self._due and self._due[-1] in self._held:
            self._put(self._held.pop(self._due.pop()))

    def close(self) -> None:
        for index in sorted(self._held):
            self._put(self._held[index])
        self._held.clear()

    def _put(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def open_out(path: Path, *, resume: bool) -> TextIO:
    """The file to append to, opened before any work is done for it.

    Raises Refused where it cannot be written, or holds results and `resume` is not set.
    """
    if not path.parent.is_dir():
        raise Refused(f"--out {path}: the folder {path.parent} does not exist; make it first")
    if path.is_file() and path.stat().st_size and not resume:
        raise Refused(
            f"--out {path} holds results already: add --resume to run what is missing, or give "
            "another file"
        )
    try:
        return open(path, "a", encoding="utf-8", newline="\n")
    except OSError as error:
        raise Refused(f"--out {path} cannot be written: {error.strerror}") from None


def finished_ids(path: Path, requests: Sequence[Request]) -> set[str]:
    """Ids of the requests that have a line in `path`; a torn last line is cut off.

    Raises Refused where a line is not a result of these requests.
    """
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    seeds = {str(request.id): request.seed for request in requests}
    found = set()
    for number, line in enumerate(whole.decode("utf-8", "replace").split("\n")[:-1], 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, Mapping) or "id" not in value:
            raise Refused(f"{path}:{number} is not a result: give another file with --out")
        name = str(value["id"])
        if seeds.get(name) != value.get("seed"):
            raise Refused(
                f"{path}:{number}: id {name!r} with seed {value.get('seed')} is not of this run; "
                "use the same prompts and --seed, or give another file with --out"
            )
        found.add(name)
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return found
