"""Where an engine's tokens go among experts, and when the experts move (docs/parallel.md 3)."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from deepinfer_jax import eplb, layout, moving
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.sites import Site
from deepinfer_jax.eplb import Placement, Window
from deepinfer_jax.layout import Placements
from deepinfer_jax.rounds import Round


@dataclasses.dataclass(frozen=True)
class Balancing:
    """When experts move; it decides the time of a step and never a result.

    interval: calls of the device between two rearrangements; 0: experts stay. window: calls whose
    loads a new placement is made for. Both as in the published engine, whose steps are calls.
    """

    interval: int = 0
    window: int = 100

    def __post_init__(self) -> None:
        for name, least in (("interval", 0), ("window", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


AS_IT_IS = Balancing()


def check(site: Site, balancing: Balancing) -> None:
    """Raise ValueError where experts are to move, but every device has all of them by the rules."""
    if balancing.interval and site.mesh is not None and not site.rules.mesh_axes("expert"):
        raise ValueError(
            "experts cannot move to where the load is: the rules of the mesh have none for "
            '"expert", so that every device has all of them. Split them over the mesh axis '
            '"expert", or do not rearrange'
        )


class Balance:
    """Loads of the latest calls, the placements as they are, and the layers that are to move."""

    def __init__(self, placements: Placements, balancing: Balancing, cfg: ModelConfig) -> None:
        self._placements = dict(placements)
        self._balancing = balancing
        self._windows: dict[str, Window] = {
            name: eplb.make_window(balancing.window, layers, experts)
            for name, (layers, experts) in layout.expert_counts(cfg).items()
            if name in placements
        }
        self._calls = 0
        self._due: deque[tuple[str, int]] = deque()

    @property
    def rearranges(self) -> bool:
        """Whether experts are going to move."""
        return bool(self._placements and self._balancing.interval)

    def site(self, site: Site) -> Site:
        """`site` with the experts where they are by now."""
        return dataclasses.replace(site, placements=self._placements)

    def note(self, made: Round) -> float | None:
        """Record where the tokens of a call went; the balance of its devices, None for one."""
        if made.loads is None:
            return None
        every = []
        for name, counts in made.loads.items():
            counts = np.asarray(counts, np.int64)
            self._windows[name] = eplb.record(self._windows[name], np.sum(counts, axis=0))
            loads = eplb.device_loads(self._placements[name], counts)
            every.append(loads.reshape(-1, loads.shape[-1]))
        self._calls += 1
        if self._balancing.interval and self._calls % self._balancing.interval == 0:
            # What is still due from before is planned with the newest loads as well.
            waiting = set(self._due)
            all_layers = [
                (name, n) for name, p in self._placements.items() for n in range(p.layers)
            ]
            self._due.extend(each for each in all_layers if each not in waiting)
        return eplb.moe_lb(np.concatenate(every))

    def next(self) -> tuple[str, int, Placement, Placement] | None:
        """What the next layer that is due comes to: (stack, layer, placement before, and after);
        None where it stays. One layer at a time: the host plans while the device runs the step.
        """
        if not self._due:
            return None
        name, layer = self._due.popleft()
        old, counts = self._placements[name], self._windows[name].counts[:, layer : layer + 1]
        if not counts.any():
            return None
        found = eplb.rearrange(moving.only(old, layer), counts)
        new = moving.with_layer(old, layer, found.placement)
        if np.array_equal(new.physical_to_logical, old.physical_to_logical):
            return None
        self._placements[name] = new
        return name, layer, old, new
