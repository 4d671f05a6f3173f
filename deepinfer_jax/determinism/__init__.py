"""The contract of determinism as something that runs: perturbations of a model on this device.

Every request is first run alone, one token at a time. Then the same requests run in batches, in
chunks, with wrong drafts, preempted, inside `lax.scan`, in the engine, under a trainer; and tokens,
log-probabilities (raw and processed), kept mass, routed experts and what can be read of the caches
must be equal to the reference's in every bit. `check` runs all of it; the modules hold the parts:
`equality`, `feeding`, `reference`, `schedules`, and the checks in `serving`, `engine`,
`compilation`, `training`,
`speculation`.
"""

from deepinfer_jax.determinism.checks import (
    CHECKS,
    NAMES,
    Check,
    Finding,
    check,
    run_check,
    select,
)
from deepinfer_jax.determinism.reference import (
    Reference,
    Setup,
    check_arguments,
    default_tokens,
    make_setup,
)
from deepinfer_jax.determinism.schedules import Move, Pair, Table, Turn

__all__ = [
    "CHECKS",
    "NAMES",
    "Check",
    "Finding",
    "Move",
    "Pair",
    "Reference",
    "Setup",
    "Table",
    "Turn",
    "check",
    "check_arguments",
    "default_tokens",
    "make_setup",
    "run_check",
    "select",
]
