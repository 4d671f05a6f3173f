"""Real processes that are killed and interrupted in the middle of a run, with a model."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from tests import tiny_model

COUNT = 24


def start(out: Path, prompts: Path, *more: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "deepinfer_jax", "generate", "--model", str(tiny_model.folder()),
        "--prompts", str(prompts), "--out", str(out), "--in-order", "--no-timing",
        "--batch-size", "2", *more,
    ]  # fmt: skip
    folder = jax.config.values["jax_compilation_cache_dir"]
    kept = {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        command, env={**os.environ, **kept}, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def at_work(process: subprocess.Popen, out: Path, before: int):
    """Wait until the process has written something more, or has ended."""
    with process:
        while size(out) <= before and process.poll() is None:
            time.sleep(0.01)
        yield


@pytest.mark.usefixtures("usual_signal")
@pytest.mark.slow
@pytest.mark.exhaustive  # six processes that import, load and look programs up
def test_a_run_that_is_killed_and_interrupted_has_the_bytes_of_one_that_is_not(tmp_path):
    prompts, whole, out = (tmp_path / f"{name}.jsonl" for name in ("prompts", "whole", "out"))
    lengths = [1 + 7 * n % 90 for n in range(COUNT)]
    prompts.write_text(
        "".join(json.dumps({"prompt": f"Add {n}.", "max_tokens": m}) + "\n"
                for n, m in enumerate(lengths))
    )  # fmt: skip
    with start(whole, prompts) as process:
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, said.count(f"requests   {COUNT} done, 0 failed")) == (0, 1)
    want, chance, resume = whole.read_bytes(), random.Random(3), []
    for _ in range(3):
        process = start(out, prompts, *resume)
        with at_work(process, out, size(out)):
            time.sleep(chance.uniform(0, 0.2))
            process.kill()
        assert want.startswith(out.read_bytes())
        resume = ["--resume"]
    process = start(out, prompts, *resume)
    with at_work(process, out, size(out)):
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
    if process.returncode:  # the last of the requests may have been running
        assert process.returncode == 130
        assert "the same command with --resume goes on" in said
    with start(out, prompts, *resume) as process:
        assert process.stderr is not None
        process.stderr.read()
    assert process.returncode == 0
    assert out.read_bytes() == want
