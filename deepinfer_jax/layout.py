"""Parameters on a mesh: every leaf where its logical axes and the rules of the mesh put it.

`params.abstract` names the axes of each leaf, `axes.Rules` say what they are split over, and all
else follows here, for the files, for arrays in memory and for the body of a step: shapes with
padding, shardings, and which weights a device has to ask others for.

Experts lie on slots of a placement where there is one. It travels with the weights that it
describes, as `placement` beside w1, w2 and w3 of a stack of experts: both are arguments of a step,
and the two of one call always belong together. Its shapes never change, so a rearrangement (module
`moving`) compiles no step anew (docs/parallel.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax import axes, checkpoint, eplb
from deepinfer_jax import params as parameters
from deepinfer_jax.axes import CONTEXT, DATA, Leaf, Rules, make_mesh
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.eplb import Placement
from deepinfer_jax.model.divided import Divided
from deepinfer_jax.model.exchange import AXIS
from deepinfer_jax.params import Params, Spec

WEIGHTS = ("w1", "w2", "w3")
Placements = Mapping[str, Placement]  # of "layers", and of "draft" where there is a drafter
EXPERTS = Rules.of(expert=AXIS)  # all else is on every device


class Onto(NamedTuple):
    """Where parameters go: `rules` say what is split over the mesh, `placements` of experts."""

    mesh: Mesh
    placements: Placements
    rules: Rules = EXPERTS


_ASKED = (parameters.TABLE_ROWS, "vocab")  # leading axes whose rows a step asks their owner for
_OF_CALLS = ("entry", "slot", "page")  # logical axes of no parameter


def device_mesh(data: int, expert: int, devices: Any = None, context: int = 1) -> Mesh:
    """A mesh of data * context * expert devices (default all); ValueError for a size below 1."""
    if min(data, expert, context) < 1:
        raise ValueError(
            "data, expert and context must be at least 1, got "
            f"data={data}, expert={expert}, context={context}"
        )
    middle = {CONTEXT: context} if context > 1 else {}
    return make_mesh({DATA: data, **middle, AXIS: expert}, devices)


def expert_counts(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """(layers, experts) of each stack of experts: "layers", and "draft" if there is a drafter."""
    counts = {"layers": (cfg.num_hidden_layers, cfg.n_routed_experts)}
    if cfg.num_nextn_predict_layers:
        counts["draft"] = (cfg.num_nextn_predict_layers, cfg.dspark_n_routed_experts)
    return counts


def expert_parts(mesh: Mesh, rules: Rules = EXPERTS) -> int:
    """Into how many parts experts are split; 1 where every device has all of them."""
    return math.prod(mesh.shape[name] for name in rules.mesh_axes("expert"))


def initial_placements(cfg: ModelConfig, devices: int, least: int = 0) -> dict[str, Placement]:
    """`eplb.initial_placement` of each stack on slots with at least `least` extra replicas.

    Any number of devices will do: there are as many extra replicas as make the slots come out even.
    """
    return {
        name: eplb.initial_placement(
            layers, experts, eplb.redundancy(experts, devices, least).slots, devices
        )
        for name, (layers, experts) in expert_counts(cfg).items()
    }


def experts_of(params: Params, name: str) -> Params:
    """The stack of experts called `name`: w1, w2, w3, and `placement` where it has one."""
    tree = params["layers"] if name == "layers" else params["draft"]["layers"]
    return tree["ffn"]["experts"]


def with_experts(params: Params, name: str, experts: Params) -> Params:
    """`params` with another stack of experts called `name`."""
    if name == "draft":
        draft = params["draft"]
        return {**params, "draft": {**draft, "layers": _with_experts(draft["layers"], experts)}}
    return {**params, "layers": _with_experts(params["layers"], experts)}


def _with_experts(tree: Params, experts: Params) -> Params:
    return {**tree, "ffn": {**tree["ffn"], "experts": experts}}


def has_placement(params: Params) -> bool:
    """Whether the experts lie on slots of a placement: then steps count where tokens go."""
    return "placement" in experts_of(params, "layers")


def check_placed(params: Params, cfg: ModelConfig, onto: Onto) -> None:
    """ValueError where `params` lie in another way than this, or their experts on other slots."""
    given = parameters.by_path(params)
    wanted = parameters.by_path(shardings(params, cfg, onto.mesh, onto.rules))
    for path, how in wanted.items():
        if not given[path].sharding.is_equivalent_to(how, given[path].ndim):
            raise ValueError(
                f"{path} lies as {given[path].sharding}, the rules of the mesh want {how}: load "
                "the model onto the mesh and by the rules of its engine, or without `onto`"
            )
    check_placements(params, onto.placements)


def check_placements(params: Params, placements: Placements) -> None:
    """ValueError where the experts of `params` lie on other slots than these."""
    for name, placement in placements.items():
        held = experts_of(params, name).get("placement")
        table = None if held is None else np.asarray(held.physical_to_logical)
        if table is None or not np.array_equal(table, placement.physical_to_logical):
            raise ValueError(
                f"the experts of {name!r} lie on other slots than the placement says: load the "
                "model onto the mesh and placements of its engine, or without `onto`"
            )


def on_slots(params: Params, placements: Placements) -> Params:
    """`params`, whose stacks are [layers, E, ...], with stacks on physical slots [layers, P, ...].

    Raises ValueError where a placement is of other layers or experts, or a stack has one already.
    """
    for name, placement in placements.items():
        experts = experts_of(params, name)
        if "placement" in experts:
            raise ValueError(f"the experts of {name!r} lie on slots already; move them (`moving`)")
        _check_sizes(name, placement, jax.tree.leaves(experts["w1"])[0].shape[:2])
        table = np.asarray(placement.physical_to_logical)
        layer = np.arange(table.shape[0], dtype=np.int32)[:, None]
        taken = functools.partial(_taken, layer=layer, table=table)
        stacks = {key: jax.tree.map(taken, experts[key]) for key in WEIGHTS}
        stacks["placement"] = jax.tree.map(jnp.asarray, placement)
        params = with_experts(params, name, stacks)
    return params


def _taken(stack: jax.Array, layer: np.ndarray, table: np.ndarray) -> jax.Array:
    return stack[layer, table]


# -- by rules --------------------------------------------------------------------------------------


def why_not(rules: Rules) -> str:
    """What keeps the steps at hand from running with parameters laid out so; empty: nothing."""
    for name in ("expert", *_ASKED):
        if rules.mesh_axes(name) not in ((), (AXIS,)):
            return f"steps split {name} over the mesh axis {AXIS!r} or not at all"
    known = {"expert", *_ASKED, *_OF_CALLS}
    others = sorted(name for name, rule in rules.table if rule and name not in known)
    return f"steps do not split {', '.join(others)}" if others else ""


def leaves(params: Params, cfg: ModelConfig) -> Params:
    """The arrays of `params` as `axes.Leaf`: axes and names of `params.abstract(cfg)`, in whatever
    form they are (stored, decoded, padded, on slots).

    Raises ValueError for one that the configuration does not have.
    """
    known = _weights(cfg)

    def of(path: Any, weight: Any) -> Any:
        name = _name(path)
        spec = known.get(name)
        if spec is None and "placement" not in name.split("."):
            raise ValueError(f"{name} is no parameter of this configuration")

        def one(array: Any) -> Leaf:
            names = spec.axes if spec else (None,) * array.ndim
            return Leaf(tuple(array.shape), array.dtype, names, spec.template if spec else name)

        return jax.tree.map(one, weight)

    return jax.tree_util.tree_map_with_path(of, params, is_leaf=parameters.is_weight)


def _weights(cfg: ModelConfig) -> dict[str, Spec]:
    """By path; of a quantized weight its codes, whose scales have the same axes."""
    return parameters.by_path(
        jax.tree.map(
            lambda weight: weight.codes if parameters.is_weight(weight) else weight,
            parameters.abstract(cfg), is_leaf=parameters.is_weight,
        )
    )  # fmt: skip


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def shardings(params: Params, cfg: ModelConfig, mesh: Mesh, rules: Rules = EXPERTS) -> Params:
    """Where each array lies; ValueError names the leaf that the rules do not fit."""
    return axes.shardings(leaves(params, cfg), mesh, rules)


def specs(params: Params, cfg: ModelConfig, mesh: Mesh, rules: Rules = EXPERTS) -> Params:
    """`shardings` as the `PartitionSpec`s of a step under `jax.shard_map`; ValueError also for
    rules that no step runs with (`why_not`).
    """
    problem = why_not(rules)
    if problem:
        raise ValueError(f"rules of the mesh: {problem}")
    return jax.tree.map(lambda how: how.spec, shardings(params, cfg, mesh, rules))


def local(params: Params, cfg: ModelConfig, mesh: Mesh, rules: Rules = EXPERTS) -> Params:
    """The tree as a device's body sees it: tables and heads that it has a part of are `Divided`."""
    known = _weights(cfg)

    def of(path: Any, weight: Any) -> Any:
        spec = known.get(_name(path))
        if spec is None or spec.axes[0] not in _ASKED:
            return weight
        parts = math.prod(mesh.shape[name] for name in rules.mesh_axes(spec.axes[0]))
        return weight if parts == 1 else Divided(weight, spec.shape[0])

    return jax.tree_util.tree_map_with_path(of, params, is_leaf=parameters.is_weight)


