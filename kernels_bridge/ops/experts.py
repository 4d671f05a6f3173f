"""Rows to the devices of their experts and back, inside `jax.shard_map` over the expert axis.

Every (token, chosen expert) pair has a place of its own at its expert's device, so nothing is
dropped, and each output comes back to the pair it belongs to. A token's outputs are added in the
order of their experts' numbers, whatever the number of devices: its bits do not depend on it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_bridge.adapters import deep_ep
from kernels_bridge.ops.operands import fit
from kernels_bridge.registry import Capability, Impl, Op

_FLOATS = ("bfloat16", "float32")
_LARGEST = np.finfo(np.float32).max


def _devices(experts: int, local: int) -> int:
    if local < 1 or experts % local:
        raise ValueError(f"experts={experts} must be a multiple of local={local} of a device")
    return experts // local


def _dispatch_rule(x, ids, *, axis: str, experts: int, local: int) -> Any:
    sizes: dict[str, int] = {}
    fit("dispatch", sizes, operand="x", shape=x, dims="T D", dtypes=_FLOATS)
    fit("dispatch", sizes, operand="ids", shape=ids, dims="T K", dtypes=("int32",))
    places = _devices(experts, local) * sizes["T"] * sizes["K"]
    rows = jax.ShapeDtypeStruct((places, sizes["D"]), x.dtype)
    return rows, jax.ShapeDtypeStruct((places,), jnp.int32)


def _places(ids: jax.Array, devices: int, local: int) -> tuple[jax.Array, jax.Array]:
    """Device and place there of every pair [T * K]: pairs of one device in their order."""
    device = jnp.clip(ids.reshape(-1) // local, 0, devices - 1)
    mine = device[:, None] == jnp.arange(devices, dtype=jnp.int32)[None, :]
    before = jnp.cumsum(mine, axis=0, dtype=jnp.int32) - mine.astype(jnp.int32)
    return device, jnp.take_along_axis(before, device[:, None], axis=1)[:, 0]


def dispatch_twin(x, ids, *, axis: str, experts: int, local: int):
    """x [T, D] and chosen experts ids [T, K] int32 of this device -> rows [devices * T * K, D] for
    its own experts and their numbers among them [devices * T * K] int32, -1 where there is none.

    Device i of `axis` has experts i * local onwards; every device comes with as many tokens.
    """
    devices, (t, k) = _devices(experts, local), ids.shape
    device, place = _places(ids, devices, local)
    rows = jnp.zeros((devices, t * k, x.shape[1]), x.dtype)
    rows = rows.at[device, place].set(jnp.repeat(x, k, axis=0))
    real = (ids >= 0) & (ids < experts)
    number = jnp.where(real, ids % local, -1).reshape(-1)
    numbers = jnp.full((devices, t * k), -1, jnp.int32).at[device, place].set(number)
    rows, numbers = (lax.all_to_all(each, axis, 0, 0) for each in (rows, numbers))
    return rows.reshape(-1, x.shape[1]), numbers.reshape(-1)


def _combine_rule(y, ids, weight, *, axis: str, experts: int, local: int) -> Any:
    sizes: dict[str, int] = {}
    fit("combine", sizes, operand="ids", shape=ids, dims="T K", dtypes=("int32",))
    fit("combine", sizes, operand="weight", shape=weight, dims="T K", dtypes=("float32",))
    places = _devices(experts, local) * sizes["T"] * sizes["K"]
    fit("combine", sizes, operand="y", shape=y, dims=f"{places} D", dtypes=_FLOATS)
    return jax.ShapeDtypeStruct((sizes["T"], sizes["D"]), jnp.float32)


def combine_twin(y, ids, weight, *, axis: str, experts: int, local: int):
    """Outputs y [devices * T * K, D] of rows as `dispatch` gave them, back and added by token:
    ids [T, K] int32 and weight [T, K] float32 of this device -> float32 [T, D]."""
    devices, (t, k) = _devices(experts, local), ids.shape
    back = lax.all_to_all(y.reshape(devices, t * k, -1), axis, 0, 0)
    device, place = _places(ids, devices, local)
    own = back[device, place].reshape(t, k, -1).astype(jnp.float32)
    order = jnp.argsort(ids, axis=1, stable=True)
    own, ids = jnp.take_along_axis(own, order[..., None], axis=1), jnp.sort(ids, axis=1)
    share = jnp.take_along_axis(weight, order, axis=1)
    real = (ids >= 0) & (ids < experts)
    # A product that feeds an addition would be joined with it in one program and not in another.
    terms = jnp.minimum(own * share[..., None], _LARGEST)
    terms = jnp.where(real[..., None], terms, 0)
    total = terms[:, 0]
    for i in range(1, k):
        total = total + terms[:, i]
    return total


def _op(name: str, what: str, rule: Any, twin: Any, published: Any) -> Op:
    can = Capability(batch_invariant=True)
    xla = Impl("all_to_all", "xla", can, "lax.all_to_all of a place for every pair", twin,
               seen="CPU devices, 1 to 4")  # fmt: skip
    return Op(name, what, rule, twin, (xla, deep_ep.implementation(published)))


dispatch = _op(
    "dispatch", "rows to the devices of their experts", _dispatch_rule, dispatch_twin,
    deep_ep.DISPATCH,
)  # fmt: skip
combine = _op(
    "combine", "outputs of experts back to their tokens, and their sum", _combine_rule,
    combine_twin, deep_ep.COMBINE,
)  # fmt: skip
OPS = (dispatch, combine)
