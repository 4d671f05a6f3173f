"""How long does a decode step take with us, with plain XLA, with torch and with transformers?

The same slice of the released model for all (`released.py`), one after another on the same GPU in
one run: ours with its kernels, with those in CUDA C++ for stored weights ("ours-cuda") and without
any ("xla"); a step of plain torch written for this (`peers/torch_step.py`, which a test compares
with ours), called and as a CUDA graph, with its small pieces compiled, and with FlashMLA's
attention where that is installed; and transformers' nearest model. What is stored how, and what
differs, stands in each one's `stored`. Every peer runs in a process of its own and within a time of
its own, so that one that fails takes no other with it.

    python bench/gpu_peers.py --machine h200
    python bench/gpu_peers.py --machine h200 --peers ours torch-graph --cells 1,262144 64,262144
    python bench/gpu_peers.py --machine local --small --cells 2,64 --peers torch-eager   # tries it
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import released
from environment import ROOT, write_result

from deepinfer_jax.numerics import Numerics

MODULES = {
    "ours": "ours", "ours-cuda": "ours", "xla": "ours", "torch-eager": "plain",
    "torch-graph": "plain", "torch-graph-gathered": "plain", "torch-compiled": "plain",
    "torch-flashmla": "plain",
    "transformers": "hub",
}  # fmt: skip
NEEDS = {"plain": ("torch",), "hub": ("torch", "transformers"), "ours": ()}


def cell(text: str) -> tuple[int, int]:
    batch, context = text.split(",")
    return int(batch), int(context)


def missing(name: str) -> list[str]:
    """What the peer needs and is not installed."""
    needed = NEEDS[MODULES[name]] + (("flash_mla",) if name == "torch-flashmla" else ())
    return [each for each in needed if importlib.util.find_spec(each) is None]


def run_one(given: argparse.Namespace) -> None:
    """In its own process: append a line of JSON for each cell to `given.lines`."""
    module = importlib.import_module(f"peers.{MODULES[given.one]}")
    rows = module.measured(given.one, given.cells, given.steps, given.repeats, given.small)
    with given.lines.open("a", encoding="utf-8") as file:
        print(json.dumps({"stored": module.STORED}), file=file, flush=True)
        for (batch, context), row in zip(given.cells, rows, strict=True):
            row = {"batch": batch, "context": context, **row}
            print(json.dumps(row), file=file, flush=True)


def asked(name: str, given: argparse.Namespace, lines: Path) -> dict[str, Any]:
    """The peer's answer from a process of its own: rows as far as it came, and why no further."""
    lacks = missing(name)
    if lacks:
        return {"peer": name, "failed": f"not installed: {', '.join(lacks)}", "rows": []}
    cells = [f"{batch},{context}" for batch, context in given.cells]
    command = [
        sys.executable, __file__, "--one", name, "--lines", str(lines), "--cells", *cells,
        "--steps", str(given.steps), "--repeats", str(given.repeats),
        *(["--small"] if given.small else []),
    ]  # fmt: skip
    start, failed = time.perf_counter(), None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=given.seconds)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            failed = f"exit status {done.returncode}: {said[-1] if said else ''}"
            print(done.stderr[-3000:], flush=True)
    except subprocess.TimeoutExpired:
        failed = f"not done within {given.seconds} seconds"
    text = lines.read_text(encoding="utf-8") if lines.exists() else ""
    about, *rows = [json.loads(line) for line in text.splitlines()] or [{}]
    answer = {"peer": name, **about, "seconds": time.perf_counter() - start, "rows": rows}
    return answer | ({"failed": failed} if failed else {})


def compared(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each cell: the median step of every peer, and over that of ours ("ours-cuda" without it)."""
    cells: dict[tuple[int, int], dict[str, float]] = {}
    for answer in answers:
        for row in answer["rows"]:
            found = cells.setdefault((row["batch"], row["context"]), {})
            found[answer["peer"]] = statistics.median(row["samples_ms"])
    made = []
    for (batch, context), ms in cells.items():
        own = ms.get("ours", ms.get("ours-cuda"))
        over = {} if own is None else {name: each / own for name, each in ms.items()}
        made.append({"batch": batch, "context": context, "ms": ms, "over_ours": over})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--peers", nargs="+", default=list(MODULES), choices=list(MODULES))
    parser.add_argument(
        "--cells", nargs="+", type=cell, metavar="BATCH,TOKENS",
        default=[(batch, 4096) for batch in (1, 8, 64, 256)],
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120, help="for each peer")
    parser.add_argument("--small", action="store_true", help="tiny widths, to try the script")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    parser.add_argument("--one", choices=list(MODULES), help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_one(given)
        return
    cfg, answers = released.slice_config(given.small), []
    settings = {
        "layers": cfg.num_hidden_layers, "numerics": Numerics.native(rows="pallas").fingerprint(),
        **{name: getattr(given, name) for name in ("steps", "repeats", "seconds", "small")},
        "libraries": {
            name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers",
            "flash_mla") if importlib.util.find_spec(name) is not None
        },
    }  # fmt: skip
    about = where()
    for name in given.peers:
        with tempfile.TemporaryDirectory() as folder:
            answers.append(asked(name, given, Path(folder) / "lines"))
        show(answers[-1])
        found = {"results": compared(answers), "peers": answers}
        path = write_result("gpu_peers", given.machine, __doc__, settings, found, given.out, about)
    print(path)


def where() -> dict[str, Any]:
    """`machine()` of another process: this one must not hold the GPU's memory while peers run."""
    code = "import json, environment; print(json.dumps(environment.machine()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "bench")
    return json.loads(done.stdout.splitlines()[-1])


def show(answer: dict[str, Any]) -> None:
    if "failed" in answer:
        print(f"{answer['peer']:22} failed: {answer['failed']}")
    for row in answer["rows"]:
        samples = row["samples_ms"]
        print(
            f"{answer['peer']:22} batch {row['batch']:4} tokens {row['context']:7}: "
            f"{statistics.median(samples):9.3f} ms ({min(samples):.3f} to {max(samples):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
