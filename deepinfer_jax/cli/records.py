"""Results as JSON Lines: written as they finish, taken up again after an interruption."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deepinfer_jax.cli.appending import LineFile, check_folder
from deepinfer_jax.cli.refusal import Failed, Refused
from deepinfer_jax.whole_files import replacing

if TYPE_CHECKING:
    from deepinfer_jax.requests import Request, Result

KINDS: Mapping[str, Any] = {  # the keys of a line, in order, and what stands there
    "id": str | int,
    "index": int,
    "model": str,
    "prompt": str | list,
    "options": dict,
    "text": str,
    "finish_reason": str,
    "prompt_tokens": int,
    "tokens": list,
    "logprobs": list,
    "logprobs_processed": list,
    "kept_mass": list,
    "seed": int,
    "numerics": str,
    "weights": str,
    "timing": dict,
}
OPTIONAL = {"timing", "weights"}  # keys that a line may lack; earlier versions wrote no "weights"


def asked(request: Request, model: str, weights: str) -> dict[str, Any]:
    """What a reply was asked for, as it stands on its line: all that the reply depends on.

    weights: `checkpoint.digest` of the model.

    options: the fields of `Options` but the seed, and `tools`, `schema` and the keys of `images`
    where they were given.
    Fields after `grammar` are left out where they have their defaults, so that files of earlier
    versions are taken up again.
    seed: the noise seed.
    """
    fields = dataclasses.fields(request.options)
    since = [field.name for field in fields].index("grammar") + 1
    late = {f.name for f in fields[since:] if getattr(request.options, f.name) == f.default}
    options = dataclasses.asdict(request.options)
    options = {name: value for name, value in options.items() if name not in late | {"seed"}}
    if "logit_bias" in options:
        options["logit_bias"] = {str(token): bias for token, bias in options["logit_bias"]}
    return {
        "id": request.id,
        "model": model,
        "prompt": request.prompt,
        "options": {**options, **request.chat},
        "seed": request.seed,
        "weights": weights,
    }


def unwritable(asked: Mapping[str, Any], place: str) -> str:
    """Why a value cannot be written as JSON in UTF-8, to be known before hours of work; or ""."""
    try:
        _json(asked).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        return f"{place} cannot be written as JSON: {error}"
    return ""


def _json(value: Mapping[str, Any], escaped: bool = False) -> str:
    return json.dumps(value, ensure_ascii=escaped, allow_nan=False)


def record(
    result: Result, index: int, asked: Mapping[str, Any], timed: bool = True
) -> dict[str, Any]:
    """A result as it stands on a line, by `KINDS`; `index` is its place among the prompts.

    `timed`: whether the timing is there, the only part that differs from run to run.
    """
    beside = {
        "index": index,
        **{name: asked[name] for name in ("model", "prompt", "options", "weights")},
        "timing": dataclasses.asdict(result.timing),
    }
    keys = [key for key in KINDS if timed or key != "timing"]
    return {key: beside[key] if key in beside else getattr(result, key) for key in keys}


class Lines:
    """Writes one line per result and hands each to the system at once.

    `in_order`: hold a line back until those before it are written or will not come; `close` writes
    what is held. `timed`: see `record`. A stream that is not UTF-8, as some terminals, gets the
    escapes of JSON for what is not ASCII.
    """

    def __init__(
        self,
        stream: TextIO | LineFile,
        asked: Mapping[int, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
        *,
        in_order: bool,
        indices: Sequence[int],
        timed: bool = True,
    ):
        """`asked`: of every request; `indices`: the places among them of the results to come."""
        self._stream = stream
        self._timed = timed
        self.count = 0  # results so far
        self._asked = asked
        self._escaped = not _is_utf8(stream)
        self._in_order = in_order
        self._due = sorted(indices, reverse=True)
        self._held: dict[int, str | None] = {}  # None: it will not come

    def write(self, result: Result, index: int) -> None:
        """Write the result of request number `index`, or hold it back until its turn.

        Raises Failed, naming the request, where it cannot be written; then nothing more is.
        """
        line = _json(record(result, index, self._asked[index], self._timed), self._escaped)
        if self._in_order:
            self._held[index] = line
            self._release()
        else:
            self._put(line, index)
        self.count += 1

    def skip(self, index: int) -> None:
        """No result of this request will come: those behind it need not wait."""
        if self._in_order:
            self._held[index] = None
            self._release()

    def close(self) -> None:
        """Write the lines still held back, in order. The stream stays open."""
        held, self._held = self._held, {}
        for index in sorted(held):
            self._put(held[index], index)

    def _release(self) -> None:
        while self._due and self._due[-1] in self._held:
            index = self._due.pop()
            self._put(self._held.pop(index), index)

    def _put(self, line: str | None, index: int) -> None:
        if line is None:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except Failed as error:
            self._held.clear()
            name = reprlib.repr(self._asked[index]["id"])
            raise Failed(
                f"the result of request {name} cannot be written: {error}; the lines before it are "
                "whole: make room, and the same command with --resume goes on"
            ) from None


def _is_utf8(stream: TextIO | LineFile) -> bool:
    """Whether every character can be written; a stream in memory has no encoding."""
    encoding = getattr(stream, "encoding", None)
    return encoding is None or codecs.lookup(encoding).name == "utf-8"


# -- the file of an earlier run --------------------------------------------------------------------


def open_out(path: Path, *, resume: bool) -> LineFile:
    """The file to append to, opened before any work is done for it.

    Raises Refused where it cannot be written or taken up again, or holds results and `resume` is
    not set.
    """
    check_folder(path, "--out")
    if path.is_file() and path.stat().st_size and not resume:
        raise Refused(
            f"--out {path} holds results already: add --resume to run what is missing, or give "
            "another file"
        )
    if resume and path.exists() and not path.is_file():
        raise Refused(f"--resume needs a file to go on with: {path} is none")
    return LineFile(path, name="--out")


def finished(path: Path, asked: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Ids of the requests that have a line in `path`, each with the numerics of its result.

    A torn last line is cut off; a whole one that lacks only its newline is given it.

    Raises Refused, and leaves the file alone, where a line is not a result of these requests, a
    second one of the same, or the end of the file cannot be a torn one.
    """
    data = path.read_bytes()
    wanted = {str(one["id"]): json.loads(_json(one)) for one in asked}
    *lines, tail = data.split(b"\n")
    place = f"{path}:{len(lines) + 1}"
    whole = _begins_with_a_value(tail)
    found: dict[str, str] = {}
    first: dict[str, int] = {}
    for number, line in enumerate([*lines, tail] if whole else lines, 1):
        name, numerics = _finished(f"{path}:{number}", line, wanted)
        if name in found:
            raise Refused(
                f"{path}:{number}: the result of id {reprlib.repr(name)} stands in line "
                f"{first[name]} already: remove one of the two, or give another file with --out"
            )
        found[name], first[name] = numerics, number
    if whole:
        with open(path, "ab") as file:
            file.write(b"\n")
    elif tail:
        if not _is_torn(tail, asked):
            raise Refused(f"{place} is not a result: give another file with --out")
        os.truncate(path, len(data) - len(tail))
    return found


