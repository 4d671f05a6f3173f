"""Limits and jobs are checked where they are made."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer_jax.scheduling import Job, Limits, Span

LIMITS = Limits(slots=2, pages=5, page_tokens=7, rows=11, longest=40)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"slots": 0}, ValueError, "slots must be at least 1, got 0"),
        ({"pages": True}, TypeError, "pages must be an integer, got True"),
        ({"page_tokens": 2.0}, TypeError, "page_tokens must be an integer, got 2.0"),
        ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
        ({"longest": 1}, ValueError, "longest must be at least 2, got 1"),
        ({"snapshots": -1}, ValueError, "snapshots must be at least 0, got -1"),
        ({"keep": "all"}, ValueError, "keep must be one of shared, ends, got 'all'"),
        ({"mixed": 1}, TypeError, "mixed must be true or false, got 1"),
    ],
)
def test_limits_say_what_is_wrong(changed, error, says):
    with pytest.raises(error, match=says):
        dataclasses.replace(LIMITS, **changed)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"tokens": ()}, ValueError, "the prompt of job 'a' has no tokens"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        ({"priority": -1}, ValueError, "priority must be at least 0, got -1"),
        ({"priority": 10}, ValueError, "priority must be at most 9, got 10"),
        ({"spans": (Span(0, 0, b""),)}, ValueError, "length of a span must be at least 1, got 0"),
        ({"spans": (Span(1, 2, b""),)}, ValueError, "2 prompt tokens, got one of 2 tokens at 1 "),
        (
            {"spans": (Span(0, 2, b""), Span(1, 1, b""))},
            ValueError,
            "got one of 1 tokens at 1 behind one that ends at 2",
        ),
    ],
)
def test_jobs_say_what_is_wrong(changed, error, says):
    with pytest.raises(error, match=says):
        dataclasses.replace(Job("a", (3, 5), 4), **changed)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (7, 1), (8, 2), (35, 5)])
def test_pages_for(tokens, pages):
    assert LIMITS.pages_for(tokens) == pages


def test_what_just_fits_is_accepted():
    LIMITS.check(Job("a", (1,) * 30, 5))  # five pages
    dataclasses.replace(LIMITS, pages=6).check(Job("a", (1,) * 30, 10))  # the longest


def test_what_never_fits_is_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match=r"30 prompt .* max_tokens 6 = 36 tokens = 6 pages of 7, "):
        LIMITS.check(Job("a", (1,) * 30, 6))
    with pytest.raises(ValueError, match=r"30 prompt .* 11 = 41 tokens, the longest .* is 40;"):
        LIMITS.check(Job("a", (1,) * 30, 11))


def test_a_span_that_no_step_can_hold_is_refused_with_the_arithmetic():
    job = Job("a", (1,) * 12, 3, spans=(Span(1, 3, b""), Span(2 + 2, 8, b"")))
    dataclasses.replace(LIMITS, rows=8).check(job)
    with pytest.raises(ValueError, match=r"8 tokens at 4, .* a step has 7 prompt rows: show a sma"):
        dataclasses.replace(LIMITS, rows=7).check(job)
