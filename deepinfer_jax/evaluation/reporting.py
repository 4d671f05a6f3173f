"""A report as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from deepinfer_jax.evaluation.estimates import Estimate, table_of_k
from deepinfer_jax.evaluation.scoring import Report, Score

_NAMED = 5  # problems of a kind that the text names; the JSON has all of them
_HEAD = ("item", "right", "tokens", "cut", "why not: the first wrong reply")


def as_json(report: Report) -> dict[str, Any]:
    """Everything, as values of JSON."""
    kinds = sorted({problem.kind for problem in report.problems})
    return {
        "task": report.task.name,
        "about": report.task.about,
        "asked": dict(report.asked),
        "items": len(report.task.items),
        "samples": report.samples,
        "replies": len(report.replies),
        "pass_at": {str(k): dataclasses.asdict(estimate) for k, estimate in _estimates(report)},
        "mean_tokens": report.mean_tokens,
        "cut": report.cut,
        "problems": {
            kind: [problem.text for problem in report.problems if problem.kind == kind]
            for kind in kinds
        },
        "scores": [_score(score) for score in report.scores],
    }


def _score(score: Score) -> dict[str, Any]:
    return {
        "id": score.id,
        "right": score.right,
        "samples": [
            {
                "number": sample.number,
                "right": sample.verdict.right,
                "reason": sample.verdict.reason,
                "tokens": sample.tokens,
                "cut": sample.cut,
            }
            for sample in score.samples
        ],
    }


def _estimates(report: Report) -> Iterator[tuple[int, Estimate]]:
    for k in table_of_k(report.samples):
        estimate = report.pass_at(k)
        if estimate is not None:
            yield k, estimate


def as_text(report: Report) -> list[str]:
    """Lines for a reader: what was asked, the estimates, a table with one row per item."""
    task, asked = report.task, report.asked
    due = len(task.items) * report.samples
    lines = [
        f"task      {task.name}" + (f": {task.about}" if task.about else ""),
        f"model     {asked.get('model', 'several')}, numerics {asked.get('numerics', 'several')}",
        f"replies   {len(report.replies)} of {due} ({len(task.items)} items x {report.samples})",
    ]
    for k, estimate in _estimates(report):
        error = estimate.standard_error
        spread = (
            "one item"
            if error is None
            else f"standard error {error:.4f} over {estimate.items} items"
        )
        lines.append(f"{f'pass@{k}':<9} {estimate.value:.4f} ({spread})")
    lines.append(
        f"length    {report.mean_tokens:.1f} tokens on average, {report.cut:.1%} cut short"
    )
    return [*lines, "", *_table([_HEAD, *map(_row, report.scores)])]


def _row(score: Score) -> tuple[str, ...]:
    tokens = sum(sample.tokens for sample in score.samples) / len(score.samples)
    reasons = (s.verdict.reason for s in score.samples if not s.verdict.right)
    return (
        score.id,
        f"{score.right}/{len(score.samples)}",
        f"{tokens:.1f}",
        str(sum(sample.cut for sample in score.samples)),
        next(reasons, ""),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The last column as it is, the first flush left, those between flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
            + [row[-1]]
        ).rstrip()
        for row in rows
    ]


def problem_lines(report: Report) -> list[str]:
    """What is wrong with the file: of every kind the count and the first few."""
    lines = []
    for kind in dict.fromkeys(problem.kind for problem in report.problems):
        texts = [problem.text for problem in report.problems if problem.kind == kind]
        rest = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
        lines.append(f"{len(texts)} {kind}: {'; '.join(texts[:_NAMED])}{rest}")
    return lines
