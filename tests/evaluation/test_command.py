"""`deepinfer-jax eval` with replies that no model made."""

from __future__ import annotations

import json
import types

import pytest

from deepinfer_jax import cli, engine, loading
from deepinfer_jax.engine import Update
from deepinfer_jax.engine.statistics import Tally
from deepinfer_jax.engine.watch import Watch
from deepinfer_jax.evaluation import tasks
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.prompts import request_seed
from deepinfer_jax.requests import Result, Timing
from deepinfer_jax.scheduling import Usage
from tests import tiny_model
from tests.evaluation.test_layouts import AIME, source

HEAD = {"task": "sums", "verifier": "number", "options": {"max_tokens": 9, "top_k": 7}}
ITEMS = [
    {"id": "a", "prompt": "What is 1 + 1?", "answer": 2},
    {"id": "b", "prompt": "What is 1 + 2?", "answer": 3, "options": {"max_tokens": 5}},
    {"id": "c", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": 4},
]


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text(tasks.task_text(HEAD, ITEMS), "utf-8")
    return path


class Fake:
    """Stands for the engine: says `2` to every request and remembers it."""

    def __init__(self):
        self.asked = []

    def load(self, name, max_length, rows, onto=None):
        return types.SimpleNamespace(
            numerics=Numerics(),
            confidence_temperatures=(),
            max_length=256,
            cfg=types.SimpleNamespace(most_drafts=0),
        )

    def start(self, model, requests, **options):
        return types.SimpleNamespace(
            updates=lambda: self.updates(model, requests), warm_up=lambda progress: None,
            statistics=lambda: Tally(Watch()).statistics(Usage(0, 0, 1, 1, 0)),
        )  # fmt: skip

    def updates(self, model, requests):
        for index, request in enumerate(requests):
            self.asked.append(request)
            one = (0.0,)
            made = Result(
                request.id, request.prompt, "It is 2.", (1,), one, one, one, ("",), "stop",
                len(request.tokens), request.seed, model.numerics.fingerprint(), Timing(0, 0, 0),
            )  # fmt: skip
            yield Update(index, "It is 2.", 1, made)


@pytest.fixture
def fake(monkeypatch):
    made = Fake()
    monkeypatch.setattr(loading, "load", made.load)
    monkeypatch.setattr(engine, "start", made.start)
    return made


def run(*args):
    return cli.main(["eval", *map(str, args)])


def lines_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# -- generate --------------------------------------------------------------------------------------


def test_samples_are_requests_with_a_seed_of_their_own(fake, task, tmp_path):
    out = tmp_path / "out.jsonl"
    assert run("generate", task, "--out", out, "--samples", 2, "--seed", 5, "--top-k", 3) == 0
    found = lines_of(out)
    assert [line["id"] for line in found] == ["a#0", "a#1", "b#0", "b#1", "c#0", "c#1"]
    assert [line["seed"] for line in found] == [request_seed(5, line["id"]) for line in found]
    assert [line["options"]["max_tokens"] for line in found] == [9, 9, 5, 5, 9, 9]
    assert {line["options"]["top_k"] for line in found} == {3}  # the argument, not the task's 7
    assert found[5]["prompt"] == ITEMS[2]["messages"]


def test_a_run_goes_on_and_can_be_given_more_samples(fake, task, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run("generate", task, "--out", out, "--samples", 2, "--limit", 2) == 0
    first, second, *_ = out.read_text("utf-8").splitlines(keepends=True)
    out.write_text(first + second[: len(second) // 2], "utf-8")
    fake.asked.clear()
    assert run("generate", task, "--out", out, "--samples", 3, "--resume") == 0
    names = [f"{item}#{k}" for item in "abc" for k in range(3)]
    assert [request.id for request in fake.asked] == names[1:]
    assert sorted(line["id"] for line in lines_of(out)) == names
    capsys.readouterr()
    assert run("generate", task, "--out", out, "--samples", 3, "--resume") == 0
    assert "nothing is missing" in capsys.readouterr().err
    assert run("generate", task, "--out", out, "--samples", 3) == 2
    assert "holds results already: add --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--samples", 0], "--samples must be at least 1, got 0"),
        (["--samples", 10**9], "requests, at most 4,194,304 are made: lower the samples"),
        (["--limit", -3], "--limit must be at least 1, got -3"),
        (["--samples", 2, "--temperature", 0], "--samples 2 at temperature 0"),
        (["--effort", "much"], "effort must be one of"),
        (["--top-p", 0], "top_p must be in (0, 1]"),
        (["--max-length", 4], "sums.jsonl:2: the prompt has"),
    ],
)
def test_what_generate_refuses(fake, task, tmp_path, capsys, args, message):
    assert run("generate", task, "--out", tmp_path / "out.jsonl", *args) == 2
    said = capsys.readouterr().err
    assert said.startswith("deepinfer-jax eval generate: ")
    assert said.count("\n") == 1
    assert message in said
    assert not fake.asked


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**HEAD, "options": {"temperature": 0}}, "(TASK:2) are the same reply 2 times"),
        ({**HEAD, "options": {"colour": 1}}, "TASK:2: unknown key 'colour'"),
        ({**HEAD, "verifier": "python"}, "TASK:2: verifier must be one of exact"),
        ({"id": 1}, "TASK:1: the first line must describe the task"),
    ],
)
def test_tasks_that_cannot_be_run(fake, task, tmp_path, capsys, line, message):
    task.write_text(tasks.task_text(line, ITEMS), "utf-8")
    assert run("generate", task, "--out", tmp_path / "out.jsonl", "--samples", 2) == 2
    assert message.replace("TASK", str(task)) in capsys.readouterr().err
    assert not fake.asked


