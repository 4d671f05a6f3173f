"""From requests to updates: an engine of the right sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepinfer_jax.engine.balance import AS_IT_IS, Balancing
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.flights import Update
from deepinfer_jax.engine.memory import fitted, free_bytes
from deepinfer_jax.engine.sites import ONE, Site
from deepinfer_jax.engine.sizes import sizes_for, slots_for
from deepinfer_jax.engine.statistics import Observer
from deepinfer_jax.loading import Model
from deepinfer_jax.planning import OFF, Policy
from deepinfer_jax.requests import Request


def start(
    model: Model, requests: Sequence[Request], *, batch_size: int | None = None,
    eager: bool = False, policy: Policy = OFF, observer: Observer | None = None, site: Site = ONE,
    balancing: Balancing = AS_IT_IS,
) -> Engine:  # fmt: skip
    """An engine to which `requests`, at least one, are submitted in this order, for its `updates`;
    see `Engine` for the arguments. Over a mesh `batch_size` is of all devices together.

    Raises TypeError or ValueError for a `batch_size` that is none, and ValueError where the device
    has no room for the longest request.
    """
    parts, ranks, free = site.parts, site.ranks, site.free(free_bytes())
    sizes = sizes_for(requests, model.cfg, model.max_length, batch_size, parts, ranks)
    sizes = fitted(sizes, model.cfg, model.numerics, free, ranks).of_all(parts)
    engine = Engine(
        model, sizes, policy=policy, eager=eager, observer=observer, site=site, balancing=balancing
    )
    for request in requests:
        engine.submit(request)
    return engine


def run(
    model: Model, requests: Sequence[Request], *, batch_size: int | None = None,
    eager: bool = False, policy: Policy = OFF, site: Site = ONE,
) -> Iterator[Update]:  # fmt: skip
    """Updates of `requests`, of none too, until each has its result or error. Raises as `start`."""
    slots_for(len(requests), batch_size)
    if not requests:
        return iter(())
    return start(
        model, requests, batch_size=batch_size, eager=eager, policy=policy, site=site
    ).updates()
