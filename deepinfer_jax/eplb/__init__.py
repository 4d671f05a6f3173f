"""Expert placement and load balance: where replicas of experts live, and when it pays to move them.

Counts of steps go into a `Window`, `rearrange` turns it into the next `Placement`, `transfers`
says what has to be sent, `choose_replicas` picks a replica for every token. A placement is an
argument of the step: it changes how long that takes and no bit of what it computes (docs/eplb.md).

All of it runs on the host, on NumPy arrays; only `choose_replicas` is for jitted programs.
"""

from deepinfer_jax.eplb.loads import (
    Window,
    count_experts,
    device_loads,
    device_sums,
    make_window,
    moe_lb,
    record,
    slowest_over_mean,
    to_logical,
)
from deepinfer_jax.eplb.placement import (
    Placement,
    Redundancy,
    initial_placement,
    logical_to_physical,
    make_placement,
    redundancy,
)
from deepinfer_jax.eplb.rearrange import Rearrangement, rearrange
from deepinfer_jax.eplb.rebalance import rebalance, rebalance_window
from deepinfer_jax.eplb.relabel import relabel
from deepinfer_jax.eplb.replicas import choose_replicas
from deepinfer_jax.eplb.search import improve, least_lb
from deepinfer_jax.eplb.transfers import Movement, Transfers, movement, transfers

__all__ = [
    "Movement",
    "Placement",
    "Rearrangement",
    "Redundancy",
    "Transfers",
    "Window",
    "choose_replicas",
    "count_experts",
    "device_loads",
    "device_sums",
    "improve",
    "initial_placement",
    "least_lb",
    "logical_to_physical",
    "make_placement",
    "make_window",
    "moe_lb",
    "movement",
    "rearrange",
    "rebalance",
    "rebalance_window",
    "record",
    "redundancy",
    "relabel",
    "slowest_over_mean",
    "to_logical",
    "transfers",
]
