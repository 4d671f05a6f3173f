"""Verification by a threshold on each draft's own probability, without a model of time."""

from __future__ import annotations

import bisect
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


def threshold(probabilities: Array, tau: Array | float) -> jax.Array:
    """Leading drafts whose probability is at least `tau`: int32 [...] of [..., D].

    The rule of the public article (docs/speculation.md "The plan"); causal, because a draft is
    judged by its own confidence and those before it.
    """
    p = jnp.asarray(probabilities)
    return leading(p >= jnp.asarray(tau, p.dtype))


def leading(ok: jax.Array) -> jax.Array:
    """How many entries of `ok` [..., D] bool come before the first false one: int32 [...]."""
    return jnp.cumprod(ok.astype(jnp.int32), axis=-1).sum(axis=-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class TauRamp:
    """A threshold that rises with the load: a free device may verify doubtful drafts, a full one
    may not.

    running: ascending numbers of running requests, from 1 on.
    tau: the threshold at each, in [0, 1], not falling. Linear in log2(requests) between them,
        constant outside. No published rule fixes the numbers.
    """

    running: tuple[int, ...]
    tau: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.running or len(self.running) != len(self.tau):
            raise ValueError(
                "running and tau must have one length, at least 1, got "
                f"{len(self.running)} and {len(self.tau)}"
            )
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.running):
            raise ValueError(f"running must be integers of at least 1, got {self.running}")
        if any(b <= a for a, b in zip(self.running, self.running[1:], strict=False)):
            raise ValueError(f"running must be ascending, got {self.running}; sort the points")
        if any(not 0 <= t <= 1 for t in self.tau):
            raise ValueError(f"tau must lie in [0, 1], got {self.tau}")
        if any(b < a for a, b in zip(self.tau, self.tau[1:], strict=False)):
            raise ValueError(f"tau must not fall as the load rises, got {self.tau}")


def tau_for(ramp: TauRamp, running: int) -> float:
    """The threshold of `ramp` for a number of running requests, at least 1."""
    if running < 1:
        raise ValueError(f"running must be at least 1, got {running}")
    above = bisect.bisect_right(ramp.running, running)
    if above == 0:
        return ramp.tau[0]
    if above == len(ramp.running):
        return ramp.tau[-1]
    (low, high), (start, end) = ramp.running[above - 1 : above + 1], ramp.tau[above - 1 : above + 1]
    share = math.log2(running / low) / math.log2(high / low)
    return start + share * (end - start)
