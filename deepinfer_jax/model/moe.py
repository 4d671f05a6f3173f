"""Mixture of experts: routing, grouped experts, and a sum in a fixed order (docs/model.md 8)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import numerics as nx
from deepinfer_jax import summaries
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import cpu_kernels, exchange
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """experts [T, k] int32, best biased score first; weights [T, k] float32 in the same order.

    scores [T, E] float32: what both were made from, before any bias.
    """

    experts: jax.Array
    weights: jax.Array
    scores: jax.Array

    __repr__ = summaries.of_fields


def router_scores(gate: Any, x: jax.Array, cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """sqrt(softplus(x . gate)) of x [T, D] -> float32 [T, E]."""
    logits = nx.linear_f32(x, gate["weight"], numerics) / np.float32(cfg.gate_temp)
    return jnp.sqrt(jax.nn.softplus(logits))


def choose_experts(scores: jax.Array, bias: jax.Array, k: int, cfg: ModelConfig) -> Route:
    """The k experts with the largest score + bias [T, E]; the bias never enters the weights."""
    _, experts = nx.top_k(lax.stop_gradient(scores + bias), k)
    picked = jnp.take_along_axis(scores, experts, axis=1)
    if cfg.norm_topk_prob and k > 1:
        total = nx.ordered_sum([picked[:, i] for i in range(k)])
        picked = picked / (total[:, None] + np.float32(1e-20))
    return Route(experts, picked * np.float32(cfg.routed_scaling_factor), scores)


@nx.in_kernel(cpu_kernels.route, "k", "cfg", result=Route)
@nx.by_name("k", "cfg")
def route(
    gate: Any, x: jax.Array, image: jax.Array, k: int, cfg: ModelConfig, numerics: Numerics
) -> Route:
    """Route x [T, D]; rows inside an image span (`image` [T] bool) select by `bias_vl`."""
    bias = gate["bias"][None, :]
    if "bias_vl" in gate:
        bias = jnp.where(image[:, None], gate["bias_vl"][None, :], bias)
    return choose_experts(router_scores(gate, x, cfg, numerics), bias, k, cfg)


@nx.in_kernel(cpu_kernels.activate, "limit")
def _activate(up: jax.Array, gate: jax.Array, limit: float, numerics: Numerics) -> jax.Array:
    """silu(min(gate, limit)) * clip(up): the gate branch is clamped from above only. float32."""
    up = jnp.clip(up.astype(jnp.float32), -limit, limit)
    gate = jnp.minimum(gate.astype(jnp.float32), limit)
    return gate * jax.nn.sigmoid(gate) * up


@nx.in_kernel(cpu_kernels.shared_expert, "cfg", fits=cpu_kernels.shared_fits)
@nx.by_name("cfg")
def shared_expert(p: Any, x: jax.Array, cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """The always-active expert on x [T, D]."""
    quantized = cfg.quantized
    gate = nx.linear(x, p["w1"], numerics, quantized)
    up = nx.linear(x, p["w3"], numerics, quantized)
    t = nx.round_to(_activate(up, gate, cfg.swiglu_limit, numerics), numerics.dtype)
    return nx.linear(t, p["w2"], numerics, quantized)


@nx.by_name("cfg", "total")
def routed_experts(
    stacks: Any, layer: Any, x: jax.Array, routed: Route, total: int, rows: Rows,
    cfg: ModelConfig, numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """Outputs of the chosen experts summed in ascending expert id: float32 [T, D].

    stacks: w1, w2, w3 as [layers, E, ...]; the weight multiplies before the down projection. Where
    E is not `total`, the other experts are on other devices (`exchange`). With a `placement` among
    the stacks they are of physical slots, and each row goes to one replica of its experts.
    """
    placement = stacks.get("placement")
    stacks = {name: stacks[name] for name in ("w1", "w2", "w3")}
    if numerics.rows == "dense":
        if placement is not None:
            raise ValueError('rows="dense" has no physical slots: use parameters without placement')
        return _all_experts(stacks, layer, x, routed, cfg, numerics)
    order = jnp.argsort(routed.experts, axis=1)
    experts = jnp.take_along_axis(routed.experts, order, axis=1)
    weights = jnp.take_along_axis(routed.weights, order, axis=1)
    if placement is not None:  # the order stays that of logical ids
        experts, total = exchange.slots_of(placement, layer, experts, rows), placement.slots
    outputs = functools.partial(_outputs, stacks, layer, cfg=cfg, numerics=numerics)
    local = jax.tree.leaves(stacks["w1"])[0].shape[1]
    if local == total:
        y = outputs(x, experts, weights)
    else:
        y = exchange.over_devices(outputs, x, experts, weights, local, total)
    y = y.astype(jnp.float32)
    return nx.ordered_sum([y[:, i] for i in range(y.shape[1])])


@nx.in_kernel(cpu_kernels.outputs, "cfg", fits=cpu_kernels.outputs_fit)
def _outputs(
    stacks: Any, layer: Any, x: jax.Array, experts: jax.Array, weights: jax.Array,
    cfg: ModelConfig, numerics: Numerics,
) -> jax.Array:  # fmt: skip
    """Every chosen expert's output [T, k, D] for x [T, D]; zeros where an id is nobody's."""
    t, k = experts.shape
    groups = nx.group_rows(experts.reshape(-1), stacks["w1"], numerics)
    x = nx.prepared(x, numerics, cfg.quantized)  # once, not for every copy
    rows = nx.spread(groups, x, copies=k), nx.spread(groups, weights.reshape(-1))
    expert = functools.partial(_expert, cfg=cfg, numerics=numerics)
    y = nx.map_groups(expert, rows, stacks, layer, groups, numerics)
    return nx.collect(groups, y).reshape(t, k, -1)


def _expert(linear: Any, rows: Any, stacks: Any, cfg: ModelConfig, numerics: Numerics) -> jax.Array:
    """The chosen expert on each of the rows (prepared x [M, D], weight [M])."""
    x, weight = rows
    gate, up = linear(x, stacks["w1"], stacks["w3"])
    hidden = weight[:, None] * _activate(up, gate, cfg.swiglu_limit, numerics)
    hidden = nx.prepared(nx.round_to(hidden, numerics.dtype), numerics, cfg.quantized)
    return linear(hidden, stacks["w2"])[0]


def _all_experts(
    stacks: Any, layer: Any, x: jax.Array, routed: Route, cfg: ModelConfig, numerics: Numerics
) -> jax.Array:
    """`routed_experts` as one wide layer: every expert on every row, by weight zero or more."""
    pick = functools.partial(jax.tree.map, lambda a: a[layer])
    w1, w2, w3 = (
        nx.float_weight(pick(stacks[name]), numerics.dtype) for name in ("w1", "w2", "w3")
    )
    experts, width, d = w1.shape
    number = jnp.arange(experts, dtype=jnp.int32)[None, None]
    chosen = jnp.where(routed.experts[..., None] == number, routed.weights[..., None], 0)
    weight = nx.ordered_sum([chosen[:, i] for i in range(chosen.shape[1])])
    gate = nx.linear(x, w1.reshape(-1, d), numerics, cfg.quantized)
    up = nx.linear(x, w3.reshape(-1, d), numerics, cfg.quantized)
    t = jnp.repeat(weight, width, axis=1) * _activate(up, gate, cfg.swiglu_limit, numerics)
    down = w2.transpose(1, 0, 2).reshape(d, -1)
    return nx.linear_f32(nx.round_to(t, numerics.dtype), down, numerics, cfg.quantized)


def moe(
    p: Any, stacks: Any, layer: Any, x: jax.Array, rows: Rows, k: int,
    cfg: ModelConfig, numerics: Numerics,
) -> tuple[jax.Array, Route]:  # fmt: skip
    """The MoE sub-layer on x [T, D]: routed experts, then the shared one, one rounding.

    Padding rows are routed like any other but handed to no expert.
    """
    routed = route(p["gate"], x, rows.image, k, cfg, numerics)
    experts = jnp.where(rows.real[:, None], routed.experts, exchange.NOWHERE)
    used = dataclasses.replace(routed, experts=experts)
    total = p["gate"]["bias"].shape[0]
    y = routed_experts(stacks, layer, x, used, total, rows, cfg, numerics)
    y = y + shared_expert(p["shared_experts"], x, cfg, numerics).astype(jnp.float32)
    return nx.round_to(y, numerics.dtype), routed


def counted(routed: jax.Array, real: jax.Array, experts: int) -> jax.Array:
    """Tokens of each expert [L, E] int32 among the `real` [T] rows, from `routed` [L, T, k]."""
    layers, count, k = routed.shape
    chosen = jnp.where(real[None, :, None] & (routed >= 0), routed, experts)
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None]
    zeros = jnp.zeros((layers, experts), jnp.int32)
    return zeros.at[layer, chosen.reshape(layers, count * k)].add(1, mode="drop")