def over(
    body: Callable[..., Any], params: Params, cfg: ModelConfig, mesh: Mesh, rules: Rules,
    given: tuple[Any, ...], made: Any,
) -> Callable[..., Any]:  # fmt: skip
    """`body(params, *others)` as a function over the mesh, with parameters like `params`.

    given, made: `PartitionSpec`s of the others and of what it returns. Raises as `specs`.
    """

    def here(params: Params, *others: Any) -> Any:
        return body(local(params, cfg, mesh, rules), *others)

    split = (specs(params, cfg, mesh, rules), *given)
    return jax.shard_map(here, mesh=mesh, in_specs=split, out_specs=made, check_vma=False)


def padded(params: Params, cfg: ModelConfig, mesh: Mesh, rules: Rules = EXPERTS) -> Params:
    """The arrays with zeros at the end of dimensions that the mesh does not divide, where the rules
    allow it (`Rules.padded`).
    """

    def one(array: Any, leaf: Leaf) -> Any:
        whole = axes.padded_shape(leaf, mesh, rules)
        more = [(0, n - size) for n, size in zip(whole, leaf.shape, strict=True)]
        return jnp.pad(array, more) if whole != leaf.shape else array

    return jax.tree.map(one, params, leaves(params, cfg))


def place(params: Params, cfg: ModelConfig, mesh: Mesh, rules: Rules = EXPERTS) -> Params:
    """The parameters laid out on the mesh, padded where need be."""
    params = padded(params, cfg, mesh, rules)
    return jax.tree.map(jax.device_put, params, shardings(params, cfg, mesh, rules))


