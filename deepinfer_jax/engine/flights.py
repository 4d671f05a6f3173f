"""What is on its way from the device, and what comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from concurrent.futures import Future

import jax

from deepinfer_jax.engine.seats import Seat
from deepinfer_jax.engine.statistics import Asked
from deepinfer_jax.planning.policies import Move
from deepinfer_jax.requests import Result
from deepinfer_jax.rounds import Round


@dataclasses.dataclass(frozen=True)
class Update:
    """News of request number `index`: text that became certain, tokens so far, the end's result,
    or the error that ended it alone.
    """

    index: int
    text: str
    tokens: int
    result: Result | None = None
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Flight:
    """Rounds on their way, with what every slot had left before those of a policy: who sat where,
    at most how many tokens a slot may come to, whose prompts were run since the flight before, and
    the move of the policy.
    """

    made: Future[tuple[Round, jax.Array | None]]
    seats: tuple[Seat | None, ...]
    most: int
    asked: Asked
    prompts: frozenset[Hashable] = frozenset()
    move: Move | None = None