def test_a_task_is_never_written_over(fake, task, capsys):
    before = task.read_bytes()
    for flags in ([], ["--resume"]):
        assert run("generate", task, "--out", task, *flags) == 2
        assert "results need one of their own" in capsys.readouterr().err
    assert run("generate", "nothing", "--out", "x") == 2
    assert "unknown task 'nothing': give one of arithmetic, choice" in capsys.readouterr().err
    assert task.read_bytes() == before


def test_out_must_be_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        run("generate", "sorting")
    assert "--out" in capsys.readouterr().err


# -- score -----------------------------------------------------------------------------------------


@pytest.fixture
def replies(fake, task, tmp_path):
    out = tmp_path / "replies.jsonl"
    assert run("generate", task, "--out", out, "--samples", 2) == 0
    return out


def test_both_stages(replies, task, tmp_path, capsys):
    report = tmp_path / "report.json"
    before = replies.read_bytes()
    assert run("score", replies, "--task", task, "--out", report) == 0
    printed = capsys.readouterr()
    assert "pass@1    0.3333 (standard error 0.3333 over 3 items)" in printed.out
    assert printed.err == ""
    data = json.loads(report.read_text("utf-8"))
    assert data["pass_at"]["2"]["value"] == pytest.approx(1 / 3)
    assert data["asked"]["model"] == "spark-tiny"
    assert replies.read_bytes() == before


def test_a_report_replaces_reports_only_and_whole(replies, task, tmp_path, capsys):
    report, other = tmp_path / "report.json", tmp_path / "other.jsonl"
    score = ["score", replies, "--task", task, "--out"]
    assert run(*score, report) == run(*score, report) == 0
    before = report.read_bytes()
    for content in (replies.read_bytes(), b'{"task": 1}', b"notes"):
        other.write_bytes(content)
        assert run(*score, other) == 2
        assert "holds something that is no report: give another file" in capsys.readouterr().err
        assert other.read_bytes() == content
    (tmp_path / "report.json.partial").symlink_to("/dev/full")
    assert run(*score, report) == 1
    assert f"--out {report} cannot be written: No space left" in capsys.readouterr().err
    assert report.read_bytes() == before
    assert {path.name for path in tmp_path.glob("*.partial")} == set()


