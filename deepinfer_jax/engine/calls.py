"""How the prompt rows of a step become calls of few sizes, of which none splits an image's span."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine import programs
from deepinfer_jax.engine.sizes import Sizes, image_rows, prefill_rows
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows

Row = tuple[int, int, int]  # token, slot, position


@dataclasses.dataclass(frozen=True, eq=False)
class Shown:
    """An image among rows: row `first` is the first of its span. embeddings: [length, D]."""

    first: int
    embeddings: np.ndarray

    @property
    def end(self) -> int:
        """The row behind the span."""
        return self.first + len(self.embeddings)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call with prompts: its rows, how many the program has, and the images among them; `local`:
    slots of each of several devices, among whose rows those of slot -1 are padding.
    """

    part: Sequence[Row]
    size: int
    shown: tuple[Shown, ...] = ()
    local: int | None = None

    @property
    def count(self) -> int:
        """Prompt rows."""
        return sum(slot >= 0 for _, slot, _ in self.part)

    def rows(self, cfg: ModelConfig, numerics: Numerics) -> Rows:
        """What the program is given, on the host. Without images there are no embeddings."""
        rows = programs.host_rows(self.part, self.size, self.local)
        return illustrated(rows, self.shown, cfg, numerics) if self.shown else rows


def joint_calls(every: Sequence[Row], sizes: Sizes, parts: int) -> Iterator[Call]:
    """`calls` without images over `parts` devices with the slots of `sizes` each: in every call
    each device has as many rows as that with the most left needs.
    """
    local = sizes.slots
    of_part = [[row for row in every if row[1] // local == part] for part in range(parts)]
    done, longest = 0, max(map(len, of_part))
    while done < longest:
        size = prefill_rows(longest - done, sizes)
        rows = [each[done : done + size] for each in of_part]
        filled = [row for each in rows for row in [*each, *[(0, -1, 0)] * (size - len(each))]]
        yield Call(filled, size * parts, local=local)
        done += size


def calls(every: Sequence[Row], shown: Sequence[Shown], sizes: Sizes) -> Iterator[Call]:
    """The rows of a step in calls of an engine of these sizes, in order.

    A call with an image has the rows that `sizes.image_rows` names for it, and whatever stands
    around the image as far as it fits; all others are those of a step without images.
    """
    done, left = 0, list(shown)
    while done < len(every):
        size = image_rows(len(left[0].embeddings)) if left else 0
        if left and left[0].end - done <= size:
            end = min(done + size, len(every))
            end = next((s.first for s in left if s.first < end < s.end), end)
        else:
            until = left[0].first if left else len(every)
            size = prefill_rows(until - done, sizes)
            end = min(done + size, until)
        inside = [s for s in left if s.end <= end]
        del left[: len(inside)]
        moved = tuple(Shown(s.first - done, s.embeddings) for s in inside)
        yield Call(every[done:end], size, moved)
        done = end


def illustrated(rows: Rows, shown: Sequence[Shown], cfg: ModelConfig, numerics: Numerics) -> Rows:
    """`rows` that show images: the program is another one than for rows of text."""
    size = rows.slots.shape[0]
    image = np.zeros(size, bool)
    embeddings = np.zeros((size, cfg.hidden_size), jnp.dtype(numerics.dtype))
    for each in shown:
        image[each.first : each.end] = True
        embeddings[each.first : each.end] = each.embeddings
    shows: Any = {"image": image, "embeddings": embeddings}  # NumPy, as the rest of `rows`
    return dataclasses.replace(rows, **shows)
