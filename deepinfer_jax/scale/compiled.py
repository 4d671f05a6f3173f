"""The steps of the engine compiled ahead of time over virtual devices, and what the compiler says.

Weights, caches and inputs are shapes with shardings; nothing is allocated and nothing runs. The
arguments of the compiled programs are what an accelerator has to hold, byte for byte, and its
collectives are those that a run would make. Its temporaries are a CPU's and say nothing about an
accelerator (`Program.cpu_temporaries` is there to be seen, not to be planned with).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax import axes, cache, params, rounds, sampling, steps, tables
from deepinfer_jax import layout as laying
from deepinfer_jax.axes import CONTEXT
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.planning.schedules import Lengths
from deepinfer_jax.rounds import Running
from deepinfer_jax.rows import Rows
from deepinfer_jax.scale import hlo
from deepinfer_jax.scale.layouts import Layout
from deepinfer_jax.scale.workload import Workload

# Plain XLA operations in place of an accelerator's kernels, which no CPU compiles; the arguments,
# packed caches among them, and the collectives are the same.
FORM = Numerics(rows="batched")
FORM_NOTE = (
    'compiled with plain XLA operations (rows="batched") where an accelerator has kernels; '
    "what a CPU's compiler would set aside for intermediate values is not in any number above"
)
# What is compiled never runs: machine code need not be good, and arguments and collectives do not
# depend on it. This is less than half of the work.
_QUICK: Any = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
_STOPS = 4  # ids that can end a slot


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step; bytes of one device.

    collectives: (name, operations, elements of their results) with loops counted as often as they
    run; operations_once: XLA's count of floating-point operations, which counts loops once.
    """

    name: str
    trace_s: float
    compile_s: float
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    cpu_temporaries: int
    operations_once: float
    collectives: tuple[tuple[str, int, int], ...]


def why_not(layout: Layout) -> str:
    """What keeps the programs at hand from running on a layout; empty where nothing does."""
    if layout.size(CONTEXT) > 1 and layout.ranks == 1:
        return (
            "devices along the mesh axis context have the same sequences and share their global "
            "KV: split entry over it, slot and page over the other axes (docs/parallel.md 5)"
        )
    if layout.engram == "host":
        return "steps read Engram tables from the memory of the device, not of its host"
    return laying.why_not(layout.rules)


def compile_steps(
    cfg: ModelConfig, layout: Layout, workload: Workload, devices: Any = None
) -> tuple[Program, ...]:
    """The decoding round and the prefill of a workload, compiled over `layout.devices` devices.

    XLA spends a quarter of the time less where programs carry no Python call stacks:
    jax.config.update("jax_traceback_in_locations_limit", 0).

    Raises ValueError where the programs cannot run on the layout (`why_not`), or there are fewer
    devices: set `jax_num_cpu_devices` before anything asks for a device.
    """
    problem = why_not(layout)
    if problem:
        raise ValueError(f"{layout.name} cannot be compiled: {problem}")
    devices = jax.devices("cpu") if devices is None else list(devices)
    if len(devices) < layout.devices:
        raise ValueError(
            f"{layout.name} needs {layout.devices} devices, this process has {len(devices)}: start "
            f'with jax.config.update("jax_num_cpu_devices", {layout.devices}) before any device is '
            "asked for"
        )
    layout.check(cfg)
    workload.check(cfg)
    mesh = axes.make_mesh(dict(layout.mesh), devices[: layout.devices])
    made = _programs(_Scene(cfg, layout, workload, mesh))
    with concurrent.futures.ThreadPoolExecutor(len(made)) as pool:
        # The second is traced while the first compiles, which needs no Python.
        waiting = [pool.submit(_compiled, n, *_lowered(*made[n])) for n in made]
        return tuple(each.result() for each in waiting)


