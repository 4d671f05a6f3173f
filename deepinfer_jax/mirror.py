"""The mirrored split of prompts over ranks: all get as much causal work (docs/parallel.md 5).

A sequence of n rows is cut into 2C blocks of ceil(n / 2C) rows for C ranks; rank r has blocks r and
2C - 1 - r, so what one lacks in the past the other has. All numbers are the host's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)
class Mirror:
    """Where the rows of sequences, one behind the other, are computed.

    own      [C, n] int32, row that stands at each place of each rank; -1: padding
    reverse  [T] int32, place of each row when the ranks' places are put one behind the other
    """

    own: np.ndarray
    reverse: np.ndarray


def mirrored(lengths: Sequence[int], ranks: int) -> Mirror:
    """The split of sequences with so many rows; ValueError for a negative number or no rank."""
    if ranks < 1 or min(lengths, default=0) < 0:
        raise ValueError(f"expected ranks >= 1 and lengths >= 0, got {ranks} and {list(lengths)}")
    parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    first = 0
    for length in lengths:
        size = -(-length // (2 * ranks))
        row = np.arange(2 * ranks * size, dtype=np.int32).reshape(2 * ranks, size)
        row = np.where(row < length, first + row, -1).astype(np.int32)
        for rank, part in enumerate(parts):
            part.append(np.concatenate([row[rank], row[2 * ranks - 1 - rank]]))
        first += length
    own = np.array([np.concatenate(part) if part else [] for part in parts], np.int32)
    reverse = np.empty(first, np.int32)
    places = np.flatnonzero(own.ravel() >= 0)
    reverse[own.ravel()[places]] = places
    return Mirror(own.reshape(ranks, -1), reverse)


def visible(
    mirror: Mirror, lengths: Sequence[int], keys: Sequence[int], ratio: int
) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) [C, n] of the compressed keys that each place sees, all sequences' in a row.

    lengths: rows of each sequence in this chunk; keys: its tokens so far, the chunk included. A
    padding place sees nothing: its end is its start.
    """
    ranks = len(mirror.own)
    each = [2 * -(-length // (2 * ranks)) for length in lengths]
    sequence = np.repeat(np.arange(len(lengths)), each)
    held = np.array([max(1, count // ratio) for count in keys], np.int64)
    start = (np.cumsum(held) - held)[sequence] if len(sequence) else np.zeros(0, np.int64)
    first = (np.cumsum(lengths) - lengths)[sequence] if len(sequence) else start
    before = (np.array(keys) - np.array(lengths))[sequence] if len(sequence) else start
    start = np.broadcast_to(start, mirror.own.shape)
    seen = (before + mirror.own - first + 1) // ratio
    return start, np.where(mirror.own >= 0, start + seen, start)


def suffixes(
    mirror: Mirror, lengths: Sequence[int], kept: Sequence[int]
) -> tuple[list[np.ndarray], np.ndarray]:
    """The last `kept` rows of each sequence, gathered: (places that each rank gives, where each
    kept row then is when all ranks' gifts are padded to the longest, one behind the other).
    """
    ends = np.cumsum(lengths)
    wanted = np.zeros(int(ends[-1]) if len(ends) else 0, bool)
    for end, count in zip(ends, kept, strict=True):
        wanted[end - count : end] = True
    given = [np.flatnonzero((own >= 0) & wanted[own]) for own in mirror.own]
    longest = max(map(len, given), default=0)
    place = np.full(len(wanted), -1, np.int64)
    for rank, (own, places) in enumerate(zip(mirror.own, given, strict=True)):
        place[own[places]] = rank * longest + np.arange(len(places))
    return given, place[wanted]


@dataclasses.dataclass(frozen=True)
class Split:
    """Static: the rows of a call are mirrored over mesh axis `axis` of `ranks` devices (inside
    `jax.shard_map`); `lengths`: of the sequences that they are cut by, the call's rows in all.
    """

    axis: str
    ranks: int
    lengths: tuple[int, ...]

    @property
    def mirror(self) -> Mirror:
        """Where the rows are."""
        return mirrored(self.lengths, self.ranks)

    def own(self):
        """[n] the rows of this device, -1 for padding."""
        return lax.dynamic_index_in_dim(self.mirror.own, lax.axis_index(self.axis), keepdims=False)

    def everybody(self) -> np.ndarray:
        """[ranks * n] the rows of all devices' places, one device behind the other."""
        return self.mirror.own.ravel()

    def shown(self, tree):
        """What every device has of its n places, of all places: leaves [ranks * n, ...]."""
        return jax.tree.map(lambda x: lax.all_gather(x, self.axis, tiled=True), tree)

    def answered(self, tree):
        """What this device has found for everybody's places, leaves [ranks * n, ...], goes to whose
        place it is: [ranks, n, ...], what each device has found for this one.
        """

        def one(x):
            return lax.all_to_all(x.reshape(self.ranks, -1, *x.shape[1:]), self.axis, 0, 0)

        return jax.tree.map(one, tree)

    def gathered(self, x, axis: int = 0):
        """The devices' places of x, n along `axis`, as the rows of the call in order, T."""
        every = lax.all_gather(x, self.axis, axis=axis, tiled=True)
        return every.take(self.mirror.reverse, axis=axis)
