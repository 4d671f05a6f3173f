"""Pictures of plans (`scale.plan`): memory of a device, and where the time of a round goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_jax.plots.style import COLOURS, new_axes
from deepinfer_jax.scale.planned import Plan

_LIMITS = dict(zip(("memory", "arithmetic", "links"), COLOURS, strict=False))


def plan(plan: Plan, axes: Any = None) -> Any:
    """One plan: `plan_memory` of it, and `plan_time`.

    axes: two; new ones, side by side, if None.
    """
    if axes is None:
        axes = new_axes("plots.plan", 1, 2, (11, 4))
    plan_memory([plan], axes[0])
    plan_time(plan, axes[1])
    return axes


def plan_memory(plans: Sequence[Plan], axes: Any = None) -> Any:
    """Bars of GB on a device by kind, one bar for every plan; the line is what there is."""
    if axes is None:
        axes = new_axes("plots.plan_memory", size=(8, 4.5))
    names = [plan.layout.name for plan in plans]
    kinds: dict[str, list[float]] = {}
    for number, plan in enumerate(plans):
        shown = {part.kind: part.device for part in plan.weights}
        shown["caches"] = sum(part.device for part in plan.caches)
        shown["intermediate values"] = plan.at_once
        for kind, size in shown.items():
            kinds.setdefault(kind, [0.0] * len(plans))[number] = size / 1e9
    below = [0.0] * len(plans)
    for place, (kind, sizes) in enumerate(kinds.items()):
        turn, colour = divmod(place, len(COLOURS))  # more kinds than colours: hatched from there
        axes.bar(
            names, sizes, bottom=below, label=kind, color=COLOURS[colour], hatch="//" * turn,
            edgecolor="white", linewidth=0,
        )  # fmt: skip
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    for number, plan in enumerate(plans):
        room = plan.room / 1e9
        axes.plot([number - 0.45, number + 0.45], [room, room], color="black", linestyle="--")
    axes.set(ylabel="GB on a device")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return axes


def plan_time(plan: Plan, axes: Any = None) -> Any:
    """Milliseconds of the sections of a round, coloured by what limits them."""
    if axes is None:
        axes = new_axes("plots.plan_time", size=(6, 4))
    sections = plan.decode.sections
    for limit, colour in _LIMITS.items():
        found = [(n, 1e3 * s.seconds) for n, s in enumerate(sections) if s.limit == limit]
        if found:
            axes.barh(*zip(*found, strict=True), color=colour, label=limit)
    axes.set_yticks(range(len(sections)), [section.name for section in sections])
    axes.invert_yaxis()
    axes.set(xlabel=f"ms of a round of {plan.decode.rows} rows on a device")
    axes.legend(title="limited by")
    return axes
