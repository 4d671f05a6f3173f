"""Runs of several processes: how they find each other, and the bytes of one process's results."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax import resources
from deepinfer_jax.cli import cluster, generating, meshes, running
from deepinfer_jax.cli.inputs import Given
from deepinfer_jax.cli.refusal import Refused
from deepinfer_jax.numerics import Numerics
from tests import tiny_model

COUNT = 11


def job(*given, environ=None) -> cluster.Job:
    parser = argparse.ArgumentParser()
    cluster.add_options(parser)
    return cluster.job_of(parser.parse_args(given), environ or {})


SLURM = {
    "SLURM_JOB_ID": "70001", "SLURM_STEP_NODELIST": "gpu[07-09,12],login", "SLURM_PROCID": "2",
    "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "8",
}  # fmt: skip
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "run-0.run", "MASTER_PORT": "1234"}


def test_who_is_there_is_given_or_told_by_the_environment():
    assert job() == cluster.Job()
    assert job(environ=SLURM) == cluster.Job()  # nobody asked
    given = job("--coordinator", "a:1", "--processes", "2", "--process-id", "1")
    assert given == cluster.Job("a:1", 2, 1)
    port = 61440 + 70001 % 4096
    assert job("--cluster", environ=SLURM) == cluster.Job(f"gpu07:{port}", 8, 2)
    assert job("--cluster", "--processes", "4", environ=KUBERNETES) == (
        cluster.Job("run-0.run:1234", 4, 1)
    )
    everything = {**KUBERNETES, "WORLD_SIZE": "3"}
    assert job("--cluster", environ=everything).processes == 3
    assert [cluster.first_host(text) for text in ("a", "a,b", "a1,b[2-3]", "n[001]")] == [
        "a", "a", "a1", "n001",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--processes", "2"], "needs --coordinator, --process-id, which is missing"),
        (["--cluster"], "neither given nor told by Slurm or Kubernetes"),
        (["--coordinator", "a:1", "--processes", "2", "--process-id", "2"], r"got 2 of 2"),
        (["--coordinator", "a", "--processes", "2", "--process-id", "0"], "must be HOST:PORT"),
    ],
)
def test_what_is_missing_or_wrong_is_said(given, said):
    with pytest.raises(Refused, match=said):
        job(*given)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (["--mesh", "expert=4"], (1, 4, 1)),
        (["--mesh", "expert=4,data=2"], (2, 4, 1)),
        (["--mesh", "context=2,expert=4"], (1, 4, 2)),
        ([], None),
        (["--mesh", "h200-16"], (1, 16, 1)),
        (["--mesh", "h200-16-context"], (1, 8, 2)),
        (["--mesh", "data=0"], "must be like data=2,expert=4"),
        (["--mesh", "h200-9"], "unknown layout 'h200-9': give one of"),
        (["--mesh", "h200-8-host"], "Engram tables in the memory of hosts, which an engine"),
        (["--mesh", "data=2,data=2"], "must be like data=2,expert=4"),
        (["--rearrange-every", "3"], "--rearrange-every needs --mesh"),
        (["--mesh", "data=2", "--extra-experts", "-1"], "--extra-experts must be at least 0"),
    ],
)
def test_sizes_of_a_mesh(given, want):
    parser = argparse.ArgumentParser()
    meshes.add_options(parser)
    args = parser.parse_args(given)
    if isinstance(want, str):
        with pytest.raises(Refused, match=want):
            meshes.sizes_of(args)
    else:
        assert meshes.sizes_of(args) == want


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ("", f"{meshes._WAITING}=600"),
        ("--xla_dump_to=d", f"--xla_dump_to=d {meshes._WAITING}=600"),
        (f"{meshes._WAITING}=5", f"{meshes._WAITING}=5"),
        ("flags.txt", "flags.txt"),
    ],
)
def test_devices_of_a_cpu_wait_longer_unless_told_how_long(flags, want):
    environ = {"XLA_FLAGS": flags}
    meshes.wait_longer(environ)
    assert environ["XLA_FLAGS"] == want


LATE = """
import time, jax
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))

def body(x):
    late = lambda x: time.sleep(6 * float(x[0])) or x
    x = jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return jax.lax.all_gather(x, "x", tiled=True)

P = jax.sharding.PartitionSpec
over = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
print(jax.jit(over)(jax.numpy.arange(2.0)))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("seconds", [1, 600])
def test_xla_hears_how_long_devices_wait(seconds):
    """A device comes six seconds late."""
    flags = f"{meshes._WAITING}={seconds} --xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
    environ = {**os.environ, "XLA_FLAGS": flags}
    command = [sys.executable, "-c", LATE]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode == 0) == (seconds == 600), ended.stderr
    assert ("Termination timeout" in ended.stderr) == (seconds == 1)


