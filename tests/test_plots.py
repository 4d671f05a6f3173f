"""Pictures show the numbers they were given, in axes of their own or given ones."""

from __future__ import annotations

import dataclasses
import sys
import types

import numpy as np
import pytest

from deepinfer_jax import planning, plots, scale
from deepinfer_jax.engine.statistics import StepRecord
from deepinfer_jax.eplb import moe_lb
from deepinfer_jax.rl.examples.plots import plot_runs
from tests.scale import released

RECORD = StepRecord(50.0, "decode", 8, 0, 3, 5, 4, tokens=7, idle_s=0.1)
LOADS = np.ones((2, 1, 3))
WINDOWS = np.array([[0, 0], [0, 1], [1, 2], [2, 3]])


@pytest.fixture
def pyplot():
    found = pytest.importorskip("matplotlib.pyplot")
    found.switch_backend("agg")
    yield found
    found.close("all")


def drawn(axes) -> None:
    """A renderer goes over everything: texts, ticks, bars of colours."""
    axes.figure.canvas.draw()


def test_loads_are_of_the_worst_layer_and_of_every_step(pyplot):
    before = np.array([[[1.0, 1.0], [3.0, 1.0]]] * 3)
    after = np.array([[[1.0, 1.0], [2.0, 2.0]]] * 2)
    axes = plots.loads(before, after)
    assert [bar.get_height() for bar in axes[0].patches] == [1.5, 0.5, 1.0, 1.0]
    assert "layer 1" in axes[0].get_ylabel()
    lines = [line.get_xydata().tolist() for line in axes[1].lines[:2]]
    assert lines == [[[0, 4 / 3], [1, 4 / 3], [2, 4 / 3]], [[3, 1], [4, 1]]]
    legend = [text.get_text() for text in axes[1].get_legend().texts]
    assert legend == ["before: 1.333", f"after: {moe_lb(after):.3f}"]
    assert plots.loads(after, after, axes) is axes


def test_loads_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match=r"got \(2, 1, 3\) and \(2, 1, 4\)"):
        plots.loads(LOADS, np.ones((2, 1, 4)))
    with pytest.raises(ValueError, match="at least one step"):
        plots.loads(LOADS[:0], LOADS)


def test_a_run_has_the_tokens_of_its_records(pyplot):
    records = [dataclasses.replace(RECORD, time=50.0 + n / 3) for n in range(40)]
    axes = plots.metrics(records)
    values, edges, _ = axes[0].patches[0].get_data()
    assert sum(values * (edges[1] - edges[0])) == pytest.approx(7 * 40)
    assert edges[-1] == pytest.approx(13.0)
    assert [each.get_ylabel() for each in axes] == [
        "tokens / s", "requests", "pages in use", "device idle",
    ]  # fmt: skip
    assert plots.metrics(records[:1], axes) is axes  # a single moment
    spread = [dataclasses.replace(each, moe_lb=1 + n / 40) for n, each in enumerate(records)]
    *_, last = plots.metrics(records[:3] + spread[3:])
    assert (last.get_ylabel(), last.lines[0].get_ydata()[0]) == ("moe_lb", 1 + 3 / 40)
    with pytest.raises(ValueError, match="records must not be empty"):
        plots.metrics([])


def test_reliability_has_the_bins_with_predictions(pyplot):
    bins = planning.reliability(np.array([0.1, 0.9, 0.9]), np.array([0, 1, 1]))
    axes = plots.reliability(bins)
    points = axes.collections[0]
    np.testing.assert_allclose(points.get_offsets(), [[0.1, 0.0], [0.9, 1.0]])
    np.testing.assert_allclose(points.get_sizes(), [400 / 3, 800 / 3])
    assert plots.reliability(bins, axes) is axes


def test_runs_have_a_line_each_and_go_into_a_file(pyplot, tmp_path):
    log = [types.SimpleNamespace(step=n, raw_difference=0.0, reward=n / 4) for n in range(4)]
    apart, reward = plots.runs({"one": log, "other": log})
    assert [line.get_label() for line in apart.lines] == ["one", "other"]
    np.testing.assert_allclose(reward.lines[1].get_ydata(), [0, 0.125, 0.25, 0.375])
    plot_runs({"one": log}, tmp_path / "new" / "runs.png")
    assert (tmp_path / "new" / "runs.png").stat().st_size > 1000


