"""Runs of many prompts: bad lines, shards, whole lines, resumption, Ctrl-C. No model runs."""

from __future__ import annotations

import io
import json
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import cli, engine, loading
from deepinfer_jax.cli import appending, failures, inputs, records
from deepinfer_jax.cli.refusal import Failed, Refused
from deepinfer_jax.engine.metrics import read_metrics
from tests.fake_engine import FakeEngine, load

COUNT = 7
GOOD = [json.dumps({"prompt": f"Add {n} and 1.", "max_tokens": 3 + n}) for n in range(COUNT)]
BAD = {
    1: b'{"prompt": ',
    2: b'{"prompt": "\xff"}',
    4: b'{"prompt": "a", "colour": 1}',
    5: b'{"prompt": "a", "id": "0"}',
}


@pytest.fixture
def engines(monkeypatch):
    """The engines that were started; `make` says how the next ones behave."""
    made = Engines()
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(engine, "start", made.start)
    return made


class Engines(list):
    make: dict = {}  # noqa: RUF012 - replaced, never changed

    def start(self, model, requests, *, observer=None, **options):
        self.append(FakeEngine(requests, observer, seed=len(self), **self.make))
        return self[-1]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(GOOD) + "\n")
    return path


def run(*args):
    return cli.main(["generate", *map(str, args)])


def lines_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def whole(engines, prompts, *flags):
    """The bytes of an uninterrupted run in order."""
    out = prompts.with_name("whole.jsonl")
    out.unlink(missing_ok=True)
    assert run("--prompts", prompts, "--out", out, "--in-order", "--no-timing", *flags) == 0
    return out.read_bytes()


# -- bad lines -------------------------------------------------------------------------------------


def with_bad_lines(prompts):
    lines = [BAD.get(n, line.encode()) for n, line in enumerate(GOOD)]
    prompts.write_bytes(b"\n".join([*lines[:3], b"  ", *lines[3:]]) + b"\n")  # a blank one, too
    return {n: n + 1 + (n >= 3) for n in range(COUNT)}  # index -> number of the line


def test_bad_lines_go_to_a_file_of_their_own_and_the_rest_runs(engines, prompts, tmp_path, capsys):
    numbers = with_bad_lines(prompts)
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    assert run("--prompts", prompts, "--out", out) == 1
    assert sorted(line["index"] for line in lines_of(out)) == [0, 3, 6]
    found = {line["index"]: line for line in lines_of(errors)}
    assert found.keys() == BAD.keys()
    for index, line in found.items():
        assert tuple(line) == failures.KEYS
        assert (line["stage"], line["line"]) == ("input", numbers[index])
        assert line["place"] == f"{prompts}:{numbers[index]}"
        assert line["place"] in line["reason"]
        assert line["raw"].encode("utf-8", "surrogateescape") == BAD[index]
    assert [found[n]["id"] for n in BAD] == [None, None, 4, "0"]
    said = capsys.readouterr().err
    assert f"4 of 7 requests failed, 3 results are written; {errors} says why" in said
    assert "4 prompts cannot be run, the first: " in said
    # Mended, the same command with --resume runs them, and is as if nothing had been wrong.
    prompts.write_text("\n".join(GOOD) + "\n")
    assert run("--prompts", prompts, "--out", out, "--resume", "--no-timing", "--in-order") == 0
    assert not errors.exists()
    for line in (mended := lines_of(out)):
        line.pop("timing", None)
    assert mended == [json.loads(line) for line in whole(engines, prompts).splitlines()]


def test_when_no_line_can_be_run_no_model_is_loaded(engines, monkeypatch, prompts, tmp_path):
    monkeypatch.setattr(loading, "load", None)
    prompts.write_text("{\n[]\n")
    assert run("--prompts", prompts, "--out", tmp_path / "out.jsonl") == 1
    assert [line["index"] for line in lines_of(tmp_path / "out.errors.jsonl")] == [0, 1]


def test_without_a_file_for_errors_the_first_bad_line_refuses_all(engines, prompts, capsys):
    with_bad_lines(prompts)
    assert run("--prompts", prompts) == 2
    assert "prompts.jsonl:2: broken JSON" in capsys.readouterr().err
    assert not engines


def test_bad_lines_go_to_a_named_file(engines, prompts, tmp_path, capsys):
    with_bad_lines(prompts)
    errors = tmp_path / "wrong.jsonl"
    assert run("--prompts", prompts, "--errors", errors) == 1
    assert len(lines_of(errors)) == len(BAD)
    assert len(capsys.readouterr().out.splitlines()) == COUNT - len(BAD)
    assert run("--prompts", prompts, "--errors", errors) == 2
    assert "holds something already: add --resume" in capsys.readouterr().err


