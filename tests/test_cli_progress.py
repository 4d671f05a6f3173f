"""What a run says of itself: a line while it goes on, a report at its end."""

from __future__ import annotations

import dataclasses
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.cli import progress
from deepinfer_jax.cli.progress import Progress, line, report
from deepinfer_jax.engine import Statistics, Warming

DONE = Statistics(
    requests=9, done=5, failed=1, waiting=1, running=2, prompt_tokens=1234, shared_tokens=64,
    tokens=4321, verified=100, accepted=73, preempted=2, pages=16, used_pages=4, peak_pages=12,
    seconds=8.0, idle_s=0.2, compiled=3, recompiled=0, compile_s=41.5,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_line_has_what_fits():
    whole = line(6, 9, DONE, 10.0, 200)
    assert whole == (
        "[================        ] 6/9 replies, 4,321 tokens, 432/s, 0:05 left, drafts 73%, "
        "cache 25%"
    )
    plain = dataclasses.replace(DONE, verified=0, accepted=0)
    assert line(9, 9, plain, 0.0, 200) == f"[{'=' * 24}] 9/9 replies, 4,321 tokens, cache 25%"


@given(
    ended=st.integers(0, 9),
    seconds=st.floats(0, 1e7),
    width=st.integers(40, 200),
    tokens=st.integers(0, 10**12),
)
def test_the_line_never_goes_over(ended, seconds, width, tokens):
    """What is there is what a wide terminal has, with some parts left out."""
    found = dataclasses.replace(DONE, tokens=tokens)
    text = line(ended, 9, found, seconds, width)
    assert len(text) <= width
    bar, _, parts = text.partition("] ")
    assert (len(bar) - 1) * ended // 9 == bar.count("=")
    whole = line(ended, 9, found, seconds, 1000).partition("] ")[2].split(", ")
    assert [part for part in whole if part in parts.split(", ")] == parts.split(", ")


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_progress_is_for_terminals(monkeypatch, stream):
    """It says what is compiled, redraws at most ten times a second, and always at the end."""
    monkeypatch.setattr(progress, "columns", lambda: 52)
    now, asked = [100.0], []
    shown = Progress(9, stream, lambda: now[0])

    def statistics():
        asked.append(now[0])
        return DONE

    shown.warming(Warming(2, 7, "decode 8 slots, 3 drafts"))
    for ended, at in ((0, 100.0), (1, 100.05), (2, 100.2), (9, 100.21)):
        now[0] = at
        shown.show(ended, statistics)
    shown.close()
    shown.close()
    if not stream.isatty():
        assert (stream.getvalue(), asked) == ("", [])
        return
    assert asked == [100.0, 100.2, 100.21]
    drawn = stream.getvalue().split("\r")
    assert drawn[1].rstrip() == "compiling 3 of 7: decode 8 slots, 3 drafts"
    assert drawn[-1] == f"[{'=' * 15}] 9/9 replies, 4,321 tokens, 20576/s\n"
    assert all(len(text.rstrip("\n")) <= 52 for text in drawn)


def test_the_report():
    assert report(DONE, refused=3, skipped=11) == [
        "requests   5 done, 4 failed, 11 skipped",
        "tokens     4,321 in 8.0 s (540 tokens/s)",
        "drafts     73 of 100 accepted (73%)",
        "prompts    1,234 tokens computed, 64 shared",
        "cache      at most 12 of 16 pages, 2 preemptions",
        "device     idle 2.5% of the time",
        "compiling  41.5 s, 3 programs",
    ]
    nothing = Statistics(**{field.name: 0 for field in dataclasses.fields(Statistics)})
    assert "tokens     0 in 0.0 s" in report(nothing, refused=0, skipped=0)
    assert nothing.idle_share == 0
    assert nothing.acceptance is None
