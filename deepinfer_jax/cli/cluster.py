"""A run of several processes: how they find each other, agree, and notice that one has died.

All run the same program on the same requests in the same order and write different results. What
they do follows from what the devices return, which each of them sees, so they need not talk.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.cli.refusal import Refused

HEARTBEAT = 30  # seconds without a sign of life after which a process counts as dead
GRACE = 10  # seconds in which a process whose device failed may hear that another one has died
_PORTS = 61440, 4096  # where a job of Slurm meets: 61440 + its number modulo 4096
_BYE = b"."


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes of a run; one alone needs no coordinator."""

    coordinator: str = ""
    processes: int = 1
    number: int = 0

    def path(self, path: Path | None) -> Path | None:
        """The file of this process in place of `path`: out.jsonl becomes out.0.jsonl and so on."""
        if path is None or self.processes == 1:
            return path
        return path.with_name(f"{path.stem}.{self.number}{path.suffix}")

    def writes(self, place: int) -> bool:
        """Whether this process writes the result of the request at `place` among all."""
        return place % self.processes == self.number


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of several processes."""
    add = parser.add_argument_group("several processes (docs/parallel.md)").add_argument
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens, for all to meet")
    add("--processes", type=int, metavar="N", help="how many there are")
    add("--process-id", type=int, metavar="I", help="which one this is, from 0")
    add("--cluster", action="store_true", help="take what is not given from the environment of "
        "Slurm or Kubernetes")  # fmt: skip


def job_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Job:
    """The processes that the arguments name. Raises Refused where something is missing or wrong."""
    given = {
        "coordinator": args.coordinator, "processes": args.processes, "process_id": args.process_id,
    }  # fmt: skip
    if not args.cluster and all(value is None for value in given.values()):
        return Job()
    found = detected(environ) if args.cluster else {}
    every: dict[str, Any] = {
        name: found.get(name) if value is None else value for name, value in given.items()
    }
    missing = [name for name, value in every.items() if value is None]
    if missing:
        where = "neither given nor told by Slurm or Kubernetes" if args.cluster else "missing"
        names = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise Refused(f"a run of several processes needs {names}, which is {where}")
    count, number = every["processes"], every["process_id"]
    if count < 1 or not 0 <= number < count:
        raise Refused(f"--process-id must lie in 0..N-1 for --processes N, got {number} of {count}")
    if not re.fullmatch(r".+:\d{1,5}", every["coordinator"]):
        raise Refused(f"--coordinator must be HOST:PORT, got {every['coordinator']!r}")
    return Job(every["coordinator"], count, number)


def detected(environ: Mapping[str, str]) -> dict[str, Any]:
    """What Slurm or Kubernetes say of this process, by the names of the options.

    Slurm tells all of it to the tasks of a step. Kubernetes tells an Indexed Job its index; the
    address and the number are those of MASTER_ADDR, MASTER_PORT and WORLD_SIZE, which operators for
    training jobs set (with RANK for the index) and a manifest can.
    """
    if "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ:
        first, count = _PORTS
        port = first + int(environ.get("SLURM_JOB_ID", "0")) % count
        host = first_host(environ["SLURM_STEP_NODELIST"])
        tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
        return {
            "coordinator": f"{host}:{port}",
            "processes": int(tasks),
            "process_id": int(environ["SLURM_PROCID"]),
        }
    found: dict[str, Any] = {}
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        found["coordinator"] = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    for name, keys in (
        ("processes", ["WORLD_SIZE"]),
        ("process_id", ["JOB_COMPLETION_INDEX", "RANK"]),
    ):
        number = next((environ[key] for key in keys if key in environ), None)
        if number is not None:
            found[name] = int(number)
    return found


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: a[03-07,9],b is a03."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return name.partition(",")[0]
    return name + re.split(r"[-,\]]", rest, maxsplit=1)[0]


def join(job: Job) -> None:
    """Meet the other processes, before JAX looks for devices. Raises Refused where they do not
    come.
    """
    import jax

    if job.processes == 1:
        return
    try:
        jax.distributed.initialize(
            job.coordinator, job.processes, job.number, cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise Refused(f"the {job.processes} processes did not meet: {error}") from None


def agreed(values: Any) -> Any:
    """The arrays of all processes, [processes, ...]."""
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(values)


def own(job: Job, requests: Mapping[int, Any], indices: Sequence[int]) -> list[int]:
    """Of `indices`, those whose results this process writes: by their place among `requests`."""
    places = {index: place for place, index in enumerate(requests)}
    return [index for index in indices if job.writes(places[index])]


def check_devices(job: Job) -> None:
    """Raise Refused where the processes have not all as many devices: then they cannot compare."""
    import jax

    if job.processes == 1:
        return
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len({counts[number] for number in range(job.processes)}) > 1:
        found = ", ".join(f"{counts[number]} in {number}" for number in range(job.processes))
        raise Refused(
            f"the processes must have the same number of devices, got {found}: give all of them "
            "the same --mesh and as many devices"
        )


def require_same(job: Job, told: Mapping[str, Any]) -> None:
    """Raise Refused, with their names, where values of `told` differ between the processes.

    told: by what people call it, whatever a plan follows from; as JSON says it, or its `repr`.
    """
    import numpy as np

    if job.processes == 1:
        return
    said = [json.dumps(value, sort_keys=True, default=repr) for value in told.values()]
    digest = np.stack(
        [np.frombuffer(hashlib.sha256(each.encode()).digest(), np.uint8) for each in said]
    )
    differing = (agreed(digest) != digest).any(axis=2)  # [processes, values]
    others = np.flatnonzero(differing.any(axis=1)).tolist()
    if others:
        names = [name for name, no in zip(told, differing.any(axis=0), strict=True) if no]
        raise Refused(
            f"processes {others} have other {', '.join(names)} than process {job.number}: give all "
            "of them the same command but for --process-id, and the same files"
        )


def due(job: Job, requests: Mapping[int, Any], indices: Sequence[int]) -> Sequence[int]:
    """What the processes are to run together: what any of them misses among its own results.

    `indices`: of `requests`, the same ones in all processes (`require_same`), those without a
    result in this process's file.
    """
    import numpy as np

    if job.processes == 1:
        return indices
    missing = set(own(job, requests, indices))
    marked = np.array([index in missing for index in requests], bool)
    every = np.any(agreed(marked), axis=0)
    return [index for index, wanted in zip(requests, every, strict=True) if wanted]


class Peers:
    """As a context: as soon as a process of the job ends before the others, `lost` hears of it, in
    a thread of its own.

    Process 0 holds a connection to every other one, which the system closes when a process dies,
    however it does. What a machine without power leaves open is found by the heartbeats of JAX.
    """

    def __init__(self, job: Job, lost: Callable[[str], None]) -> None:
        self._job, self._lost = job, lost
        self._sockets: list[socket.socket] = []
        self._done, self._heard = False, threading.Event()

    def __enter__(self) -> Peers:
        job = self._job
        if job.processes == 1:
            return self
        host = job.coordinator.rpartition(":")[0]
        server = socket.create_server(("", 0)) if job.number == 0 else None
        port = server.getsockname()[1] if server else 0
        port = int(max(agreed(_number(port)).ravel()))
        if server is None:
            own = socket.create_connection((host.strip("[]"), port), timeout=HEARTBEAT)
            own.settimeout(None)
            own.sendall(job.number.to_bytes(4, "big"))
            self._watch(own, 0)
            return self
        with server:
            server.settimeout(HEARTBEAT)
            for _ in range(job.processes - 1):
                other, _ = server.accept()
                other.settimeout(HEARTBEAT)
                number = int.from_bytes(other.recv(4, socket.MSG_WAITALL), "big")
                other.settimeout(None)
                self._watch(other, number)
        return self

    def _watch(self, other: socket.socket, number: int) -> None:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sockets.append(other)
        threading.Thread(target=self._hear, args=(other, number), daemon=True).start()

    def _hear(self, other: socket.socket, number: int) -> None:
        try:
            said = other.recv(1)
        except OSError:
            said = b""
        if said != _BYE and not self._done:
            self._lost(f"process {number} of {self._job.processes}")
            self._heard.set()

    def __exit__(self, kind: type | None, *_: object) -> None:
        import jax

        if kind is not None and issubclass(kind, jax.errors.JaxRuntimeError) and self._sockets:
            # A step that waits for a process fails when that has died, maybe before `lost` hears of
            # it, who ends this process and says how to go on.
            self._heard.wait(GRACE)
        self._done = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                if kind is None:
                    each.sendall(_BYE)
                each.close()


def _number(value: int) -> Any:
    import numpy as np

    return np.array([value], np.int32)


def stop(name: str, out: Path | None) -> None:
    """End this process at once: a step that waits for a dead one would never return. Lines of
    results are on the disk as soon as they are written.
    """
    where = f" {out} is whole;" if out else ""
    print(
        f"{name} has ended before the run was done, so this one ends too.{where} start all again "
        "with --resume to go on",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    os._exit(1)