def test_what_is_no_file_of_errors_is_left_alone(engines, prompts, tmp_path, capsys):
    errors = tmp_path / "notes.txt"
    errors.write_text("important\n")
    out = tmp_path / "out.jsonl"
    assert run("--prompts", prompts, "--out", out, "--errors", errors, "--resume") == 2
    assert "is no file of errors" in capsys.readouterr().err
    assert errors.read_text() == "important\n"


def test_requests_that_fail_are_written_there_and_tried_again(engines, prompts, tmp_path, capsys):
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    flags = ["--prompts", prompts, "--out", out, "--in-order", "--no-timing"]
    engines.make = {"fails": ["0", "4"]}
    assert run(*flags) == 1
    assert [line["index"] for line in lines_of(out)] == [1, 2, 3, 5, 6]
    found = {line["index"]: line for line in lines_of(errors)}
    assert [(found[n]["stage"], found[n]["id"], found[n]["line"]) for n in (0, 4)] == [
        ("run", 0, 1),
        ("run", 4, 5),
    ]
    assert found[4]["reason"] == "request 4: no number"
    assert found[4]["raw"] == GOOD[4]
    said = capsys.readouterr().err
    assert "2 of 7 requests failed, 5 results are written" in said
    assert "requests   5 done, 2 failed, 0 skipped" in said
    engines.make = {}
    assert run(*flags, "--resume") == 0
    assert len(engines[-1].requests) == 2
    assert "requests   2 done, 0 failed, 5 skipped" in capsys.readouterr().err
    assert out.read_bytes() == whole(engines, prompts)
    assert not errors.exists()


# -- shards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_shards_together_are_one_run(engines, prompts, tmp_path, count):
    """In every byte, bad lines included; empty shards are runs, too."""
    want = whole(engines, prompts).splitlines(keepends=True)
    with_bad_lines(prompts)
    found, wrong = [], []
    for number in range(count):
        out = tmp_path / f"{number}.jsonl"
        flags = ["--shard", f"{number}/{count}", "--in-order", "--no-timing"]
        due = list(range(number, COUNT, count))
        assert run("--prompts", prompts, "--out", out, *flags) == int(any(n in BAD for n in due))
        assert [line["index"] for line in lines_of(out)] == [n for n in due if n not in BAD]
        found += out.read_bytes().splitlines(keepends=True)
        errors = tmp_path / f"{number}.errors.jsonl"
        wrong += [line["index"] for line in lines_of(errors)] if errors.exists() else []
    assert sorted(found) == sorted(want[n] for n in range(COUNT) if n not in BAD)
    assert sorted(wrong) == sorted(BAD)


def test_shards_joined_are_put_in_order(engines, prompts, tmp_path, capsys):
    joined = tmp_path / "all.jsonl"
    for number in (1, 0):
        out = tmp_path / f"{number}.jsonl"
        assert run("--prompts", prompts, "--out", out, "--shard", f"{number}/2", "--no-timing") == 0
        with joined.open("ab") as file:
            file.write(out.read_bytes())
        flags = ["--prompts", prompts, "--out", out, "--shard", f"{1 - number}/2", "--resume"]
        assert run(*flags) == 2
        assert "is not of this run" in capsys.readouterr().err
    assert run("--prompts", prompts, "--out", joined, "--resume", "--in-order") == 0
    assert "nothing is missing" in capsys.readouterr().err
    assert joined.read_bytes() == whole(engines, prompts)


@pytest.mark.parametrize("text", ["1", "2/2", "-1/2", "a/b", "1/", "/2", "0/0", "1/2/3", " 0/2"])
def test_what_is_no_shard_is_refused(engines, prompts, capsys, text):
    assert run("--prompts", prompts, f"--shard={text}") == 2
    assert "--shard must be i/n with i from 0 to n - 1" in capsys.readouterr().err


@given(total=st.integers(0, 40), count=st.integers(1, 9))
def test_every_prompt_is_in_one_shard(total, count):
    found = [i for n in range(count) for i in inputs.Shard(n, count).indices(total)]
    assert sorted(found) == list(range(total))


# -- whole lines -----------------------------------------------------------------------------------


