"""The prefix cache's index: beginnings of prompts whose pages and state are still on the device.

A sequence's global KV lies in pages and can be shared page by page. Its window rings, pooling state
and n-gram history cannot be rebuilt from pages: they exist only where a copy of them, a *snapshot*,
was kept. So a known beginning is an entry: a boundary between two pages, the pages up to it, and
the number of a snapshot. Warm or cold, a request gets the same bits: the KV of a token depends on
the tokens before it only, not on who computed it or in which chunks.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

from deepinfer_jax.scheduling.pages import Pages


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A known beginning.

    Attributes:
      key: digest of its tokens, see `page_keys`.
      tokens: its length, a whole number of pages.
      pages: the pages that hold it, in order.
      snapshot: number of the snapshot of a slot's state right after these tokens.
    """

    key: bytes
    tokens: int
    pages: tuple[int, ...]
    snapshot: int


def page_keys(tokens: Sequence[int], page_tokens: int, salt: str) -> tuple[bytes, ...]:
    """A key for each full page of `tokens` that a hit may cover.

    The key of a page is a 256-bit digest of the key before it and the page's token ids, so equal
    keys mean equal beginnings. The first one starts from `salt`, which names the weights and the
    numerics. The last token always stays out: its row must run to give the next token's logits.
    """
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    keys = []
    for end in range(page_tokens, len(tokens), page_tokens):
        ids = array.array("q", tokens[end - page_tokens : end]).tobytes()
        key = hashlib.blake2b(key + ids, digest_size=32).digest()
        keys.append(key)
    return tuple(keys)


class Prefixes:
    """Entries by key, least recently used first; it owns their pages and the snapshot numbers.

    An entry is *idle* unless it is pinned: somebody is about to copy from its snapshot. Only idle
    entries are evicted, and a running request that shares an entry's pages keeps them.
    """

    def __init__(self, pages: Pages, snapshots: int) -> None:
        self._pages = pages
        self._entries: collections.OrderedDict[bytes, Entry] = collections.OrderedDict()
        self._pinned: set[bytes] = set()
        self._snapshots = list(range(snapshots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, keys: Sequence[bytes]) -> Entry | None:
        """The longest known beginning among `keys` (of one sequence, in order)."""
        for key in reversed(keys):
            if key in self._entries:
                return self._entries[key]
        return None

    def pin(self, entry: Entry) -> None:
        """Protect `entry` until `unpin_all`; it now is the one used last."""
        self._pinned.add(entry.key)
        self._entries.move_to_end(entry.key)

    def unpin_all(self) -> None:
        """All entries are idle again."""
        self._pinned.clear()

    def keep(self, key: bytes, tokens: int, pages: Sequence[int]) -> Entry | None:
        """A new entry that shares `pages`; the caller copies the state to its snapshot number.

        The least recently used idle entry gives up its snapshot if none is left. None where the key
        is known already, or where every snapshot is pinned.
        """
        if key in self._entries or not (self._snapshots or self.evict()):
            return None
        self._pages.share(pages)
        entry = Entry(key, tokens, tuple(pages), self._snapshots.pop())
        self._entries[key] = entry
        return entry

    def idle(self) -> list[Entry]:
        """Entries that may be evicted, the next one first."""
        return [entry for entry in self if entry.key not in self._pinned]

    def evict(self) -> bool:
        """Forget the least recently used idle entry; False where there is none."""
        key = next((key for key in self._entries if key not in self._pinned), None)
        if key is None:
            return False
        entry = self._entries.pop(key)
        self._pages.release(entry.pages)
        self._snapshots.append(entry.snapshot)
        return True

    def clear(self) -> None:
        """Forget everything, pinned or not: what was computed is no longer what would be."""
        self._pinned.clear()
        while self.evict():
            pass
