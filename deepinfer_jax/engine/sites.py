"""Where an engine's arrays lie: on one device, or spread over a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from deepinfer_jax import cache as caches
from deepinfer_jax import layout, snapshots
from deepinfer_jax.axes import CONTEXT, DATA, EXPERT, Rules
from deepinfer_jax.cache import Cache
from deepinfer_jax.engine import programs, spread
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.layout import Onto, Placements
from deepinfer_jax.loading import Model
from deepinfer_jax.params import Params
from deepinfer_jax.requests import Request
from deepinfer_jax.rounds import Running
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.snapshots import Snapshots
from deepinfer_jax.tables import Tables


class State(NamedTuple):
    """What programs are given and give back: slots, cache, their sampling, kept beginnings; the
    parameters, whose experts may move; and the tables.
    """

    running: Running
    cache: Cache
    sampling: Sampling
    kept: Snapshots | None
    params: Params
    tables: Tables


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """A mesh whose devices have the same number of slots each; None is the default device alone.

    Along an axis "context" devices share slots and their global KV. placements: of the experts on
    the mesh; rules: what parameters are split over. Raises ValueError for rules that no step runs
    with (`layout.why_not`), for a mesh with other axes than "data", "context" and "expert", and for
    placements on another number of devices than the rules split experts over.
    """

    mesh: Mesh | None = None
    placements: Placements = dataclasses.field(default_factory=dict)
    rules: Rules = layout.EXPERTS

    def __post_init__(self) -> None:
        if problem := layout.why_not(self.rules):
            raise ValueError(f"rules of the mesh: {problem}")
        names = () if self.mesh is None else self.mesh.axis_names
        others = [name for name in names if name not in (DATA, CONTEXT, EXPERT)]
        if others:
            raise ValueError(
                f"mesh must have no axes but {DATA}, {CONTEXT}, {EXPERT}, got {others} too: make "
                "it with `layout.device_mesh` (docs/parallel.md 1)"
            )
        for name, placement in self.placements.items():
            if placement.devices != self.expert_parts:
                raise ValueError(
                    f"the placement of {name!r} is on {placement.devices} devices, the rules of "
                    f"the mesh split experts over {self.expert_parts}: give both the same"
                )

    @property
    def parts(self) -> int:
        """Devices, or groups that share global KV, with slots of their own."""
        return 1 if self.mesh is None else self.mesh.size // self.ranks

    @property
    def ranks(self) -> int:
        """Devices that share the slots and the global KV of one part."""
        return 1 if self.mesh is None else spread.ranks_of(self.mesh)

    @property
    def expert_parts(self) -> int:
        """Devices that experts are split over; 1 where each has all of them."""
        return 1 if self.mesh is None else layout.expert_parts(self.mesh, self.rules)

    @property
    def programs(self) -> Any:
        """The module `programs`, or `spread.Programs`."""
        return programs if self.mesh is None else spread.programs_over(self.mesh, self.rules)

    def slots(self, tree: Any) -> Any:
        """Arrays of the host, an entry for each slot or row, with the devices these belong to."""
        return jax.device_put(tree) if self.mesh is None else self._put(tree, spread.split)

    def all(self, tree: Any) -> Any:
        """Arrays of the host on every device."""
        if self.mesh is None:
            return jax.device_put(tree)
        return self._put(tree, lambda mesh: spread.EVERYWHERE)

    def whole(self, tree: Any) -> Any:
        """Arrays of slots so that every process can read them."""
        return tree if self.mesh is None else self.programs.whole_program(tree)

    @property
    def processes(self) -> int:
        """Processes that the devices belong to."""
        return 1 if self.mesh is None else len({d.process_index for d in self.mesh.devices.flat})

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that only an engine on one device can answer."""
        if self.mesh is not None and request.images:
            raise ValueError(
                f"request {request.id!r} has images, which an engine over a mesh does not show: "
                "run it on one device, or leave them out"
            )
        if self.processes > 1 and request.options.rule is not None:
            raise ValueError(
                f"request {request.id!r} has a grammar, which every process compiles in its own "
                "time: run it in one process, or leave it out"
            )

    def free(self, free: int | None) -> int | None:
        """Of `free` bytes of a device what each of this site may have: devices of a CPU share them,
        and all processes take the least that any of them has.
        """
        if self.mesh is None or free is None:
            return free
        if self.mesh.devices.flat[0].platform == "cpu":
            free //= len(self.mesh.local_devices)
        if self.processes == 1:
            return free
        kibibytes = np.array([min(free >> 10, 2**31 - 1)], np.int32)
        return int(multihost_utils.process_allgather(kibibytes).min()) << 10

    def _put(self, tree: Any, spec: Any) -> Any:
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, spec(self.mesh))
        return jax.tree.map(lambda leaf: layout.spread(np.asarray(leaf), sharding), tree)

    def state(self, model: Model, sizes: Sizes, sampling: Sampling) -> State:
        """Nobody sits in the slots."""

        def empty() -> tuple[Running, Cache, Snapshots | None]:
            cache = caches.init_cache(
                model.cfg, model.numerics, sizes.slots, sizes.capacity, paging=sizes.paging,
                ranks=self.ranks,
            )  # fmt: skip
            kept = snapshots.init_snapshots(cache, sizes.snapshots) if sizes.snapshots else None
            running = programs.idle(sizes.slots, sizes.stop_ids)
            return programs.widened(running, sizes, model.cfg.vocab_size), cache, kept

        if self.mesh is None:
            running, cache, kept = empty()
            return State(running, cache, self.slots(sampling), kept, model.params, model.tables)
        specs = (
            spread.split(self.mesh), spread.cache_specs(self.mesh),
            spread.snapshot_specs(self.mesh) if sizes.snapshots else None,
        )  # fmt: skip
        shardings = self._shardings(specs)
        running, cache, kept = jax.jit(empty, out_shardings=shardings)()
        tables = self.all(model.tables)
        return State(running, cache, self.slots(sampling), kept, self._laid_out(model), tables)

    def _laid_out(self, model: Model) -> Params:
        """The weights on the mesh, where `loading.load` has not put them there already."""
        assert self.mesh is not None
        params, how = model.params, (model.cfg, self.mesh, self.rules)
        if layout.has_placement(params):
            layout.check_placed(params, model.cfg, Onto(self.mesh, self.placements, self.rules))
            return params
        params = layout.padded(layout.on_slots(params, self.placements), *how)
        return jax.tree.map(
            lambda leaf, sharding: layout.spread(np.asarray(leaf), sharding),
            params, layout.shardings(params, *how),
        )  # fmt: skip

    def widened(self, running: Running, sizes: Sizes, vocab: int) -> Running:
        """`programs.widened`."""
        wider = programs.widened(running, sizes, vocab)
        if self.mesh is None:
            return wider
        return jax.device_put(wider, NamedSharding(self.mesh, spread.split(self.mesh)))

    def _shardings(self, specs: Any) -> Any:
        mesh = self.mesh
        assert mesh is not None
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


ONE = Site()
