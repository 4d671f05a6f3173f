"""How real steps differ from the measured curve: medians over the newest samples.

Host side. The caller keeps the samples (newest last, bounded by the constants here) and passes the
results into `make_cost`, so that planning itself sees no clock (docs/speculation.md "The plan").
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable

import numpy as np

from deepinfer_jax.planning.cost import Cost, check_requests

SLOPE_SAMPLES = 5000  # newest steps that count
SLOPE_LEAST = 10  # samples that make a size count
SAMPLER_SAMPLES = 9
SAMPLER_LEAST = 5


def residual(cost: Cost, rows: int, forward_ms: float) -> tuple[int, float]:
    """(size, milliseconds per row of it that a step of `rows` rows took beyond the curve).

    Raises CurveTooShort when the curve has no such size.
    """
    check_requests(cost, rows)
    sizes, ms = np.asarray(cost.sizes), np.asarray(cost.ms)
    at = int(np.searchsorted(sizes, rows))
    return int(sizes[at]), (forward_ms - float(ms[at])) / int(sizes[at])


def slope(residuals: Iterable[tuple[int, float]]) -> float:
    """Milliseconds per row on top of the curve, from what `residual` returned step by step.

    The median over sizes of each size's median, so that the most frequent size has no louder voice;
    never negative; 0 until a size has SLOPE_LEAST samples.
    """
    by_size = defaultdict(list)
    for size, value in deque(residuals, SLOPE_SAMPLES):
        by_size[size].append(value)
    medians = [statistics.median(v) for v in by_size.values() if len(v) >= SLOPE_LEAST]
    return max(0.0, statistics.median(medians)) if medians else 0.0


def sampler_ms(samples: Iterable[tuple[int, float]], requests: int) -> float:
    """Milliseconds of sampling a round of `requests`, from (requests, milliseconds) samples.

    The median of the newest rounds of that many requests; of any number while those are too few;
    else 0.
    """
    own, pooled = deque(maxlen=SAMPLER_SAMPLES), deque(maxlen=SAMPLER_SAMPLES)
    for count, value in samples:
        pooled.append(value)
        if count == requests:
            own.append(value)
    medians = (statistics.median(v) for v in (own, pooled) if len(v) >= SAMPLER_LEAST)
    return next(itertools.chain(medians, [0.0]))
