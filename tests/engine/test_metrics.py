"""Records of steps on disk, and their picture."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.engine import StepRecord
from deepinfer_jax.engine.metrics import plot_metrics, read_metrics, to_line

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


@pytest.mark.parametrize("line", ["", "{", "[]", '{"time": 1}', "[" * 100_000])
def test_a_line_that_is_no_record_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text(to_line(StepRecord(1.0, "decode", 8, 0, 8, 0, 4)) + line + "\n")
    with pytest.raises(ValueError, match=r"m\.jsonl:2 is no record of a step"):
        read_metrics(path)


def test_a_run_can_be_drawn():
    """Areas are sums: tokens of all columns are those of the records."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    record = StepRecord(50.0, "decode", 8, 0, 3, 5, 4, tokens=7, idle_s=0.1)
    records = [dataclasses.replace(record, time=50.0 + n / 3) for n in range(40)]
    axes = plot_metrics(records)
    values, edges, _ = axes[0].patches[0].get_data()
    assert sum(values * (edges[1] - edges[0])) == pytest.approx(7 * 40)
    assert edges[-1] == pytest.approx(13.0)
    assert [each.get_ylabel() for each in axes] == [
        "tokens / s", "requests", "pages in use", "device idle",
    ]  # fmt: skip
    assert plot_metrics(records[:1], axes) is axes  # a single moment
    pyplot.close("all")


def test_a_picture_without_records_or_matplotlib_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="records must not be empty"):
        plot_metrics([])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"deepinfer-jax\[notebooks\]"):
        plot_metrics([StepRecord(1.0, "decode", 8, 0, 8, 0, 4)])
