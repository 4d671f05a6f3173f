"""Pictures of values, for notebooks and scripts: one style, one function a picture.

Every function takes values and returns the matplotlib axes it drew on: those given as `axes`, or
new ones in the style of `use_style`. matplotlib comes with the extra `notebooks` and is imported by
the first call; without it a function raises ImportError with the remedy.
"""

from deepinfer_jax.plots.inside import attended, expert_load, mixes, name_tokens, over_tokens
from deepinfer_jax.plots.plans import plan, plan_memory, plan_time
from deepinfer_jax.plots.serving import loads, metrics, reliability
from deepinfer_jax.plots.style import COLOURS, use_style
from deepinfer_jax.plots.training import runs

__all__ = [
    "COLOURS",
    "attended",
    "expert_load",
    "loads",
    "metrics",
    "mixes",
    "name_tokens",
    "over_tokens",
    "plan",
    "plan_memory",
    "plan_time",
    "reliability",
    "runs",
    "use_style",
]
