"""Files that grow line by line and can be taken up again: whole lines, whatever stops the run."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from deepinfer_jax.cli.refusal import Failed, Refused

try:
    import fcntl
except ImportError:  # no Unix: there two runs can write to one file
    fcntl = None


class LineFile:
    """A file to append whole lines to, each by one call of the system, nothing held back.

    What was written survives the end of the process, also by `kill -9`; `close` asks the system to
    bring it to the disk. Where a line does not fit on the disk its beginning is taken back. While
    it is open no other run can write to it.
    """

    encoding = "utf-8"

    def __init__(self, path: Path, *, name: str) -> None:
        """`name`: the option that named it, for errors.

        Raises Refused where it cannot be written, or another run writes to it.
        """
        self.path, self._name = path, name
        self._number: int | None = None
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise Refused(f"{name} {path} cannot be written: {error.strerror}") from None
        if not _locked(number):
            os.close(number)
            raise Refused(
                f"{name} {path} is being written by another run: wait for its end, or give another "
                "file"
            )
        self._number = number

    def clear(self) -> None:
        """Drop what it holds."""
        assert self._number is not None, "the file is closed"
        os.ftruncate(self._number, 0)

    def write(self, line: str) -> None:
        """Append `line`, which ends with its newline. Raises Failed where that cannot be done."""
        number = self._number
        assert number is not None, "the file is closed"
        start, data = os.fstat(number).st_size, line.encode("utf-8")
        try:
            while data:  # once, but for a disk that fills up
                data = data[os.write(number, data) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # no regular file
                os.ftruncate(number, start)
            raise Failed(f"{self._name} {self.path}: {error.strerror}") from None

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Close it, once its lines are on the disk."""
        if self._number is None:
            return
        number, self._number = self._number, None
        with contextlib.suppress(OSError):  # no regular file
            os.fsync(number)
        os.close(number)


def _locked(number: int) -> bool:
    """Have a regular file for this process, until it is closed; False where another one has it.

    A file system without locks has nobody to ask.
    """
    if fcntl is None or not stat.S_ISREG(os.fstat(number).st_mode):
        return True
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def check_folder(path: Path, name: str) -> None:
    """Raise Refused where there is no folder for the file that option `name` gives."""
    if not path.parent.is_dir():
        raise Refused(f"{name} {path}: the folder {path.parent} does not exist; make it first")


def check_apart(files: list[tuple[str, Path | None]]) -> None:
    """Raise Refused where two options name one file, whether it exists or not."""
    seen: dict[str, str] = {}
    for name, path in files:
        if path is None:
            continue
        real = os.path.realpath(path)
        if real in seen and not _is_device(path):
            raise Refused(
                f"{seen[real]} and {name} are the same file {path}: each needs one of its own"
            )
        seen[real] = name


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()
