"""Collectives of a compiled program, from its text: loops count as often as they run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

NAMES = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-permute")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_ARRAY = re.compile(r"\b[a-z]+\d*\w*\[([\d,]*)\]")
_OPERATION = re.compile(rf"= (.*?) ({'|'.join(NAMES)})(?:-start)?\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def collectives(text: str) -> tuple[tuple[str, int, int], ...]:
    """(name, operations, elements of all results) of every collective that the program runs.

    A loop whose number of turns is not known before it runs counts as one turn.
    """
    bodies, entry = _computations(text)
    counts = _counts(bodies, entry)
    found: dict[str, list[int]] = {}
    for name, lines in bodies.items():
        for operation, elements in _in(lines):
            total = found.setdefault(operation, [0, 0])
            total[0] += counts.get(name, 0)
            total[1] += counts.get(name, 0) * elements
    return tuple((n, *found[n]) for n in NAMES if n in found)  # pyright: ignore[reportReturnType]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of every computation by name, and the name of the one that is run."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            lines = bodies.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif line.startswith(" "):
            lines.append(line)
    return bodies, entry


def _in(lines: list[str]) -> Iterator[tuple[str, int]]:
    for line in lines:
        found = _OPERATION.search(line)
        if found:
            shapes = _ARRAY.findall(found.group(1))
            yield found.group(2), sum(math.prod(map(int, s.split(","))) if s else 1 for s in shapes)


def _counts(bodies: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How often each computation is run."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen or name not in bodies:
            return
        seen.add(name)
        for called, _ in _calls(bodies[name]):
            visit(called)
        order.append(name)

    visit(entry)
    counts = dict.fromkeys(order, 0)
    counts[entry] = 1
    for name in reversed(order):  # callers before what they call
        for called, times in _calls(bodies[name]):
            if called in counts:
                counts[called] += counts[name] * times
    return counts


def _calls(lines: list[str]) -> Iterator[tuple[str, int]]:
    for line in lines:
        trips = _TRIPS.search(line) if " while(" in line else None
        times = int(trips.group(1)) if trips else 1
        for called in _CALLED.findall(line):
            yield called, times
        for branches in _BRANCHES.findall(line):
            for name in branches.split(","):
                yield name.strip().lstrip("%"), 1
