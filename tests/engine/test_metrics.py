"""Records of steps on disk, and their picture."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.engine import StepRecord
from deepinfer_jax.engine.metrics import read_metrics, to_line

RECORDS = st.builds(
    StepRecord,
    time=st.floats(0, 1e10),
    kind=st.sampled_from(["prompts", "decode", "grammar"]),
    rows=st.integers(1, 264),
    prompt_tokens=st.integers(0, 256),
    slots=st.integers(0, 8),
    waiting=st.integers(0, 10**6),
    pages=st.integers(0, 10**6),
    latency_s=st.none() | st.floats(0, 1e3),
    idle_s=st.floats(0, 1e3),
)


@given(records=st.lists(RECORDS, max_size=5), torn=st.integers(0, 40))
def test_records_come_back_from_disk(tmp_path_factory, records, torn):
    path = tmp_path_factory.mktemp("metrics") / "m.jsonl"
    last = to_line(StepRecord(1.0, "decode", 8, 0, 8, 0, 4))[:torn]
    path.write_text("".join(map(to_line, records)) + last)
    assert read_metrics(path) == records


def test_lines_of_an_earlier_version_stand_before_those_of_this_one(tmp_path):
    """`--resume` goes on in the file that it finds."""
    path = tmp_path / "m.jsonl"
    new = StepRecord(2.0, "decode", 8, 0, 8, 0, 4, rounds=3, tokens=9, moe_lb=1.5)
    before = json.loads(to_line(new))
    del before["moe_lb"]
    path.write_text(json.dumps(before) + "\n" + to_line(new))
    assert read_metrics(path) == [dataclasses.replace(new, moe_lb=None), new]


WHOLE = to_line(StepRecord(1.0, "decode", 8, 0, 8, 0, 4))


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", '{"time": 1}', "[" * 100_000, WHOLE.replace("idle_s", "idle").strip()],
)
def test_a_line_that_is_no_record_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text(WHOLE + line + "\n")
    with pytest.raises(ValueError, match=r"m\.jsonl:2 is no record of a step"):
        read_metrics(path)
