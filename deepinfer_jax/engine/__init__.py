"""Continuous batching: `run` answers requests, `Engine` is what it is made of.

A step: `scheduling` says what is next, `Engine` makes calls of the few programs in `programs` of
it, whose shapes come from `sizes` as far as `memory` allows and which `warming` can compile ahead;
`device` holds their state and makes the calls in a thread of its own; `sites` says on which devices
that is, `spread` has the programs over a mesh, `balance` says when experts move there;
`calls` cuts the prompt rows of a step into calls, `pictures` puts images among them, `structured`
has the masks of grammars; `flights` is what is on its way back. `seats` keeps what has come of each
request, `statistics` what it cost, `watch` for how long the device had nothing to do. `runs` puts
an engine of the right sizes together.
"""

from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.flights import Update
from deepinfer_jax.engine.runs import run, start
from deepinfer_jax.engine.sizes import Sizes, make_sizes, sizes_for, slots_for
from deepinfer_jax.engine.statistics import Statistics, StepRecord
from deepinfer_jax.engine.warming import Warming
from deepinfer_jax.engine.watch import RecompileWarning

__all__ = [
    "Engine",
    "RecompileWarning",
    "Sizes",
    "Statistics",
    "StepRecord",
    "Update",
    "Warming",
    "make_sizes",
    "run",
    "sizes_for",
    "slots_for",
    "start",
]