def result_of(line: bytes) -> Mapping[str, Any] | None:
    """The result on a line, by its keys; None where the line is none."""
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, Mapping):
        return None
    keys = [key for key in KINDS if key in value or key not in OPTIONAL]
    return value if all(isinstance(value.get(key), KINDS[key]) for key in keys) else None


def settle(path: Path, places: Mapping[str, int], *, in_order: bool) -> bool:
    """Give the lines of `path` the `places` of their prompts, by their ids, as `index`, and sort
    them by it if `in_order`; whether there was anything to do.

    Where prompts came between others, lines of earlier runs have the places of then; one that was
    interrupted, or a retry, leaves lines behind those that should follow them. The new file takes
    the place of the other in one step of the system.

    Raises Failed where there is no room for it; the other one stays.
    """
    path = path.resolve()
    lines, start, moved = [], 0, False
    with open(path, "rb") as source:
        for line in source:
            value = json.loads(line)
            index = places[str(value["id"])]
            moved = moved or index != value["index"]
            lines.append((index, start, len(line)))
            start += len(line)
    ordered = sorted(lines) if in_order else lines
    if not moved and lines == ordered:
        return False
    try:
        with open(path, "rb") as source, replacing(path) as target:
            for index, start, length in ordered:
                source.seek(start)
                target.write(_placed(source.read(length), index))
    except OSError as error:
        raise Failed(
            f"--out {path} has all results, but not in their places: {error.strerror}; "
            "make room, and the same command puts them there"
        ) from None
    return True


def _placed(line: bytes, index: int) -> bytes:
    """The line of a result with this place."""
    value = json.loads(line)
    if value["index"] == index:
        return line
    return f"{_json({**value, 'index': index})}\n".encode()


def check_numerics(path: Path, found: Mapping[str, str], numerics: str) -> None:
    """Raise Refused where a result of `finished` was not made with these numerics."""
    for name, before in found.items():
        if before != numerics:
            raise Refused(
                f"{path}: the result of id {reprlib.repr(name)} was made with other numerics: "
                f"{reprlib.repr(before)} there, {numerics!r} now; run on the same kind of device "
                "with the same version, or give another file with --out"
            )


def _begins_with_a_value(tail: bytes) -> bool:
    """Whether a whole JSON value stands there: then nothing was torn."""
    try:
        json.JSONDecoder().raw_decode(tail.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return True


def _is_torn(tail: bytes, asked: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `tail` is the beginning of a line of one of these requests, up to its second key.

    Zeros at its end are what a power cut leaves of bytes that never reached the disk.
    """
    tail = tail.rstrip(b"\0")
    heads = (f'{_json({"id": one["id"]})[:-1]}, "index": '.encode() for one in asked)
    return any(head[: len(tail)] == tail[: len(head)] for head in heads)


def _finished(place: str, line: bytes, wanted: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Id and numerics of a line whose request is among `wanted` and was the same in everything."""
    value = result_of(line)
    if value is None:
        raise Refused(f"{place} is not a result: give another file with --out")
    name = str(value["id"])
    if name not in wanted:
        raise Refused(
            f"{place}: id {reprlib.repr(name)} is not of this run; give another file with --out"
        )
    differing = _differing(value, wanted[name])
    if differing:
        raise Refused(
            f"{place}: the result of id {reprlib.repr(name)} was made with another {differing}; "
            "use the same as before, or give another file with --out"
        )
    return name, value["numerics"]


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """What differs between a line and what is asked now, the first of it, with both values."""
    options, wanted = old["options"], new["options"]
    pairs = [(name, old[name], new[name]) for name in ("model", "prompt")]
    pairs += [(name, options.get(name), wanted.get(name)) for name in {**wanted, **options}]
    pairs.append(("seed", old["seed"], new["seed"]))
    pairs.append(("set of weights", old.get("weights", new["weights"]), new["weights"]))
    for name, before, now in pairs:
        if before != now:
            return f"{name}: {_short(before)} there, {_short(now)} now"
    return None


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        text = reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
