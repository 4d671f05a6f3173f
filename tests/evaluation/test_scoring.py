"""The second stage on lines written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_jax.evaluation import reporting, scoring, tasks
from tests.evaluation.written import line

TASK = tasks.make_task(
    [
        {"task": "sums", "about": "adding", "verifier": "number"},
        {"id": "a", "prompt": "1 + 1?", "answer": 2},
        {"id": "b#0", "prompt": "1 + 2?", "answer": 3, "options": {"max_tokens": 7}},
        {"id": "c", "messages": [{"role": "user", "content": "2 + 2?"}], "answer": 4},
    ],
    ["t:1", "t:2", "t:3", "t:4"],
    Path("t"),
)
PROMPTS = {item.id: item.prompt for item in TASK.items}


def reply(item, number, text, **changes):
    return line(f"{item}#{number}", PROMPTS[item], text, **changes)


def score(*lines, samples=None, task=TASK):
    return scoring.score(task, [(f"f:{i}", one) for i, one in enumerate(lines, 1)], samples)


WHOLE = [
    reply("a", 0, "2"),
    reply("a", 1, "It is 2.", tokens=[5] * 9, finish_reason="length"),
    reply("b#0", 0, "4", options={"max_tokens": 7}),
    reply("b#0", 1, "3", options={"max_tokens": 7}),
    reply("c", 0, "5"),
    reply("c", 1, "none"),
]


@pytest.mark.parametrize("order", [1, -1])
def test_a_whole_file(order):
    report = score(*WHOLE[::order])
    assert report.problems == ()
    assert report.samples == 2
    assert [(s.id, s.right) for s in report.scores] == [("a", 2), ("b#0", 1), ("c", 0)]
    assert report.pass_at(1).value == pytest.approx(0.5)
    assert report.pass_at(1).standard_error == pytest.approx(0.5 / 3**0.5)
    assert report.pass_at(2).value == pytest.approx(2 / 3)
    assert report.pass_at(3) is None
    assert report.mean_tokens == pytest.approx((5 * 3 + 9) / 6)
    assert report.cut == pytest.approx(1 / 6)
    assert report.asked["model"] == "m"
    assert "max_tokens" in report.asked  # of the items without one of their own


def test_the_report_as_text_and_as_json():
    report = score(*WHOLE)
    data = json.loads(json.dumps(reporting.as_json(report)))
    assert data["pass_at"]["1"] == {
        "value": 0.5, "standard_error": pytest.approx(0.5 / 3**0.5), "items": 3
    }  # fmt: skip
    assert (data["items"], data["samples"], data["replies"], data["problems"]) == (3, 2, 6, {})
    assert data["scores"][1]["samples"][0]["reason"] == "expected 3, got 4"
    text = "\n".join(reporting.as_text(report))
    assert "replies   6 of 6 (3 items x 2)" in text
    assert "pass@1    0.5000 (standard error 0.2887 over 3 items)" in text
    assert "pass@2    0.6667" in text
    assert "4.0 tokens on average, 16.7% cut short" in text
    rows = text.splitlines()[-3:]
    assert rows[0].split() == ["a", "2/2", "6.0", "1"]
    assert rows[1].endswith("expected 3, got 4")
    assert rows[2].endswith("expected 4, got 5")
    assert reporting.problem_lines(report) == []


def test_one_item_has_no_standard_error():
    text = "\n".join(reporting.as_text(score(WHOLE[0], task=TASK.first(1))))
    assert "pass@1    1.0000 (one item)" in text


def problems(*lines, **settings):
    return [(each.kind, each.text) for each in score(*lines, **settings).problems]


def test_more_missing_than_can_be_named_are_refused():
    """An id may claim any number of samples, and all that are not there would be listed."""
    with pytest.raises(ValueError, match=r"the largest id says 999999999 samples of 3 items: 2,99"):
        score(reply("a", 999_999_998, "1"))
    with pytest.raises(ValueError, match=r"samples=10000000 of 3 items: .* at most 1,000,000 are"):
        score(*WHOLE, samples=10**7)


def test_what_is_missing_is_named_and_counts_for_nothing():
    report = score(*WHOLE[:1], *WHOLE[2:])
    assert [(each.kind, each.text) for each in report.problems] == [("missing", "a#1")]
    assert report.pass_at(1).value == pytest.approx(0.5)
    assert report.pass_at(2).items == 2
    assert reporting.problem_lines(report) == ["1 missing: a#1"]
    assert problems(*WHOLE, samples=3) == [("missing", f"{name}#2") for name in ("a", "b#0", "c")]
    only = score(WHOLE[0], samples=4)
    assert reporting.problem_lines(only) == ["11 missing: a#1; a#2; a#3; b#0#0; b#0#1 and 6 more"]


@pytest.mark.parametrize(
    ("extra", "kind", "said"),
    [
        (None, "unreadable", "f:7 is not a line of"),
        (reply("a", 1, "2"), "duplicate", "f:7: id 'a#1' is also that of f:2, which counts"),
        (line("d#0", "x", "2"), "foreign", "f:7: id 'd#0' is of no item of the task"),
        (line("a", "1 + 1?", "2"), "foreign", "f:7: id 'a' is of no item of the task"),
        (line(7, "1 + 1?", "2"), "foreign", "f:7: id '7' is of no item of the task"),
        (line("a#2", "1 + 1 =", "2"), "foreign", "was asked '1 + 1 =', the task asks '1 + 1?'"),
    ],
)
def test_a_line_that_does_not_belong_is_named_and_counts_for_nothing(extra, kind, said):
    report = score(*WHOLE, extra)
    (problem,) = report.problems
    assert problem.kind == kind
    assert said in problem.text
    assert report.scores == score(*WHOLE).scores


def test_lines_beyond_the_samples_or_the_items_asked():
    assert problems(*WHOLE, samples=1) == [
        ("foreign", f"f:{i}: id '{name}#1' is beyond 1 samples")
        for i, name in ((2, "a"), (4, "b#0"), (6, "c"))
    ]
    found = problems(*WHOLE, task=TASK.first(2))
    assert [text[:3] for _, text in found] == ["f:5", "f:6"]


def test_replies_of_two_models_or_other_options_are_not_taken_for_one():
    changed = [
        {**WHOLE[5], "model": "n"},
        {**WHOLE[5], "numerics": "cd"},
        reply("c", 1, "none", options={"temperature": 0.5}),
    ]
    for last, key in zip(changed, ("model", "numerics", "temperature"), strict=True):
        report = score(*WHOLE[:5], last)
        (problem,) = report.problems
        assert problem.kind == "mixed"
        assert f"f:6: {key} is " in problem.text
        assert key not in report.asked
        assert len(report.replies) == 6
    assert "model     several" in reporting.as_text(score(*WHOLE[:5], changed[0]))[1]


def test_nothing_to_score_is_an_error():
    with pytest.raises(ValueError, match=r"no reply to an item of task 'sums'$"):
        score()
    with pytest.raises(ValueError, match="no reply to an item of task 'sums': f:1 is not a line"):
        score(None)


def test_only_what_follows_the_reasoning_counts():
    def verdict(text, thinking):
        lines = [reply("a", 0, text, options={"thinking": thinking})]
        return score(*lines, samples=1, task=TASK.first(1)).scores[0].samples[0].verdict

    assert verdict("3 at first</think>It is 2.", True).right
    assert not verdict("2</think>It is 3.", True).right
    assert verdict("so 2", True).reason == "the reasoning did not come to an end"
    assert verdict("so 2", False).right
