"""Continuous batching: `run` answers requests, `Engine` is what it is made of.

A step: `scheduling` says what is next, `Engine` makes calls of the few programs in `programs` of
it, whose shapes come from `sizes` as far as `memory` allows; `seats` keeps what has come of each
request.
"""

from deepinfer_jax.engine.engine import Engine, Update, run
from deepinfer_jax.engine.sizes import Sizes, make_sizes, sizes_for, slots_for

__all__ = ["Engine", "Sizes", "Update", "make_sizes", "run", "sizes_for", "slots_for"]
