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
from typing import NamedTuple

from deepinfer_jax.scheduling.jobs import Span
from deepinfer_jax.scheduling.pages import Pages


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A known beginning.

    Attributes:
      key: digest of its tokens, see `beginnings`.
      tokens: its length, a whole number of pages.
      pages: the pages that hold it, in order.
      snapshot: number of the snapshot of a slot's state right after these tokens.
    """

    key: bytes
    tokens: int
    pages: tuple[int, ...]
    snapshot: int


class Beginning(NamedTuple):
    """The first `tokens` tokens of a prompt, a whole number of pages, and the key of what they are.

    Equal keys mean equal beginnings.
    """

    tokens: int
    key: bytes


def beginnings(
    tokens: Sequence[int], page_tokens: int, salt: str, spans: Sequence[Span] = ()
) -> tuple[Beginning, ...]:
    """The beginnings of `tokens` that a hit may cover: up to each boundary between two pages.

    A boundary inside a span is left out: a state there would be that of a span computed in two
    parts. A key is a 256-bit digest of the key before it, of the token ids in between and of the
    spans among them, whose ids do not say what they show. The first one starts from `salt`, which
    names the weights and the numerics. The last token always stays out: its row must run to give
    the next token's logits.
    """
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    found, before = [], 0
    for end in range(page_tokens, len(tokens), page_tokens):
        if any(span.start < end < span.end for span in spans):
            continue
        inside = [span for span in spans if before <= span.start < end]
        ids = array.array("q", [end - before, *tokens[before:end]]).tobytes()
        shown = [(span.start, span.length, span.key) for span in inside]
        key = hashlib.blake2b(key + ids + repr(shown).encode(), digest_size=32).digest()
        found.append(Beginning(end, key))
        before = end
    return tuple(found)


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

    def find(self, beginnings: Sequence[Beginning]) -> Entry | None:
        """The longest known one among `beginnings` (of one sequence, in order)."""
        for _, key in reversed(beginnings):
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