def test_a_layout_whose_experts_are_whole_has_none_to_move(tmp_path):
    data = json.loads(resources.table_file("meshes", "layout", "h200-8").read_text("utf-8"))
    del data["rules"]["expert"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data), "utf-8")
    parser = argparse.ArgumentParser()
    meshes.add_options(parser)
    cfg = tiny_model.model().cfg
    site, _ = meshes.site_of(parser.parse_args(["--mesh", str(path)]), cfg)
    assert {placement.devices for placement in site.placements.values()} == {1}
    with pytest.raises(Refused, match=r"mine.json: experts cannot move"):
        meshes.site_of(parser.parse_args(["--mesh", str(path), "--rearrange-every", "3"]), cfg)


def test_every_result_is_written_once_and_to_a_file_of_its_own(tmp_path):
    jobs = [cluster.Job("a:1", 3, number) for number in range(3)]
    requests = dict.fromkeys((0, 2, 3, 5, 6, 9, 10))  # of a shard: places count, not indices
    written = [cluster.own(each, requests, list(requests)) for each in jobs]  # pyright: ignore
    assert written == [[0, 5, 10], [2, 6], [3, 9]]
    assert jobs[1].path(tmp_path / "out.jsonl") == tmp_path / "out.1.jsonl"
    assert cluster.Job().path(tmp_path / "out.jsonl") == tmp_path / "out.jsonl"


def beside(monkeypatch, others, number: int = 0) -> cluster.Job:
    """A job whose other processes say `others(what this one says)`, one value for each of them."""

    def agreed(value):
        every = [np.asarray(each) for each in others(value)]
        every.insert(number, value)
        return np.stack(every)

    monkeypatch.setattr(cluster, "agreed", agreed)
    return cluster.Job("a:1", len(others(np.zeros((1, 1)))) + 1, number)


@functools.cache
def told(*more: str) -> dict:
    """What a process tells the others of a run with these arguments."""
    parser = argparse.ArgumentParser()
    generating.add_command(parser.add_subparsers())
    command = ["generate", "--model", str(tiny_model.folder()), "--mesh", "data=2", *more]
    args = parser.parse_args(command)
    given = [Given(f"line {n}", {"prompt": f"Add {n}."}) for n in range(3)]
    return running._told(args, running._work(args, given, False), tiny_model.model())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--max-tokens", "9"], "options of replies"),
        (["--temperature", "0"], "options of replies"),
        (["--seed", "3"], "--seed"),
        (["--batch-size", "16"], "--batch-size"),
        (["--speculative", "2"], "--speculative"),
        (["--mesh", "data=1,expert=2"], "--mesh"),
        (["--rearrange-every", "4"], "--rearrange-every"),
        (["--extra-experts", "2"], "--extra-experts"),
    ],
)
def test_whatever_a_plan_follows_from_is_compared(monkeypatch, more, named):
    heard: list = []
    monkeypatch.setattr(cluster, "agreed", lambda value: [heard.append(value), value[None]][1])
    cluster.require_same(cluster.Job("a:1", 2, 1), told(*more))
    cluster.require_same(beside(monkeypatch, lambda value: [value, value]), told())
    job = beside(monkeypatch, lambda value: [value, heard[0]])
    with pytest.raises(Refused, match=rf"processes \[2\] have other {named} than process 0"):
        cluster.require_same(job, told())


def test_other_numerics_and_lengths_are_told():
    """By the model, which the test above has only one of."""
    model = tiny_model.model()
    args = argparse.Namespace(batch_size=None, speculative="off", mesh="data=2", extra_experts=0,
                              rearrange_every=0)  # fmt: skip
    work = running.Work([], {}, {}, {})
    longer = dataclasses.replace(model, numerics=Numerics.fp32())
    one, other = (running._told(args, work, each) for each in (model, longer))
    assert {name for name in one if one[name] != other[name]} == {"numerics"}
    assert one["--max-length"] == model.max_length


def test_what_any_process_misses_is_run_by_all(monkeypatch):
    """Requests 2, 3, 5 and 9; process 0 is to write 2 and 5, the other one 3 and 9."""
    requests = dict.fromkeys((2, 3, 5, 9))
    theirs = np.array([False, False, False, True])  # the other one misses 9
    job = beside(monkeypatch, lambda value: [theirs])
    assert cluster.due(job, requests, [3, 5, 9]) == [5, 9]  # 3 and 9 are not its own
    assert cluster.due(job, requests, []) == [9]
    assert cluster.due(cluster.Job(), requests, [3]) == [3]


