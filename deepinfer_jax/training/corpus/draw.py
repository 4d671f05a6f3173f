"""Random choices that give the same corpus on every Python version.

Only `random.Random.random` is promised to repeat across versions; every choice is made from it.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Draw:
    """A seeded source of choices; two with one seed make the same choices in the same order."""

    def __init__(self, seed: int):
        self._next = random.Random(seed).random

    def below(self, limit: int) -> int:
        """An integer in 0 .. limit-1."""
        return int(self._next() * limit)

    def between(self, low: int, high: int) -> int:
        """An integer in low .. high, both ends included."""
        return low + int(self._next() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._next() < probability

    def pick(self, items: Sequence[Item]) -> Item:
        """One of `items`."""
        return items[int(self._next() * len(items))]

    def some(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different positions of `items`, in random order."""
        pool = list(items)
        if count > len(pool):
            raise ValueError(f"count must not exceed the {len(pool)} items, got {count}")
        return [pool.pop(int(self._next() * len(pool))) for _ in range(count)]
