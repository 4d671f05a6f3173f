"""Builds our C++ and CUDA kernels with the system's compiler, once for each machine and jaxlib.

A handler must be built against the headers of the jaxlib that loads it, and for the processor that
runs it. The library is kept by a hash of what it is made of and for, so that a new jaxlib,
processor or source makes a new one and two processes never overwrite each other's.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
SUBLAYERS = SOURCE.with_name("sublayers.cc")
COMPILERS = ("c++", "g++", "clang++")
# No contraction: where a product may join an addition is written in the source.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")
CUDA_SOURCE = SOURCE.parent / "cuda" / "stored.cu"
CUDA_ARCHITECTURE = 9  # major compute capability that the CUDA kernels are written for
CUDA_FLAGS = (
    "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC",
    "-gencode=arch=compute_90a,code=sm_90a",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """What compiles a source.

    what       is built, for messages
    compilers  names to look for on the path, the first that is there is taken
    flags      of every call
    needed     what a compiler is called, and how to get one
    releases   which will do, for messages
    native     whether the library is for the processor of this machine
    """

    what: str
    compilers: tuple[str, ...]
    flags: tuple[str, ...]
    needed: tuple[str, str]
    releases: str
    native: bool


HOST = Toolchain(
    "the CPU kernels", COMPILERS, FLAGS, ("a C++ compiler", "install one (Debian: g++)"),
    "GCC 10, clang 12 or later", native=True,
)  # fmt: skip
CUDA = Toolchain(
    "the CUDA kernels", ("nvcc",), CUDA_FLAGS,
    ("NVIDIA's compiler", "install the CUDA toolkit (12.8 or later) and put its nvcc on the path"),
    "nvcc 12.8 or later and a C++ compiler", native=False,
)  # fmt: skip

_WORK = "building-"  # how folders begin in which a compiler is at work
_ABANDONED_S = 3600
ANOTHER = 'use the form of XLA, rows="tiled" (--rows tiled)'
CUDA_ANOTHER = 'use the Pallas kernels, rows="pallas" (--rows pallas)'
_FOLDER = "set XDG_CACHE_HOME to a folder that can be written"


class NoKernelsError(OSError):
    """The kernels cannot be built or loaded here; the message says why and what mends it."""


def find_compiler(another: str = ANOTHER, toolchain: Toolchain = HOST) -> str:
    """The first compiler on the path; NoKernelsError where there is none, with the mend."""
    for name in toolchain.compilers:
        found = shutil.which(name)
        if found:
            return found
    kind, mend = toolchain.needed
    raise NoKernelsError(
        f"{toolchain.what} need {kind} to be built with, and none of "
        f"{', '.join(toolchain.compilers)} is on the path: {mend}, or {another}"
    )


def cache_folder() -> Path:
    """Where built libraries are kept: $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "deepinfer-jax" / "kernels"
    except RuntimeError as error:
        raise NoKernelsError(f"there is no folder for the kernels ({error}); {_FOLDER}") from None


def possible(include: str, source: Path | None = None, toolchain: Toolchain = HOST) -> bool:
    """Whether `build` can make the library here, or has made it; makes nothing.

    source: default all of the CPU's kernels.
    """
    try:
        return bool(find_compiler(toolchain=toolchain))
    except NoKernelsError:
        pass
    sources = (SOURCE, SUBLAYERS) if source is None else (source,)
    try:
        folder = cache_folder()
        return all(_place(include, folder, each, toolchain).exists() for each in sources)
    except OSError:  # a folder that cannot be read or is nowhere
        return False


def build(
    include: str | None, folder: Path | None = None, source: Path | None = None,
    another: str = ANOTHER, toolchain: Toolchain = HOST,
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
        path = _place(include, folder, source, toolchain)
        if not path.exists():
            _build(find_compiler(another, toolchain), include, source, path, another, toolchain)
    except NoKernelsError:
        raise
    except OSError as error:
        raise NoKernelsError(
            f"{toolchain.what} could not be built in {folder}: {error}; {_FOLDER}"
        ) from error
    return path


def _place(include: str | None, folder: Path, source: Path, toolchain: Toolchain) -> Path:
    return folder / f"{source.stem}-{_fingerprint(include, source, toolchain)}.so"


def _build(
    compiler: str, include: str | None, source: Path, path: Path, another: str,
    toolchain: Toolchain,
) -> None:  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    print(f"building {toolchain.what}, once for this machine", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=_WORK, dir=path.parent) as work:
        made = Path(work) / path.name
        headers = [] if include is None else ["-isystem", include]
        command = [compiler, *toolchain.flags, *headers, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing said"]
            first = next((line for line in said if "error" in line.lower()), said[0])
            raise NoKernelsError(
                f"{toolchain.what} do not compile with {compiler} ({toolchain.releases} are "
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


def _fingerprint(include: str | None, source: Path, toolchain: Toolchain) -> str:
    """Names what the library is made of and for; not the compiler, without which it still runs."""
    digest = hashlib.sha256()
    headers = [] if include is None else sorted(Path(include, "xla", "ffi", "api").glob("*.h"))
    for part in [
        *(path.read_bytes() for path in sorted(source.parent.iterdir()) if path.is_file()),
        " ".join(toolchain.flags).encode(),
        _processor().encode() if toolchain.native else b"",
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