def test_a_file_cut_at_any_byte_is_taken_up_to_the_same_bytes(
    engines, monkeypatch, prompts, tmp_path
):
    """Whatever a kill leaves of a run in order: no line is lost, repeated or changed."""
    prompts.write_text("\n".join(GOOD[:2]) + "\n")
    lines = whole(engines, prompts).splitlines()
    monkeypatch.setattr(appending.os, "fsync", lambda number: None)  # a thousand of them
    results = [json.loads(line) for line in lines]
    names = ("id", "model", "prompt", "options", "seed", "weights")
    asked = {n: {name: each[name] for name in names} for n, each in enumerate(results)}
    path = tmp_path / "cut.jsonl"
    want = b"".join(line + b"\n" for line in lines)
    assert len(lines) > 1
    for end in range(len(want) + 1):
        path.write_bytes(want[:end])
        known = records.finished(path, [*asked.values()])
        file = appending.LineFile(path, name="--out")
        for number, line in enumerate(lines):
            if str(results[number]["id"]) not in known:
                file.write(line.decode() + "\n")
        file.close()
        assert path.read_bytes() == want


def full_after(monkeypatch, room):
    """The disk takes `room` bytes more; a write that does not fit is cut short, as by Linux."""
    left, write = [room], os.write

    def cut(number, data):
        if not left[0]:
            raise OSError(28, "No space left on device")
        done = write(number, data[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(appending.os, "write", cut)


@pytest.mark.parametrize("room", [0, 1, 500, 1500])
def test_a_full_disk_leaves_whole_lines_and_names_the_request(
    engines, monkeypatch, prompts, tmp_path, capsys, room
):
    want, out = whole(engines, prompts), tmp_path / "out.jsonl"
    flags = ["--prompts", prompts, "--out", out, "--in-order", "--no-timing"]
    with monkeypatch.context() as patch:
        full_after(patch, room)
        assert run(*flags) == 1
    data = out.read_bytes()
    assert want.startswith(data)
    assert not data or data.endswith(b"\n")
    said = capsys.readouterr().err
    assert f"the result of request {data.count(10)} cannot be written: " in said
    assert "No space left on device" in said
    assert run(*flags, "--resume") == 0
    assert out.read_bytes() == want


def test_a_device_that_is_full_is_said(engines, prompts, capsys):
    assert run("--prompts", prompts, "--out", "/dev/full") == 1
    said = capsys.readouterr().err
    assert "cannot be written: --out /dev/full: No space left on device" in said
    assert not os.path.exists("/dev/full.errors.jsonl")


def test_one_line_is_one_call_of_the_system(monkeypatch, tmp_path):
    calls, write = [], os.write
    file = appending.LineFile(tmp_path / "a", name="--out")
    monkeypatch.setattr(appending.os, "write", lambda *args: calls.append(args) or write(*args))
    file.write("é" * 100_000 + "\n")
    file.close()
    file.close()
    assert len(calls) == 1
    assert (tmp_path / "a").read_text("utf-8") == "é" * 100_000 + "\n"


def test_a_file_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"--out .* cannot be written: Is a directory"):
        appending.LineFile(tmp_path, name="--out")


def test_sorting_changes_nothing_where_nothing_is_to_do(tmp_path):
    path, link = tmp_path / "a.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    for order, moved in (([0, 2, 5], False), ([2, 5, 0], True), ([], False)):
        path.write_text("".join(f'{{"id": "n{n}", "index": {n}}}\n' for n in order))
        path.chmod(0o640)
        places = {f"n{n}": n for n in range(6)}
        assert not records.settle(link, places, in_order=False)
        assert records.settle(link, places, in_order=True) == moved
        assert [line["index"] for line in lines_of(path)] == sorted(order)
        assert path.stat().st_mode & 0o777 == 0o640
        assert link.is_symlink()
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "link.jsonl"}


