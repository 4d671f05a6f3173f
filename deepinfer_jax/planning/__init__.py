"""Which drafts to verify, given how confident the drafter is and what steps cost on this device.

A verify step costs more the more rows it has, and a row is wasted when its draft is rejected. So
drafts are ranked by their survival (the estimated probability that they and all before them are
accepted), and as many of the best are verified as give the most expected tokens per millisecond
under a measured curve of step times. The answer is a length per request. With coupled sampling
(docs/determinism.md) a length changes how soon a token comes and never which token.

Everything here is a pure function: times come in as a `Cost`, no clock is read.
"""

from deepinfer_jax.planning.calibration import (
    Calibration,
    Reliability,
    expected_calibration_error,
    fit_temperatures,
    load_temperatures,
    reliability,
    save_temperatures,
)
from deepinfer_jax.planning.confidence import probabilities, survival
from deepinfer_jax.planning.cost import (
    Cost,
    CurveTooShort,
    check_requests,
    make_cost,
    monotone,
    step_ms,
)
from deepinfer_jax.planning.cost_table import (
    BrokenCostTable,
    CostTable,
    Curve,
    ForeignCostTable,
    MissingCostTable,
    curve_for,
    load_table,
    merged,
    read_table,
    save_table,
)
from deepinfer_jax.planning.estimators import residual, sampler_ms, slope
from deepinfer_jax.planning.plan import Plan, distribute, plan, plan_greedy
from deepinfer_jax.planning.policies import OFF, Fixed, Planner, Policy, Threshold
from deepinfer_jax.planning.schedules import Confident, Fill, Lengths, Schedule
from deepinfer_jax.planning.threshold import TauRamp, tau_for, threshold

__all__ = [
    "OFF",
    "BrokenCostTable",
    "Calibration",
    "Confident",
    "Cost",
    "CostTable",
    "Curve",
    "CurveTooShort",
    "Fill",
    "Fixed",
    "ForeignCostTable",
    "Lengths",
    "MissingCostTable",
    "Plan",
    "Planner",
    "Policy",
    "Reliability",
    "Schedule",
    "TauRamp",
    "Threshold",
    "check_requests",
    "curve_for",
    "distribute",
    "expected_calibration_error",
    "fit_temperatures",
    "load_table",
    "load_temperatures",
    "make_cost",
    "merged",
    "monotone",
    "plan",
    "plan_greedy",
    "probabilities",
    "read_table",
    "reliability",
    "residual",
    "sampler_ms",
    "save_table",
    "save_temperatures",
    "slope",
    "step_ms",
    "survival",
    "tau_for",
    "threshold",
]
