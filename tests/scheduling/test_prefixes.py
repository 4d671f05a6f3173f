"""The prefix cache's index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduling import Span
from deepinfer_jax.scheduling.pages import Pages
from deepinfer_jax.scheduling.prefixes import Beginning, Prefixes, beginnings

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
TEXT = tuple(range(10))


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_equal_keys_are_equal_beginnings(one, other, size):
    found, others = beginnings(one, size, "salt"), beginnings(other, size, "salt")
    assert [each.tokens for each in found] == list(range(size, len(one), size))
    for (tokens, key), (_, another) in zip(found, others, strict=False):
        assert (key == another) == (one[:tokens] == other[:tokens])
    assert set(found).isdisjoint(beginnings(one, size, "another salt"))


SPANS = st.tuples(st.integers(0, 5), st.integers(1, 6), st.sampled_from([b"sun", b"moon"]))


@given(st.integers(1, 24), SPANS, SPANS, st.integers(1, 4))
def test_what_a_span_shows_is_part_of_the_key_and_no_beginning_ends_inside(length, one, other, n):
    """Two prompts of equal token ids, each with one span."""
    tokens = (9,) * length
    spans = [Span(*one), Span(*other)]
    found = [beginnings(tokens, n, "", [span]) for span in spans]
    for span, mine in zip(spans, found, strict=True):
        ends = range(n, length, n)
        assert [each.tokens for each in mine] == [
            end for end in ends if not span.start < end < span.end
        ]
    common = {each.tokens for each in found[0]} & {each.tokens for each in found[1]}
    before = min(spans[0].start, spans[1].start)
    for tokens, key in found[0]:
        if tokens in common:
            alike = spans[0] == spans[1] or tokens <= before
            assert alike == (Beginning(tokens, key) in found[1])


def test_a_prompt_of_text_has_the_keys_it_has_without_spans():
    late = Span(7, 2, b"sun")
    assert beginnings(TEXT, 3, "", [late])[:2] == beginnings(TEXT, 3, "")[:2]
    assert [each.tokens for each in beginnings((*TEXT, 1), 3, "", [Span(3, 4, b"sun")])] == [3, 9]


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (3, 0), (4, 1), (6, 1), (7, 2)])
def test_a_token_is_left_to_compute(length, pages):
    assert len(beginnings(TEXT[:length], 3, "")) == pages


def filled(snapshots: int) -> tuple[Pages, Prefixes, tuple[Beginning, ...]]:
    """Beginnings of one, two and three pages of a text that has its pages no more."""
    pages = Pages(8)
    prefixes = Prefixes(pages, snapshots)
    every, table = beginnings(TEXT, 3, ""), pages.take(3)
    for tokens, key in every:
        prefixes.keep(key, tokens, table[: tokens // 3])
    pages.release(table)
    return pages, prefixes, every


def test_the_longest_beginning_is_found():
    _, prefixes, every = filled(3)
    other = Beginning(6, b"other")
    assert prefixes.find(every).tokens == 9
    assert prefixes.find(every[:2]).tokens == 6
    assert prefixes.find((every[0], other)).pages == (0,)
    assert prefixes.find((other,)) is None
    assert prefixes.find(()) is None


def test_entries_share_pages_until_the_last_one_goes():
    pages, prefixes, _ = filled(3)
    assert [pages.owners(page) for page in range(3)] == [3, 2, 1]
    assert prefixes.evict()
    assert [pages.owners(page) for page in range(3)] == [2, 2, 1]
    assert prefixes.evict()
    assert prefixes.evict()
    assert not prefixes.evict()
    assert pages.free == 8


def test_a_new_entry_takes_the_snapshot_used_longest_ago():
    _, prefixes, every = filled(2)  # the entry of one page made room for that of three
    assert [entry.tokens for entry in prefixes] == [6, 9]
    assert prefixes.find(every).snapshot == 0
    prefixes.pin(prefixes.find(every[:2]))
    prefixes.unpin_all()
    assert [entry.tokens for entry in prefixes.idle()] == [9, 6]


def test_a_pinned_entry_stays():
    pages, prefixes, every = filled(1)
    prefixes.pin(prefixes.find(every))
    assert prefixes.idle() == []
    assert not prefixes.evict()
    taken = pages.take(1)
    assert prefixes.keep(b"new", 3, taken) is None
    prefixes.unpin_all()
    assert prefixes.keep(b"new", 3, taken) is not None
    assert every[2].key not in prefixes


def test_what_is_known_is_not_kept_twice():
    pages, prefixes, every = filled(3)
    assert prefixes.keep(every[2].key, 9, pages.take(3)) is None
    assert [pages.owners(page) for page in range(3)] == [3, 2, 1]


def test_without_snapshots_nothing_is_kept():
    pages, prefixes, _ = filled(0)
    assert len(prefixes) == 0
    assert pages.free == 8


def test_clearing_forgets_pinned_entries_too():
    pages, prefixes, every = filled(3)
    prefixes.pin(prefixes.find(every))
    prefixes.clear()
    assert (len(prefixes), pages.free, prefixes.find(every)) == (0, 8, None)
