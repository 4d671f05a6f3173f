"""What n samples of each item say about a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over items, with its standard error over items; None where one item has none."""

    value: float
    standard_error: float | None
    items: int


def pass_at(samples: int, right: int, k: int) -> float:
    """The chance that k of these samples, drawn without putting back, have a right one among them.

    An unbiased estimate of the chance that k new samples do: 1 - C(n - c, k) / C(n, k).
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"needs 0 <= right <= samples and 1 <= k <= samples, got samples={samples}, "
            f"right={right}, k={k}"
        )
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def over_items(values: Iterable[float]) -> Estimate | None:
    """Mean and standard error (n - 1 in the denominator) of one value per item; None without any.

    Items are taken as drawn from more of their kind: the error holds what the sampling of replies
    adds, since that moves the items' values too.
    """
    found = list(values)
    if not found:
        return None
    mean = math.fsum(found) / len(found)
    if len(found) == 1:
        return Estimate(mean, None, 1)
    spread = math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)
    return Estimate(mean, math.sqrt(spread / len(found)), len(found))


def table_of_k(samples: int) -> Sequence[int]:
    """The k to report of n samples: powers of two below n, and n."""
    powers = [1 << bit for bit in range(samples.bit_length()) if 1 << bit < samples]
    return [*powers, samples] if samples else []
