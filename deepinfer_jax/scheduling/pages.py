"""The block manager: which pages of the global KV are in use, and by how many owners."""

from __future__ import annotations

import collections
from collections.abc import Iterable


class Pages:
    """A pool of `count` equal pages, numbered from 0. Host side only; a page is a number here.

    An owner is whoever holds a page in its table: a running request or an entry of the prefix
    cache. A page is free when its last owner releases it, and only full pages get a second owner,
    so nobody writes a page that others read. Every operation costs as much as the pages it names.
    The page freed last is taken first: it is the one most likely to be in some device cache.
    """

    def __init__(self, count: int) -> None:
        self._owners = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def count(self) -> int:
        """Pages of the pool."""
        return len(self._owners)

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def owners(self, page: int) -> int:
        """Number of owners of `page`."""
        return self._owners[self._known(page)]

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` free pages, with the caller as their owner; None, and no page, if fewer are free.

        Raises ValueError for a negative count.
        """
        if count < 0:
            raise ValueError(f"cannot take {count} pages")
        if count > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(count))
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more owner of each page. Raises ValueError for an unknown or a free page."""
        for page in pages:
            if not self.owners(page):
                raise ValueError(f"page {page} is free: only a page in use can be shared")
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less of each page. Raises ValueError for an unknown or a free page."""
        for page in pages:
            if not self.owners(page):
                raise ValueError(f"page {page} is free: it was released once too often")
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def freed_by(self, tables: Iterable[Iterable[int]]) -> int:
        """How many pages would become free if the owners of these tables released them all."""
        held = collections.Counter(page for table in tables for page in table)
        return sum(1 for page, times in held.items() if self.owners(page) == times)

    def _known(self, page: int) -> int:
        if not 0 <= page < len(self._owners):
            raise ValueError(f"there is no page {page}: pages are 0 to {len(self._owners) - 1}")
        return page
