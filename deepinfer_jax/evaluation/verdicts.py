"""What a verifier says of one reply."""

import dataclasses
import reprlib
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a reply is right, and why not: one line that a person reads."""

    right: bool
    reason: str = ""


RIGHT = Verdict(True)


def wrong(reason: str) -> Verdict:
    """The verdict on a reply that is not right."""
    return Verdict(False, reason)


def differs(expected: Any, found: Any) -> Verdict:
    """The verdict on a reply that says something else; both are quoted short."""
    return wrong(f"expected {reprlib.repr(expected)}, got {reprlib.repr(found)}")
