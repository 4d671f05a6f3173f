"""Where compiled programs and measured times are kept between runs of the command."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX was told another.

    A folder that cannot be made costs time, not correctness: then nothing is kept.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:  # $JAX_COMPILATION_CACHE_DIR
        return
    try:
        folder = cache_folder() / _processor()
        folder.mkdir(parents=True, exist_ok=True)
        first = not any(folder.iterdir())
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.strerror else error
        print(f"compiled programs are not kept: {why}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if first:
        print(f"compiling for the first time, about a minute; kept in {folder}", file=sys.stderr)


def cache_folder() -> Path:
    """The project's folder in the user's cache; it need not exist.

    Raises FileNotFoundError for a user who has no home, as in some containers.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "deepinfer-jax"
    except RuntimeError as error:
        raise FileNotFoundError(
            f"there is no home folder to keep files in ({error}): set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from None


def _processor() -> str:
    """Names the kind of processor: programs for one may not run on another with the same home."""
    kind = platform.machine() + platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        kind += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass  # not Linux
    return f"{platform.machine()}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"
