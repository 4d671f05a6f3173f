"""How many drafts of each request to verify. Legend: R requests, D drafts of each.

Lengths count drafts; the row of the anchor, which every running request has, comes on top. Every
choice has a total order (value, then request, then draft), so equal inputs give equal plans.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.planning.cost import Cost, step_ms
from deepinfer_jax.planning.threshold import leading

Array = jax.Array | np.ndarray

# Additions per turn of the loop: a turn costs a GPU more than the additions in it.
_UNROLL = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A round's verification.

    Attributes:
        lengths: [R] int32 in [0, D], drafts to verify; 0 where a request is not active.
        rows: int32, rows of the step: active requests and drafts together.
        objective: expected tokens per millisecond of that many rows, in the dtype of `Cost.ms`;
            0 when the curve has no size for the active requests (`check_requests`).
    """

    lengths: jax.Array
    rows: jax.Array
    objective: jax.Array


def distribute(survival: Array, budget: Array | int, active: Array) -> jax.Array:
    """Lengths [R] int32 that verify the `budget` most likely drafts.

    Rank is by survival, then by request, then by draft. Survivals do not rise along a request, so
    a draft never goes before an earlier one of its request, and whether it is verified does not
    depend on the survivals of later ones.

    Args:
        survival: [R, D] float, not rising along D; 0 where nothing is known.
        budget: scalar int32, drafts in total; what exceeds the active requests' drafts is unused.
        active: [R] bool; other requests get no draft, whatever stands in their row.
    """
    _check_shapes(active, survival=survival)
    return _admit(_queue(survival, active)[1], budget, active)


def plan(survival: Array, budget_survival: Array, active: Array, cost: Cost) -> Plan:
    """The plan with the most expected tokens per millisecond (docs/speculation.md "The plan").

    All totals b are compared: E(b) / time(b), where E is the active requests (an anchor always
    yields a token) plus the b best of `budget_survival`, added in their order; the smallest b wins
    a tie. Then b drafts are distributed by `survival`.

    With coupled sampling pass `survival` twice. Rejection sampling needs the two-round rule of that
    page: pass the survivals of one round earlier as `budget_survival`, because this search looks at
    later drafts before it decides about earlier ones.

    Args:
        survival: [R, D] float32, the newest survivals.
        budget_survival: [R, D] float32, the survivals that size the budget.
        active: [R] bool.
        cost: step times; `monotone(cost)` unless worthless drafts may be verified.
    """
    _check_shapes(active, survival=survival, budget_survival=budget_survival)
    values, _ = _queue(budget_survival, active)
    objective = _objective(values, active, cost)
    budget = lax.argmax(objective, 0, jnp.int32)  # the first maximum
    return _plan(objective, budget, distribute(survival, budget, active), active)


def plan_greedy(survival: Array, active: Array, cost: Cost) -> Plan:
    """The plan that stops at the first draft that does not improve on the one before.

    The rule of the DSpark paper: causal on the newest survivals, and short of the best plan where
    times are a staircase. Arguments as `plan`.
    """
    _check_shapes(active, survival=survival)
    values, order = _queue(survival, active)
    objective = _objective(values, active, cost)
    budget = leading(objective[1:] > objective[:-1])
    return _plan(objective, budget, _admit(order, budget, active), active)


def _check_shapes(active: Array, **survivals: Array) -> None:
    for name, array in survivals.items():
        if array.ndim != 2 or active.shape != array.shape[:1]:
            raise ValueError(
                f"{name} must have shape [R, D] and active [R], got {array.shape} and "
                f"{active.shape}"
            )
    shapes = {array.shape for array in survivals.values()}
    if len(shapes) > 1:
        raise ValueError(f"{' and '.join(survivals)} must have one shape, got {sorted(shapes)}")


def _queue(survival: Array, active: Array) -> tuple[jax.Array, jax.Array]:
    """Survivals from best to worst [R*D] and their flat indices; drafts of no request come last."""
    # Below every survival, so that the entries of active requests are the head of the queue.
    key = jnp.where(jnp.asarray(active)[:, None], survival, -1.0).ravel()
    negated, order = lax.sort((-key, lax.iota(jnp.int32, key.size)), num_keys=2)
    return -negated, order


def _admit(order: jax.Array, budget: Array | int, active: Array) -> jax.Array:
    """Drafts per request [R] among the first `budget` of the queue `order` [R*D]."""
    position = lax.iota(jnp.int32, order.size)
    rank = jnp.zeros_like(order).at[order].set(position, unique_indices=True)
    first = rank.reshape(active.shape[0], -1) < jnp.asarray(budget, jnp.int32)
    return (first & jnp.asarray(active)[:, None]).sum(axis=1, dtype=jnp.int32)


def _objective(values: jax.Array, active: Array, cost: Cost) -> jax.Array:
    """Expected tokens per millisecond with 0 .. R*D drafts of the queue; -inf where it is over."""
    running = _count(active)
    extra = lax.iota(jnp.int32, values.size + 1)
    time = step_ms(cost, running + extra)
    gain = _expected(values, running).astype(time.dtype) / time
    drafts = values.size // active.shape[0]
    return jnp.where(extra <= running * drafts, gain, -jnp.inf)


def _expected(values: jax.Array, running: jax.Array) -> jax.Array:
    """`running` plus the first 0 .. R*D of `values`, added one after the other in their dtype."""

    def add(total, value):
        total = total + value
        return total, total

    start = running.astype(values.dtype)
    totals = lax.scan(add, start, values, unroll=_UNROLL)[1]
    return jnp.concatenate([start[None], totals])


def _plan(objective: jax.Array, budget: jax.Array, lengths: jax.Array, active: Array) -> Plan:
    return Plan(lengths, _count(active) + budget, objective[budget])


def _count(active: Array) -> jax.Array:
    return jnp.asarray(active).sum(dtype=jnp.int32)
