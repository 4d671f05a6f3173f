"""Builds our C++ kernels with the system's compiler, once for each machine and jaxlib.

A handler must be built against the headers of the jaxlib that loads it, and for the processor that
runs it. The library is kept by a hash of what it is made of and for, so that a new jaxlib,
processor or source makes a new one and two processes never overwrite each other's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("csrc") / "rows.cc"
COMPILERS = ("c++", "g++", "clang++")
# No contraction: where a product may join an addition is written in the source.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")


_WORK = "building-"  # how folders begin in which a compiler is at work
_ABANDONED_S = 3600
ANOTHER = 'use the form of XLA, rows="tiled" (--rows tiled)'
_FOLDER = "set XDG_CACHE_HOME to a folder that can be written"


class NoKernelsError(OSError):
    """The kernels cannot be built or loaded here; the message says why and what mends it."""


def find_compiler(another: str = ANOTHER) -> str:
    """The first C++ compiler on the path; NoKernelsError where there is none, with the mend."""
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise NoKernelsError(
        f"the CPU kernels need a C++ compiler to be built with, and none of {', '.join(COMPILERS)} "
        f"is on the path: install one (Debian: g++), or {another}"
    )


def cache_folder() -> Path:
    """Where built libraries are kept: $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "deepinfer-jax" / "kernels"
    except RuntimeError as error:
        raise NoKernelsError(
            f"there is no folder for the CPU kernels ({error}); {_FOLDER}"
        ) from None


def possible(include: str) -> bool:
    """Whether `build` can make the kernels for rows here, or has made them; makes nothing."""
    try:
        return bool(find_compiler())
    except NoKernelsError:
        pass
    try:
        return _place(include, cache_folder(), SOURCE).exists()
    except OSError:  # a folder that cannot be read or is nowhere
        return False


def build(
    include: str | None, folder: Path | None = None, source: Path | None = None,
    another: str = ANOTHER,
) -> Path:  # fmt: skip
    """The built library, made now if `folder` (default: `cache_folder()`) does not hold it.

    include: folder of XLA's headers, `jax.ffi.include_dir()`, None for a source that needs none;
    source: what to compile (default: `SOURCE`), with everything beside it; another: what to do
    where it cannot be built.

    Raises NoKernelsError where there is no compiler, it fails, or the folder cannot be written.
    """
    folder = cache_folder() if folder is None else folder
    source = SOURCE if source is None else source
    try:
        path = _place(include, folder, source)
        if not path.exists():
            _build(find_compiler(another), include, source, path, another)
    except NoKernelsError:
        raise
    except OSError as error:
        raise NoKernelsError(
            f"the CPU kernels could not be built in {folder}: {error}; {_FOLDER}"
        ) from error
    return path


def _place(include: str | None, folder: Path, source: Path) -> Path:
    return folder / f"{source.stem}-{_fingerprint(include, source)}.so"


def _build(compiler: str, include: str | None, source: Path, path: Path, another: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    print("building the CPU kernels, once for this machine", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=_WORK, dir=path.parent) as work:
        made = Path(work) / path.name
        headers = [] if include is None else ["-isystem", include]
        command = [compiler, *FLAGS, *headers, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing said"]
            first = next((line for line in said if "error" in line.lower()), said[0])
            raise NoKernelsError(
                f"the CPU kernels do not compile with {compiler} (GCC 10, clang 12 or later are "
                f"needed): {first.strip()}; {another}"
            )
        made.replace(path)  # whole or not at all, also where two processes build


def _sweep(folder: Path) -> None:
    """Remove what killed builds left behind: no build takes as long as `_ABANDONED_S`.

    By age, not by whether its process lives: that may be on another machine with this home.
    """
    for left in folder.glob(f"{_WORK}*"):
        with contextlib.suppress(OSError):  # another process was faster
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left)


def _fingerprint(include: str | None, source: Path) -> str:
    """Names what the library is made of and for; not the compiler, without which it still runs."""
    digest = hashlib.sha256()
    headers = [] if include is None else sorted(Path(include, "xla", "ffi", "api").glob("*.h"))
    for part in [
        *(path.read_bytes() for path in sorted(source.parent.iterdir()) if path.is_file()),
        " ".join(FLAGS).encode(),
        _processor().encode(),
        *(path.read_bytes() for path in headers),
    ]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Architecture and instruction sets, which -march=native goes by."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    wanted = ("model name", "flags", "Features", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join([platform.machine(), platform.processor(), *map(str, map(first.get, wanted))])