def test_files_must_differ(engines, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    for flags, message in (
        (["--out", out, "--metrics", out], "--out and --metrics are the same file"),
        (["--out", out, "--errors", out], "--out and --errors are the same file"),
        (["--metrics", prompts], "--prompts and --metrics are the same file"),
        (["--metrics", tmp_path / "no" / "m"], "the folder"),
    ):
        assert run("--prompts", prompts, *flags) == 2
        assert message in capsys.readouterr().err
    assert not engines


def test_lines_of_earlier_runs_get_the_places_that_prompts_have_now(engines, prompts, tmp_path):
    """A prompt that comes between others moves those behind it; replies go by names."""
    named = [json.dumps({**json.loads(line), "id": f"n{k}"}) for k, line in enumerate(GOOD)]
    prompts.write_text("\n".join(named[::2]) + "\n")
    out = tmp_path / "out.jsonl"
    flags = ["--prompts", prompts, "--out", out, "--no-timing"]
    assert run(*flags) == 0
    prompts.write_text("\n".join(named) + "\n")
    assert run(*flags, "--resume") == 0
    assert {line["id"]: line["index"] for line in lines_of(out)} == {
        f"n{k}": k for k in range(COUNT)
    }
    assert run(*flags, "--resume", "--in-order") == 0
    assert out.read_bytes() == whole(engines, prompts)


def test_where_there_is_no_room_to_sort_all_results_stay(engines, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    flags = ["--prompts", prompts, "--out", out, "--no-timing"]
    assert run(*flags) == 0
    before = out.read_bytes()
    (tmp_path / "out.jsonl.partial").symlink_to("/dev/full")
    assert run(*flags, "--resume", "--in-order") == 1
    assert "has all results, but not in their places: " in capsys.readouterr().err
    assert out.read_bytes() == before
    assert run(*flags, "--resume", "--in-order") == 0
    assert out.read_bytes() == whole(engines, prompts)


def test_a_second_result_of_one_request_is_refused(engines, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    flags = ["--prompts", prompts, "--out", out, "--in-order", "--no-timing"]
    assert run(*flags) == 0
    lines = out.read_bytes().splitlines(keepends=True)
    for twice in ([*lines[:3], lines[1]], [*lines[:3], lines[1].rstrip()]):
        out.write_bytes(b"".join(twice))
        assert run(*flags, "--resume") == 2
        assert f"{out}:4: the result of id '1' stands in line 2 already" in capsys.readouterr().err
        assert out.read_bytes() == b"".join(twice)


def test_two_runs_do_not_write_to_one_file(engines, prompts, tmp_path, capsys):
    out, flags = tmp_path / "out.jsonl", ["--prompts", prompts, "--no-timing", "--in-order"]
    seen = []

    def second(count):
        if count == 3 and not seen:
            for other in (["--out", out, "--resume"], ["--out", tmp_path / "2", "--metrics", out]):
                seen.append(run(*flags, *other))

    engines.make = {"heard": second}
    assert run(*flags, "--out", out) == 0
    assert seen == [2, 2]
    said = capsys.readouterr().err
    assert f"--out {out} is being written by another run: wait for its end" in said
    assert out.read_bytes() == whole(engines, prompts)
    assert run(*flags, "--out", out, "--resume") == 0


def test_a_run_that_is_refused_leaves_the_errors_of_the_last_one(
    engines, prompts, tmp_path, capsys
):
    with_bad_lines(prompts)
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    flags = ["--prompts", prompts, "--out", out, "--resume"]
    assert run(*flags) == 1
    before = errors.read_bytes()
    assert run(*flags, "--metrics", tmp_path / "no" / "m") == 2
    results = out.read_bytes()
    out.write_bytes(results.replace(b'"numerics": "', b'"numerics": "x'))
    assert run(*flags) == 2
    assert "was made with other numerics" in capsys.readouterr().err
    assert errors.read_bytes() == before
    out.write_bytes(results)
    prompts.write_text("\n".join(GOOD) + "\n")
    assert run(*flags) == 0
    assert not errors.exists()


@pytest.mark.parametrize(
    ("flag", "content", "message"),
    [
        ("--json-schema", None, "schema cannot be read: No such file or directory"),
        ("--json-schema", b"\xff", "schema is not UTF-8: write it anew"),
        ("--json-schema", b"{", "schema: schema is not a JSON schema"),
        ("--out", None, "cannot be written: File name too long"),
        ("--errors", None, "cannot be written: File name too long"),
        ("--shard", None, "--shard must be i/n"),
    ],
)
def test_what_is_refused_is_named(engines, prompts, tmp_path, capsys, flag, content, message):
    path = tmp_path / "schema"
    if content is not None:
        path.write_bytes(content)
    value = {"--json-schema": path, "--shard": "1/" + "9" * 5000}.get(flag, tmp_path / ("a" * 300))
    assert run("--prompts", prompts, flag, value) == 2
    assert message in capsys.readouterr().err
    assert not engines


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("usual_signal")
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("order", [[], ["--in-order"]])
def test_ctrl_c_once_lets_requests_end_and_twice_stops(
    engines, prompts, tmp_path, capsys, times, order
):
    """By real signals, between updates. Both leave a file to go on with."""

    def heard(count):
        if count in (2, 3)[:times]:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    out = tmp_path / "out.jsonl"
    flags = ["--prompts", prompts, "--out", out, "--no-timing", *order]
    engines.make = {"heard": heard}
    assert run(*flags) == 130
    assert signal.getsignal(signal.SIGINT) is before
    done = {1: 5, 2: 3}[times]  # two had ended, three ran
    assert len(lines_of(out)) == done
    said = capsys.readouterr().err
    assert f"interrupted: {done} of 7 results are written in {out}; the same command" in said
    assert "running requests may end; Ctrl-C once more stops" in said
    assert engines[-1].drained
    engines.make = {}
    assert run(*flags, "--resume") == 0
    assert len(engines[-1].requests) == COUNT - done
    assert sorted(out.read_bytes().splitlines()) == whole(engines, prompts).splitlines()
    if order:
        assert out.read_bytes() == whole(engines, prompts)


@pytest.mark.usefixtures("usual_signal")
def test_ctrl_c_while_nothing_runs_stops_at_once(engines, monkeypatch, prompts, tmp_path):
    monkeypatch.setattr(
        FakeEngine, "warm_up", lambda self, progress: signal.raise_signal(signal.SIGINT)
    )
    assert run("--prompts", prompts, "--out", tmp_path / "out.jsonl") == 130
    assert not engines[0].drained


@pytest.mark.usefixtures("usual_signal")
def test_ctrl_c_at_the_last_request_is_no_interruption(engines, prompts, tmp_path):
    engines.make = {"heard": lambda count: count == 6 and signal.raise_signal(signal.SIGINT)}
    assert run("--prompts", prompts, "--out", tmp_path / "out.jsonl") == 0
    assert len(lines_of(tmp_path / "out.jsonl")) == COUNT


def test_a_signal_that_is_ignored_stays_so(engines, prompts, tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engines.make = {"heard": lambda count: signal.raise_signal(signal.SIGINT)}
        assert run("--prompts", prompts, "--out", tmp_path / "out.jsonl") == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# -- metrics ---------------------------------------------------------------------------------------


def test_metrics_are_records_of_every_step(engines, prompts, tmp_path, capsys):
    path, out = tmp_path / "steps.jsonl", tmp_path / "out.jsonl"
    assert run("--prompts", prompts, "--out", out, "--metrics", path) == 0
    found = read_metrics(path)
    assert [record.time for record in found] == [1e9 + n for n in range(1, COUNT + 1)]
    assert {record.kind for record in found} == {"decode"}
    assert run("--prompts", prompts, "--metrics", path) == 2
    assert "holds something already: add --resume to append" in capsys.readouterr().err


def test_metrics_are_joined_to_metrics_only(engines, prompts, tmp_path, capsys):
    """And to whole lines: where the power went, the last one may be torn."""
    path, out = tmp_path / "steps.jsonl", tmp_path / "out.jsonl"
    flags = ["--prompts", prompts, "--out", out, "--resume", "--metrics"]
    assert run(*flags, path) == 0
    steps, results = path.read_bytes(), out.read_bytes()
    assert run(*flags, tmp_path / "copy") == 0
    other = tmp_path / "other.jsonl"
    other.write_bytes(results)
    assert run(*flags, other) == 2
    assert f"--metrics {other} is no file of steps" in capsys.readouterr().err
    assert other.read_bytes() == results
    path.write_bytes(steps[:-20])
    prompts.write_text("\n".join([*GOOD, '{"prompt": "more"}']) + "\n")
    assert run(*flags, path) == 0
    assert len(read_metrics(path)) == COUNT


def test_metrics_that_cannot_be_written_do_not_stop_the_run(engines, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run("--prompts", prompts, "--out", out, "--metrics", "/dev/full") == 0
    assert len(lines_of(out)) == COUNT
    said = capsys.readouterr().err
    assert said.count("--metrics /dev/full: No space left on device; no more of them") == 1


def test_a_run_of_one_request_is_not_warmed_up(engines, prompts, capsys):
    for count in (1, 2):
        prompts.write_text("\n".join(GOOD[:count]) + "\n")
        assert run("--prompts", prompts) == 0
        assert engines[-1].warmed == (count > 1)


def test_lines_are_refused_to_a_stream_that_fails():
    class Full(io.StringIO):
        def write(self, text):
            raise Failed("--out x: no")

    lines = records.Lines(Full(), [{"id": "r"}], in_order=False, indices=[0])
    with pytest.raises(Failed, match="the result of request 'r' cannot be written: --out x: no"):
        lines._put("{}", 0)