# -- from the files --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SlotSpec(Spec):
    """A leaf of experts [layers, P, ...]: slot p of layer l takes the tensor of expert
    `table[l][p]`.
    """

    table: tuple[tuple[int, ...], ...] = ()

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """As `Spec.tensors`; the tensor of an expert with replicas comes more than once."""
        layers, experts = self.stack
        for layer, row in enumerate(self.table):
            for slot, expert in enumerate(row):
                yield (layer, slot), self.template.format(layers[layer], experts[expert])


def load(
    folder: str | Path, mesh: Mesh, placements: Placements | None = None, rules: Rules = EXPERTS,
    cfg: ModelConfig | None = None,
) -> Params:  # fmt: skip
    """A checkpoint in the released layout straight onto the mesh, with experts on slots of the
    placements, if any.

    What `place(on_slots(load_params(folder), placements), cfg, mesh, rules)` gives, but no process
    reads or holds more than the part of its own devices. Raises as `checkpoint.load_params`, and
    ValueError for a placement of other layers or experts, and by the name of the leaf that the
    rules do not fit.
    """
    cfg = ModelConfig.from_json(folder) if cfg is None else cfg
    placements = {} if placements is None else placements
    tree = axes.padded(described(cfg, placements), mesh, rules)
    params = checkpoint.load_params(folder, cfg, axes.shardings(tree, mesh, rules), tree=tree)
    everywhere = NamedSharding(mesh, PartitionSpec())
    for name, placement in placements.items():
        said = jax.tree.map(lambda leaf: spread(np.asarray(leaf), everywhere), placement)
        params = with_experts(params, name, {**experts_of(params, name), "placement": said})
    return params


def restore(
    folder: str | Path, mesh: Mesh, rules: Rules = EXPERTS, cfg: ModelConfig | None = None
) -> Params:
    """What `checkpoint.save_orbax` wrote, on any mesh; raises as `checkpoint.restore_orbax` and
    `axes.sharding_of`.
    """
    cfg = ModelConfig.from_json(folder) if cfg is None else cfg
    tree = axes.padded(parameters.abstract(cfg), mesh, rules)
    return checkpoint.restore_orbax(folder, cfg, axes.shardings(tree, mesh, rules), tree=tree)


def described(cfg: ModelConfig, placements: Placements) -> Params:
    """`params.abstract` with experts on slots; ValueError for a placement of other experts."""
    tree = parameters.abstract(cfg)
    for name, placement in placements.items():
        _check_sizes(name, placement, expert_counts(cfg).get(name))
        onto = functools.partial(_on_slots, placement=placement)
        tree = with_experts(tree, name, jax.tree.map(onto, experts_of(tree, name)))
    return tree


def _check_sizes(name: str, placement: Placement, sizes: tuple[int, int] | None) -> None:
    if sizes != (placement.layers, placement.experts):
        raise ValueError(
            f"the placement of {name!r} must be of (layers, experts) = {sizes}, got "
            f"{(placement.layers, placement.experts)}: see `initial_placements`"
        )


def _on_slots(spec: Spec, placement: Placement) -> SlotSpec:
    given = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    table = np.asarray(placement.physical_to_logical)
    given["shape"] = (*table.shape, *spec.shape[2:])
    return SlotSpec(**given, table=tuple(map(tuple, table.tolist())))


def spread(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array of the host, the same in every process, as one of all processes' devices."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
