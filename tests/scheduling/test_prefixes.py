"""The prefix cache's index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduling.pages import Pages
from deepinfer_jax.scheduling.prefixes import Prefixes, page_keys

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
TEXT = tuple(range(10))


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_equal_keys_are_equal_beginnings(one, other, size):
    keys, others = page_keys(one, size, "salt"), page_keys(other, size, "salt")
    assert len(keys) == (len(one) - 1) // size
    for page, (key, another) in enumerate(zip(keys, others, strict=False)):
        assert (key == another) == (one[: (page + 1) * size] == other[: (page + 1) * size])
    assert set(keys).isdisjoint(page_keys(one, size, "another salt"))


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (3, 0), (4, 1), (6, 1), (7, 2)])
def test_a_token_is_left_to_compute(length, pages):
    assert len(page_keys(TEXT[:length], 3, "")) == pages


def filled(snapshots: int) -> tuple[Pages, Prefixes, tuple[bytes, ...]]:
    """Beginnings of one, two and three pages of a text that has its pages no more."""
    pages = Pages(8)
    prefixes = Prefixes(pages, snapshots)
    keys, table = page_keys(TEXT, 3, ""), pages.take(3)
    for count in (1, 2, 3):
        prefixes.keep(keys[count - 1], 3 * count, table[:count])
    pages.release(table)
    return pages, prefixes, keys


def test_the_longest_beginning_is_found():
    _, prefixes, keys = filled(3)
    assert prefixes.find(keys).tokens == 9
    assert prefixes.find(keys[:2]).tokens == 6
    assert prefixes.find((keys[0], b"other")).pages == (0,)
    assert prefixes.find((b"other",)) is None
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
    _, prefixes, keys = filled(2)  # the entry of one page made room for that of three
    assert [entry.tokens for entry in prefixes] == [6, 9]
    assert prefixes.find(keys).snapshot == 0
    prefixes.pin(prefixes.find(keys[:2]))
    prefixes.unpin_all()
    assert [entry.tokens for entry in prefixes.idle()] == [9, 6]


def test_a_pinned_entry_stays():
    pages, prefixes, keys = filled(1)
    prefixes.pin(prefixes.find(keys))
    assert prefixes.idle() == []
    assert not prefixes.evict()
    taken = pages.take(1)
    assert prefixes.keep(b"new", 3, taken) is None
    prefixes.unpin_all()
    assert prefixes.keep(b"new", 3, taken) is not None
    assert keys[2] not in prefixes


def test_what_is_known_is_not_kept_twice():
    pages, prefixes, keys = filled(3)
    assert prefixes.keep(keys[2], 9, pages.take(3)) is None
    assert [pages.owners(page) for page in range(3)] == [3, 2, 1]


def test_without_snapshots_nothing_is_kept():
    pages, prefixes, _ = filled(0)
    assert len(prefixes) == 0
    assert pages.free == 8


def test_clearing_forgets_pinned_entries_too():
    pages, prefixes, keys = filled(3)
    prefixes.pin(prefixes.find(keys))
    prefixes.clear()
    assert (len(prefixes), pages.free, prefixes.find(keys)) == (0, 8, None)
