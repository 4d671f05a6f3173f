"""What every result says about where it comes from, and where it is written."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """Processor, cores, memory, load; and the accelerators that JAX sees."""
    import jax

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")
    found = {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 1),
    }
    if jax.default_backend() != "cpu":
        found["accelerators"] = [device.device_kind for device in jax.devices()]
    return found


def versions() -> dict[str, str]:
    """Of Python, the packages that decide bits and speed, and the commit."""
    import deepinfer_jax

    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy", "ml_dtypes")},
        "deepinfer-jax": deepinfer_jax.__version__,
        "commit": os.environ.get("COMMIT") or commit or "unknown",  # a copy has no history
    }


def weights(folder: Path) -> str:
    """Sixteen hex digits that name the tensors of a model's folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def write_result(
    name: str, label: str, about: str | None, config: dict[str, Any], found: dict[str, Any],
    folder: Path | None = None, where: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a result to NAME-LABEL.json in bench/results or in `folder`; returns the path.

    about: the script's docstring, whose first line is the question.
    config: the model, its numerics, and the sizes of this run.
    found: samples and answers, as the script arranges them.
    where: `machine()` before the run, whose load is of interest; default: now.
    """
    data = {
        "question": (about or "").partition("\n")[0],
        "machine": where or machine(),
        "versions": versions(),
        "config": config,
        **found,
    }
    target = (folder or ROOT / "bench" / "results") / f"{name}-{label}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return target