def test_attended_positions_are_those_of_windows_and_entries(pyplot):
    """Row 3 has its window at 2 and 3, and entry 0: positions 0 and 1. Row 2 has both at 1."""
    selected = np.array([[-1], [-1], [0], [0]])
    axes = plots.attended(WINDOWS, selected, ratio=2)
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [2, 3, 1, 0], [2, 2, 1, 1]]
    np.testing.assert_array_equal(axes.images[0].get_array(), want)
    assert plots.attended(WINDOWS, axes=axes, legend=False) is axes


def test_the_other_pictures_of_the_inside_show_their_numbers(pyplot):
    axes = plots.expert_load(np.array([[3, 1, 0, 0], [0, 0, 0, 0]]), (2, 5))
    np.testing.assert_allclose(axes.images[0].get_array(), [[3, 1, 0, 0], [0] * 4])
    drawn(axes)
    comb = np.broadcast_to(np.eye(2), (3, 5, 2, 2))
    axes = plots.mixes(comb, (0, 1, 7))
    assert [one.get_title() for one in axes] == ["layer 0", "layer 1", "layer 7"]
    assert [text.get_text() for text in axes[2].texts] == ["1", ".00", ".00", "1"]
    drawn(axes[0])
    axes = plots.over_tokens(
        [[0.5, 1.0, 2.0]], ["a", "\n", "<｜assistant｜>"], ["gate"], "", vmin=0
    )
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "\\n", "<|assista..."]
    drawn(axes)
    with pytest.raises(ValueError, match=r"shape \[1, 2\], .* got \[1, 3\]"):
        plots.over_tokens([[0.5, 1.0, 2.0]], ["a", "b"], ["gate"], "gate")


def test_plans_have_the_bytes_and_times_of_their_numbers(pyplot):
    layout, h200 = scale.load_layout("h200-8"), scale.load_hardware("h200")
    made = scale.plan(released.config(), layout, h200, scale.Workload())
    memory, time = plots.plan(made)
    assert sum(bar.get_height() for bar in memory.patches) == pytest.approx(made.needed / 1e9)
    assert memory.lines[0].get_ydata()[0] == pytest.approx(made.room / 1e9)
    widths = {round(bar.get_y() + 0.4): bar.get_width() for bar in time.patches}
    assert [widths[n] for n in sorted(widths)] == [1e3 * s.seconds for s in made.decode.sections]
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in memory.patches}
    assert len(looks) == len(memory.patches)
    drawn(memory)
    assert plots.plan_memory([made, made], memory) is memory


def test_pictures_have_one_style_and_leave_that_of_others_alone(pyplot):
    before = dict(pyplot.rcParams)
    axes = plots.attended(WINDOWS)
    assert not axes.spines["top"].get_visible()
    assert dict(pyplot.rcParams) == before
    with pyplot.rc_context():
        plots.use_style()
        cycle = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
        assert tuple(cycle) == plots.COLOURS


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("loads", (LOADS, LOADS)),
        ("metrics", ([RECORD],)),
        ("reliability", (planning.reliability(np.array([0.1]), np.array([0])),)),
        ("runs", ({},)),
        ("attended", (WINDOWS,)),
        ("expert_load", (np.ones((1, 2)), (0,))),
        ("mixes", (np.ones((1, 2, 2)), (0,))),
        ("over_tokens", ([[1.0]], ["a"], ["b"], "c")),
        ("plan", (None,)),
        ("plan_memory", ([],)),
        ("plan_time", (None,)),
        ("use_style", ()),
    ],
)
def test_without_matplotlib_the_remedy_is_told(monkeypatch, name, arguments):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = rf'{name} draws with matplotlib, .* pip install "deepinfer-jax\[notebooks\]"'
    with pytest.raises(ImportError, match=message):
        getattr(plots, name)(*arguments)