def test_a_shipped_task_is_known_by_its_ids(fake, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run("generate", "sorting", "--out", out, "--limit", 3) == 0
    assert run("score", out, "--limit", 3) == 0
    assert "task      sorting" in capsys.readouterr().out
    assert run("score", out) == 1
    said = capsys.readouterr().err
    assert "17 missing: sorting-03#0; " in said
    assert "only the first 3 items have replies; --limit 3 judges those" in said


def test_a_file_that_is_not_whole_is_said_and_scored(replies, task, capsys):
    text = replies.read_text("utf-8").splitlines(keepends=True)
    replies.write_text("".join([*text[:5], text[0], "{}\n", "\n", '{"id": "c#1", "in']), "utf-8")
    assert run("score", replies, "--task", task) == 1
    printed = capsys.readouterr()
    assert "replies   5 of 6" in printed.out
    said = printed.err.splitlines()
    assert [line.split(": ")[2] for line in said] == ["1 duplicate", "2 unreadable", "1 missing"]
    assert f"{replies}:9 is not a line" in said[1]
    assert said[2].endswith("1 missing: c#1")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--samples", 0], "--samples must be at least 1"),
        (["--task", "nothing"], "unknown task 'nothing'"),
        (["--task", "copying"], "there is no reply to an item of task 'copying': "),
        ([], "name the task file that it was generated from with --task"),
    ],
)
def test_what_score_refuses(replies, capsys, args, message):
    assert run("score", replies, *args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("deepinfer-jax eval score: ")
    assert message in printed.err


def test_reports_are_not_written_over_what_they_are_made_of(replies, task, tmp_path, capsys):
    for out, what in ((replies, "the replies"), (task, "the task")):
        assert run("score", replies, "--task", task, "--out", out) == 2
        assert f"is the file of {what}" in capsys.readouterr().err
    assert run("score", replies, "--task", task, "--out", tmp_path / "no" / "r.json") == 2
    assert "the folder" in capsys.readouterr().err
    assert run("score", replies, "--task", task, "--out", tmp_path) == 2
    assert "no file that could be written" in capsys.readouterr().err
    assert run("score", tmp_path / "none.jsonl") == 2
    assert "none.jsonl: no such file; write it with" in capsys.readouterr().err


# -- convert ---------------------------------------------------------------------------------------


def test_a_benchmark_becomes_a_task(fake, tmp_path, capsys):
    out = tmp_path / "aime.jsonl"
    given = source(tmp_path, AIME)
    assert run("convert", "--from", "aime", given, out) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}: 2 items\n"
    assert printed.err == "columns not used: url\n"
    assert run("generate", out, "--out", tmp_path / "replies.jsonl") == 0
    assert run("score", tmp_path / "replies.jsonl", "--task", out) == 0
    capsys.readouterr()
    for args, message in (
        ([given, out], "exists: give another file, or remove it first"),
        ([given, tmp_path / "no" / "x"], "the folder"),
        ([tmp_path / "none.csv", tmp_path / "x"], "none.csv cannot be read: No such file"),
    ):
        assert run("convert", "--from", "aime", *args) == 2
        assert message in capsys.readouterr().err


def test_rows_with_one_id_are_refused_by_their_place(tmp_path, capsys):
    given = source(tmp_path, [AIME[0], AIME[0]])
    assert run("convert", "--from", "aime", given, tmp_path / "x") == 2
    assert f"{given}:3: id 'aime-60' is also that of {given}:2" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


# -- with a model ----------------------------------------------------------------------------------


@pytest.mark.exhaustive  # the default run has the command over replies that no model made
def test_replies_of_a_model_are_scored(task, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    given = ["generate", task, "--model", tiny_model.folder(), "--out", out, "--samples", 2]
    assert run(*given, "--max-tokens", 5, "--batch-size", 1) == 0
    assert run("score", out, "--task", task) == 0
    assert "replies   6 of 6" in capsys.readouterr().out
