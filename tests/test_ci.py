"""The frame of `.ci/run`: its exit status is that of its stages, and nothing outlives it."""

import pathlib
import subprocess
import time

import pytest

RUN = pathlib.Path(__file__).parents[1] / ".ci" / "run"


def framed(body: str, tmp_path) -> subprocess.CompletedProcess[str]:
    """`body` in place of the stages, between the functions of the script and its end."""
    frame, _, _ = RUN.read_text().partition("\ngenerate_command=")
    script = tmp_path / "repository" / ".ci" / "run"
    script.parent.mkdir(parents=True)
    script.write_text(f"{frame}\n{body}\n")
    return subprocess.run(
        ["bash", script], capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin"}
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("stage one true", 0),
        ("stage one false; true", 1),
        ("stage one bash -c 'exit 7'", 7),
        ("beside one true; stage two true; gather", 0),
        ("beside one true; beside two true; gather; gather", 0),
        ("beside one false; stage two true; gather", 1),
        ("beside one false; beside two true; gather; true", 1),
        ("beside one sleep 30; stage two false", 1),
    ],
)
def test_exit_status_is_that_of_the_stages(body, status, tmp_path):
    assert framed(body, tmp_path).returncode == status


def test_a_stage_that_fails_ends_what_runs_beside_it(tmp_path):
    started = tmp_path / "started"
    late = tmp_path / "late"
    beside = f"bash -c 'touch {started}; sleep 1; touch {late}'"
    wait = f"until [ -e {started} ]; do sleep 0.05; done"
    assert framed(f"beside one {beside}\n{wait}\nstage two false", tmp_path).returncode == 1
    time.sleep(1.3)
    assert not late.exists()


def test_the_scratch_folder_is_gone_afterwards(tmp_path):
    done = framed('echo "$work"; beside one true; gather', tmp_path)
    assert not pathlib.Path(done.stdout.splitlines()[0]).exists()


def test_what_ran_beside_is_shown(tmp_path):
    done = framed("beside titled echo words; gather", tmp_path)
    assert "=== titled" in done.stdout
    assert "words" in done.stdout
