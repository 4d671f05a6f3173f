"""From one device to a cluster, on paper: layouts, hardware, and the plan of a model on both."""

from deepinfer_jax.scale.hardware import Hardware, hardware_names, load_hardware
from deepinfer_jax.scale.layouts import Layout, layout_names, load_layout, over_experts
from deepinfer_jax.scale.measured import Comparison, Measured, compare, read_measured
from deepinfer_jax.scale.planned import Plan, Step, Timed, largest, plan, step
from deepinfer_jax.scale.report import as_json, format_plan
from deepinfer_jax.scale.workload import Call, Workload

__all__ = [
    "Call",
    "Comparison",
    "Hardware",
    "Layout",
    "Measured",
    "Plan",
    "Step",
    "Timed",
    "Workload",
    "as_json",
    "compare",
    "format_plan",
    "hardware_names",
    "largest",
    "layout_names",
    "load_hardware",
    "load_layout",
    "over_experts",
    "plan",
    "read_measured",
    "step",
]
