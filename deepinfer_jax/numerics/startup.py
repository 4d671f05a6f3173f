"""What must hold before a model runs: the settings of JAX and XLA that the promise needs."""

from __future__ import annotations

import dataclasses
import re

from deepinfer_jax.numerics import forms
from deepinfer_jax.numerics.settings import Numerics
from kernels_bridge.machine import Machine

# Flags that let a compiler reorder or contract what `numerics` has put in order. Others were tried
# and change no promise: thread counts, library choices, autotuning and excess precision (roundings
# are explicit here).
_REFUSED_FLAGS = {
    "xla_cpu_enable_fast_math": "it lets XLA:CPU reassociate sums and drop the pins of products",
}


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What bits depend on besides `Numerics`, read once by the caller.

    machine           what forms of the numerics are chosen by (`forms`)
    xla_flags         the value of XLA_FLAGS
    matmul_precision  `jax.config.jax_default_matmul_precision`
    x64               `jax.config.jax_enable_x64`
    disable_jit       `jax.config.jax_disable_jit`
    """

    machine: Machine
    xla_flags: str = ""
    matmul_precision: str | None = None
    x64: bool = False
    disable_jit: bool = False


def refusals(numerics: Numerics, around: Surroundings) -> list[str]:
    """Reasons why `numerics` cannot keep its promise here; empty where it can."""
    reasons, said = [], forms.reasons(numerics, around.machine)
    if said:
        mend = forms.mend(around.machine)
        reasons.append(f'rows="{numerics.rows}" cannot run here, {"; ".join(said)}: {mend}')
    if numerics.rows not in forms.PROMISING:
        return reasons
    flags = around.xla_flags.strip()
    if flags and not flags.startswith(("-", "'", '"')):
        reasons.append(
            f"XLA_FLAGS names a file ({flags!r}), whose flags cannot be checked: write the flags "
            "into the variable"
        )
    for name, reason in _REFUSED_FLAGS.items():
        for value in re.findall(rf"--{name}(?:=[\"']?(\w*))?", flags):
            if value.lower() not in ("false", "0"):
                reasons.append(f"XLA_FLAGS has --{name}: {reason}; remove it")
    if around.matmul_precision not in (None, "default"):
        reasons.append(
            f"jax_default_matmul_precision is {around.matmul_precision!r}: it changes products "
            "whose precision is chosen here; unset it"
        )
    if around.x64:
        reasons.append("jax_enable_x64 is on: no order of sums was tested with 64-bit types")
    if around.disable_jit:
        reasons.append(
            "jax_disable_jit is on: operations compiled one by one add rows in another order than "
            "whole programs do; unset it"
        )
    return reasons


def check(numerics: Numerics, around: Surroundings) -> None:
    """Raise ValueError with every reason of `refusals`."""
    reasons = refusals(numerics, around)
    if reasons:
        raise ValueError("these numerics cannot keep their promise here: " + "; ".join(reasons))
