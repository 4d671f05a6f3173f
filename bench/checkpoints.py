"""What does a released checkpoint cost on its way to a mesh of eight devices, to Orbax and back?

A random model of about 1 GB in the released layout goes straight onto 8 CPU devices of 1, 2 and 4
processes, with experts on slots, vocabulary and Engram rows split. Counted are bytes that a process
takes out of the files, and bytes that its devices hold. Then it is converted to Orbax and back,
which must give the same files, and restored from Orbax onto another shape of mesh, which must give
the arrays that loading gives there; of Orbax, bytes that system calls read are counted. Every
figure is of processes of its own; processor seconds stand beside elapsed ones, for machines with
other work.

    python bench/checkpoints.py --machine cpu2
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from checkpoint_load import write
from environment import machine, write_result

from deepinfer_jax import checkpoint, layout, params
from deepinfer_jax.axes import Rules
from deepinfer_jax.checkpoint import reading
from deepinfer_jax.cli import cluster
from deepinfer_jax.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
DEVICES = 8
RULES = dataclasses.replace(
    Rules.of(expert="expert", vocab="expert", engram_rows="expert"), padded=("engram_rows",)
)
PROCESSES = (1, 2, 4)


def measured(what: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What it returns, and its seconds, processor seconds and growth of the largest memory."""
    jax.block_until_ready(jax.numpy.zeros(()))
    before, start, busy = peak_bytes(), time.perf_counter(), time.process_time()
    made = jax.block_until_ready(what())
    return made, {
        "s": time.perf_counter() - start,
        "cpu_s": time.process_time() - busy,
        "more_bytes": peak_bytes() - before,
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_by_calls() -> int:
    """Bytes that this process has read by system calls, pages of mapped files not among them."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(lines[0].removeprefix("rchar: "))


def counting() -> list[int]:
    """From now on sizes of all pieces that are taken out of released files."""
    pieces, sizes = reading._pieces, []

    def counted(*args: Any) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        for place, piece in pieces(*args):
            sizes.append(piece.nbytes)
            yield place, piece

    reading._pieces = counted
    return sizes


def held_bytes(tree: Any) -> int:
    """Bytes of the devices of this process; a buffer that several share counts once."""
    held = {
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }
    return sum(size for _, size in held)


# -- what a process does ---------------------------------------------------------------------------


def load(folder: Path) -> dict[str, Any]:
    """Straight from the released files, with experts on slots."""
    cfg, mesh = ModelConfig.from_json(folder), layout.device_mesh(1, DEVICES)
    placements = layout.initial_placements(cfg, DEVICES)
    sizes = counting()
    tree, took = measured(lambda: layout.load(folder, mesh, placements, RULES))
    return {**took, "read_bytes": sum(sizes), "held_bytes": held_bytes(tree)}


def convert(source: Path, folder: Path) -> dict[str, Any]:
    onto = checkpoint.over_all(ModelConfig.from_json(source))
    made, took = measured(lambda: checkpoint.convert(source, folder, onto, 150 << 20))
    return {**took, "made": made}


def restore(folder: Path, released: Path) -> dict[str, Any]:
    """Onto two times four devices; the same arrays as loading gives there."""
    mesh = layout.device_mesh(2, DEVICES // 2)
    before = read_by_calls()
    tree, took = measured(lambda: layout.restore(folder, mesh, RULES))
    read = read_by_calls() - before
    want = layout.load(released, mesh, rules=RULES)
    for path, leaf in params.by_path(tree).items():
        other = params.by_path(want)[path]
        for got, here in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
            bits = {np.asarray(each.data).tobytes() for each in (got, here)}
            if got.index != here.index or len(bits) > 1:
                raise ValueError(f"{path} differs from the released files at {got.index}")
    return {**took, "read_bytes": read, "held_bytes": held_bytes(tree)}


STEPS = {"load": load, "convert": convert, "restore": restore, "write": write}


# -- all of it -------------------------------------------------------------------------------------


def child(step: str, *paths: Any, processes: int = 1) -> list[dict[str, Any]]:
    """What each process of a step says."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--step", step, *map(str, paths), "--processes",
             str(processes), "--number", str(number), "--port", str(port)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for number in range(processes)
    ]  # fmt: skip
    said = [each.communicate()[0] for each in running]
    if any(each.returncode for each in running):
        raise RuntimeError(f"{step} of {processes} processes failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def one_step(given: argparse.Namespace) -> None:
    """A process of `child`."""
    jax.config.update("jax_num_cpu_devices", DEVICES // given.processes)
    job = cluster.Job(f"127.0.0.1:{given.port}", given.processes, given.number)
    cluster.join(job)
    if given.step == "write":
        gigabytes, folder = given.paths
        print(json.dumps(write(Path(folder), float(gigabytes), 150 << 20)))
        return
    print(json.dumps(STEPS[given.step](*map(Path, given.paths))))


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of repeated runs of processes: the slowest of each run, the median run; most bytes of one."""
    every = [each for run in runs for each in run]
    made = {
        "s": statistics.median(max(each["s"] for each in run) for run in runs),
        "cpu_s": statistics.median(sum(each["cpu_s"] for each in run) for run in runs),
        "more_bytes": max(each["more_bytes"] for each in every),
        "samples_s": [max(each["s"] for each in run) for run in runs],
    }
    for name in ("read_bytes", "held_bytes"):
        if name in every[0]:
            made[name] = [each[name] for each in runs[0]]
    return made


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scratch", help="folder for checkpoints; default: a temporary one")
    for name in ("--step", "--port"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--processes", "--number"):
        parser.add_argument(name, type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        one_step(given)
    else:
        report(given)


def report(given: argparse.Namespace) -> None:
    where, results = machine(), {}
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        released, saved, back = (Path(scratch, name) for name in ("released", "orbax", "back"))
        child("write", given.gigabytes, released)
        for count in PROCESSES:
            runs = [child("load", released, processes=count) for _ in range(given.repeats)]
            results[f"load, {count} of {DEVICES // count}"] = summary(runs)
        results["to Orbax"] = summary([child("convert", released, saved)])
        results["from Orbax"] = summary([child("convert", saved, back)])
        for count in PROCESSES[:2]:
            runs = [child("restore", saved, released, processes=count)]
            results[f"restore on 2 x 4, {count} of {DEVICES // count}"] = summary(runs)
        same = files(released) == files(back)
        shards = [path.stat().st_size for path in released.glob("*.safetensors")]
        digest = hashlib.sha256((released / "config.json").read_bytes()).hexdigest()
    config = {"name": "random 12-layer model", "sha256": digest, "shards": len(shards),
              "bytes": sum(shards), "devices": DEVICES}  # fmt: skip
    found = {"results": results, "same_files_after_orbax": same}
    print(write_result("checkpoints", given.machine, __doc__, config, found, where=where))
    show(results, sum(shards), same)


def show(results: dict[str, Any], size: int, same: bool) -> None:
    print(f"{size / 1e6:,.0f} MB in files; after Orbax the same files: {same}")
    print(f"{'step':30}{'s':>8}{'cpu s':>8}{'MB more':>9}  MB read by each process, held by each")
    for name, one in results.items():
        sizes = (one.get(f"{kind}_bytes", ()) for kind in ("read", "held"))
        read, held = ([round(size / 1e6) for size in each] for each in sizes)
        print(f"{name:30}{one['s']:8.2f}{one['cpu_s']:8.2f}{one['more_bytes'] / 1e6:9.0f}  "
              f"{read}, {held}")  # fmt: skip


if __name__ == "__main__":
    main()