@dataclasses.dataclass(frozen=True)
class _Scene:
    cfg: ModelConfig
    layout: Layout
    work: Workload
    mesh: Mesh

    def shaped(self, leaf: Any) -> Any:
        """A leaf with logical axes as a `jax.ShapeDtypeStruct` with its sharding."""
        rules = self.layout.rules
        shape = axes.padded_shape(leaf, self.mesh, rules)
        sharding = axes.sharding_of(leaf, self.mesh, rules)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    def vector(self, dtype: Any, *more: int) -> Any:
        """[*more] for every slot of the mesh."""
        names = ("slot", *(None for _ in more))
        return self.shaped(axes.Leaf((self.slots, *more), jnp.dtype(dtype), names, "input"))

    def rows(self, dtype: Any) -> Any:
        """A number for every row of a prefill, as many for all that share them."""
        count = self.work.prefill * self.layout.ranks * self.layout.parts("slot")
        return self.shaped(axes.Leaf((count,), jnp.dtype(dtype), ("slot",), "rows"))

    def whole(self, shape: Any) -> Any:
        """Something that every device has whole."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=everywhere)

    @property
    def slots(self) -> int:
        """Of the whole mesh."""
        return self.work.slots(self.layout) * self.layout.parts("slot")


def _arguments(scene: _Scene) -> tuple[Any, Any, Any, Any, Any]:
    """(params, tables, running, cache, sampling), as shapes with shardings."""
    cfg, work = scene.cfg, scene.work
    shapes = cache.cache_shapes(
        cfg, FORM, scene.slots, work.context, 1 + work.drafts, work.paging(cfg, scene.layout),
        scene.layout.ranks,
    )  # fmt: skip
    running = Running(
        tokens=scene.vector(jnp.int32),
        active=scene.vector(bool),
        left=scene.vector(jnp.int32),
        stops=scene.vector(jnp.int32, _STOPS),
    )
    # Without limits of top_p and the like, as an accelerator's programs where no request has any.
    one = jax.eval_shape(lambda: sampling.untruncated(sampling.make_sampling(1, seeds=[0])))
    asked = jax.tree.map(lambda x: scene.vector(x.dtype, *x.shape[1:]), one)
    return (
        jax.tree.map(scene.shaped, params.abstract(cfg)),
        jax.tree.map(scene.whole, tables.table_shapes(cfg, work.context)),
        running,
        jax.tree.map(scene.shaped, cache.cache_leaves(shapes)),
        asked,
    )


def _programs(scene: _Scene) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    cfg, work = scene.cfg, scene.work
    weights, constant, running, state, asked = _arguments(scene)
    rows: Any = Rows(*[scene.rows(kind) for kind in (jnp.int32, jnp.int32, jnp.int32, bool)])

    def decode(params: Any, tables: Any, running: Any, cache: Any, sampling: Any) -> Any:
        return rounds.speculate(
            params, tables, running, cache, sampling, Lengths(jnp.int32(work.drafts)), cfg, FORM,
            size=work.drafts,
        )  # fmt: skip

    def prefill(params: Any, tables: Any, rows: Any, cache: Any, sampling: Any) -> Any:
        return steps.prefill(params, tables, rows, cache, sampling, cfg, FORM)

    decoding = (weights, constant, running, state, asked)
    filling = (weights, constant, rows, state, asked)
    return {
        "decode": (_over(scene, decode, decoding, (2, 3)), decoding),
        "prefill": (_over(scene, prefill, filling, (3,)), filling),
    }


def _over(scene: _Scene, body: Any, arguments: tuple[Any, ...], kept: tuple[int, ...]) -> Any:
    """The body on every device. `kept`: arguments that come back as they went, after what is split
    by sequences.
    """
    weights, *others = arguments
    given = jax.tree.map(lambda x: x.sharding.spec, tuple(others))
    rules = scene.layout.rules
    made = (PartitionSpec(rules.mesh_axes("slot")), *(given[i - 1] for i in kept))
    return laying.over(body, weights, scene.cfg, scene.mesh, rules, given, made)


def _lowered(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, float]:
    begun = time.perf_counter()
    made = jax.jit(function, donate_argnums=3, keep_unused=True).lower(*arguments)
    return made, time.perf_counter() - begun


def _quickly(lowered: Any) -> Any:
    try:
        return lowered.compile(compiler_options=_QUICK)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()  # this XLA has no such shortcut: it takes twice as long


def _compiled(name: str, lowered: Any, trace_s: float) -> Program:
    begun = time.perf_counter()
    made = _quickly(lowered)
    done = time.perf_counter()
    memory: Any = made.memory_analysis()
    cost: Any = made.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return Program(
        name=name,
        trace_s=trace_s,
        compile_s=done - begun,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        cpu_temporaries=memory.temp_size_in_bytes,
        operations_once=cost.get("flops", 0.0),
        collectives=hlo.collectives(made.as_text()),
    )
