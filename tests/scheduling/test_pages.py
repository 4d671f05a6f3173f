"""The block manager."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduling.pages import Pages


def test_all_or_nothing():
    pages = Pages(5)
    assert pages.take(3) == (0, 1, 2)
    assert pages.take(3) is None
    assert pages.free == 2
    assert pages.take(0) == ()
    assert pages.take(2) == (3, 4)


def test_a_page_is_free_when_its_last_owner_lets_go():
    pages = Pages(3)
    taken = pages.take(2)
    pages.share(taken[:1])
    pages.release(taken)
    assert (pages.owners(0), pages.owners(1), pages.free) == (1, 0, 2)
    pages.release(taken[:1])
    assert pages.free == 3


def test_the_page_freed_last_is_taken_first():
    pages = Pages(4)
    pages.take(4)
    pages.release((1, 3))
    assert pages.take(2) == (3, 1)


def test_what_letting_go_would_free():
    pages = Pages(4)
    pages.take(4)
    pages.share((0, 1))
    assert pages.freed_by([(0, 2)]) == 1
    assert pages.freed_by([(0, 2), (0, 1)]) == 2
    assert pages.freed_by([]) == 0


@pytest.mark.parametrize("change", [Pages.share, Pages.release])
def test_a_free_page_has_nobody_to_share_or_release_it(change):
    with pytest.raises(ValueError, match="page 1 is free"):
        change(Pages(2), (1,))


def test_a_page_cannot_be_released_twice():
    pages = Pages(2)
    taken = pages.take(1)
    pages.release(taken)
    with pytest.raises(ValueError, match="once too often"):
        pages.release(taken)


@pytest.mark.parametrize("page", [-1, 2])
def test_unknown_pages(page):
    pages = Pages(2)
    pages.take(2)
    for use in (pages.share, pages.release):
        with pytest.raises(ValueError, match=f"no page {page}: pages are 0 to 1"):
            use((page,))


def test_negative_counts():
    with pytest.raises(ValueError, match="take -1 pages"):
        Pages(2).take(-1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=40))
def test_counts_are_those_of_the_tables(events):
    """Tables that take, share and release at random."""
    pages, tables = Pages(9), []
    for count, choice in events:
        table = tables[choice % len(tables)] if tables else ()
        if choice < 4:
            taken = pages.take(count)
            assert (taken is None) == (count > 9 - len({p for t in tables for p in t}))
            tables += [taken] if taken else []
        elif choice < 6:
            pages.share(table)
            tables += [table] if table else []
        elif tables:
            tables.remove(table)
            expected = pages.free + pages.freed_by([table])
            pages.release(table)
            assert pages.free == expected
        owners = collections.Counter(page for each in tables for page in each)
        assert [pages.owners(page) for page in range(9)] == [owners[page] for page in range(9)]
        assert pages.free == 9 - len(owners)
