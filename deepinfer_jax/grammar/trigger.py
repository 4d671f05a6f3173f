"""Before the grammar: waiting for the trigger tokens, and forcing them after the bound token.

The reply is free until the trigger has come in a row; progress is that of Knuth, Morris and Pratt,
over tokens. Once the bound token has come, only the next missing trigger token is allowed, starting
from the progress that already counts the bound token (recorded vectors
`engine_misc/grammar_trigger.json`).
"""

from __future__ import annotations

import dataclasses
import functools


@dataclasses.dataclass(frozen=True, slots=True)
class Trigger:
    """token_ids: may be empty (the grammar begins at once); bound: needs a non-empty trigger."""

    token_ids: tuple[int, ...] = ()
    bound: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Where a reply stands.

    matched: trigger tokens that its end matches; forced: the missing ones are forced; finished: its
    end token has come.
    """

    matched: int = 0
    forced: bool = False
    finished: bool = False


def running(trigger: Trigger, phase: Phase) -> bool:
    """Whether the grammar itself rules the next token (in a finished reply nothing does)."""
    return phase.matched == len(trigger.token_ids)


def forced_next(trigger: Trigger, phase: Phase) -> int | None:
    """The only token allowed next, while trigger tokens are forced."""
    if phase.finished or not phase.forced or running(trigger, phase):
        return None
    return trigger.token_ids[phase.matched]


def constrained(trigger: Trigger, phase: Phase) -> bool:
    """Whether the next token is chosen under a mask."""
    return phase.forced or running(trigger, phase)


def advance(trigger: Trigger, phase: Phase, token: int, eos: int) -> Phase | None:
    """The phase after `token`; None where another token is forced. The grammar is not asked."""
    forced = forced_next(trigger, phase)
    if phase.finished:
        return phase
    if forced is not None:
        if token != forced:
            return None
        return dataclasses.replace(phase, matched=phase.matched + 1)
    if token == eos:
        return dataclasses.replace(phase, finished=True)
    if running(trigger, phase):
        return phase
    matched = _progress(trigger.token_ids, phase.matched, token)
    bound = token == trigger.bound and matched < len(trigger.token_ids)
    return Phase(matched, forced=bound)


def _progress(pattern: tuple[int, ...], matched: int, token: int) -> int:
    borders = _borders(pattern)
    while matched and pattern[matched] != token:
        matched = borders[matched - 1]
    return matched + (pattern[matched] == token)


@functools.lru_cache(maxsize=256)
def _borders(pattern: tuple[int, ...]) -> tuple[int, ...]:
    """For every prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for token in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != token:
            length = borders[length - 1]
        borders.append(length + (pattern[length] == token))
    return tuple(borders)