def test_who_died_is_named_where_a_device_failed_before_it_was_heard():
    """The step of the others fails at once; that the process is gone is heard a little later."""
    heard = []
    peers = cluster.Peers(cluster.Job("a:1", 2, 0), heard.append)
    here, there = socket.socketpair()
    peers._watch(here, 1)
    later = threading.Timer(0.1, there.close)
    later.start()
    peers.__exit__(jax.errors.JaxRuntimeError)
    assert heard == ["process 1 of 2"]
    later.join()


# -- whole runs ------------------------------------------------------------------------------------


def start(out: Path, prompts: Path, *more: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "deepinfer_jax", "generate", "--model", str(tiny_model.folder()),
        "--prompts", str(prompts), "--out", str(out), "--in-order", "--no-timing", *more,
    ]  # fmt: skip
    kept = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen(
        command, env={**os.environ, **kept}, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip


def together(
    out: Path, prompts: Path, count: int, *more: str, second: Sequence[str] = (), mesh: str = ""
) -> list[subprocess.Popen]:
    """`count` processes with the arguments `more`; the second one has its own behind them."""
    mesh = mesh or f"data=2,expert={count // 2 or 1}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [
        start(
            out, prompts, "--mesh", mesh, "--coordinator",
            f"127.0.0.1:{port}", "--processes", str(count), "--process-id", str(number), *more,
            *(second if number == 1 else ()),
        )
        for number in range(count)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    said = [process.communicate(timeout=500)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def given(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """The prompts, and the lines that one process on one device writes."""
    prompts, whole = tmp_path / "prompts.jsonl", tmp_path / "whole.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"Add {n}.", "max_tokens": 3 + 7 * n % 40}) + "\n"
                for n in range(COUNT))
    )  # fmt: skip
    assert [code for code, _ in ended([start(whole, prompts)])] == [0]
    return prompts, whole.read_bytes().splitlines(keepends=True)


def files(out: Path, count: int) -> list[list[bytes]]:
    paths = [cluster.Job("a:1", count, number).path(out) for number in range(count)]
    return [
        path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for path in paths
        if path is not None
    ]


@pytest.mark.exhaustive  # every process compiles programs of its own
@pytest.mark.parametrize("count", [2, 4])
def test_processes_write_the_bytes_of_one_also_after_one_was_killed(tmp_path, count):
    prompts, want = given(tmp_path)
    out, shares = tmp_path / "out.jsonl", [want[number::count] for number in range(count)]
    found = ended(together(out, prompts, count, "--rearrange-every", "2"))
    assert [code for code, _ in found] == [0] * count, found
    assert files(out, count) == shares

    out = tmp_path / "killed.jsonl"
    processes = together(out, prompts, count)
    first = cluster.Job("a:1", count, 0).path(out)
    assert first is not None
    while not (first.exists() and first.stat().st_size) and processes[0].poll() is None:
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    found = ended(processes)
    assert time.monotonic() - killed < 60
    survivors = [each for number, each in enumerate(found) if number != 1]
    if any(code for code, _ in survivors):  # unless all was done by then
        assert all(code for code, _ in survivors)
        assert all("--resume" in text for _, text in survivors), survivors
    for got, share in zip(files(out, count), shares, strict=True):
        assert share[: len(got)] == got
    assert [code for code, _ in ended(together(out, prompts, count, "--resume"))] == [0] * count
    assert files(out, count) == shares


@pytest.mark.exhaustive  # both processes compile programs of their own
def test_processes_that_share_a_cache_write_the_bytes_of_one(tmp_path):
    """Compressed KV of every request on the devices of both."""
    prompts, want = given(tmp_path)
    out = tmp_path / "out.jsonl"
    found = ended(together(out, prompts, 2, "--speculative", "2", mesh="context=2"))
    assert [code for code, _ in found] == [0, 0], found
    assert files(out, 2) == [want[0::2], want[1::2]]


@pytest.mark.exhaustive  # two processes load a model each
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-tokens", "5"], "other options of replies than"),
        (["--mesh", "data=4"], "must have the same number of devices, got 1 in 0, 2 in 1"),
    ],
)
def test_processes_with_other_commands_refuse_to_run(tmp_path, more, said):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Add 1."}\n' * 2)
    processes = together(tmp_path / "out.jsonl", prompts, 2, second=more)
    found = ended(processes)
    assert all(code for code, _ in found)  # whoever hears first that the other one ended may say so
    assert any(said in text for _, text in found), found
