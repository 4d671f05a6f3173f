"""The one module where floating-point sums happen, each in an order fixed by the model.

A row of any result is a function of that row's operands alone: never of the number of rows, their
order, padding, neighbours, or of the program around it. On CPU that needs four rules:

- a dot runs on tiles of a fixed number of rows (never on one row, never on all of them at once);
- a row sum uses a reducer that the compiler does not recognise, in fixed lanes;
- an inexact product that feeds an addition is pinned, so that it is never contracted to one fused
  multiply-add in one program and not in another;
- roundings to bfloat16 are explicit.

`rows="batched"` trades the promise for plain XLA operations; `rows="dense"` goes further and works
on whole sequences at once, with masks instead of gathers (training on accelerators).
"""

from deepinfer_jax.numerics.elements import float_weight, pin, quotient, round_to, top_k
from deepinfer_jax.numerics.mapping import map_experts, map_rows
from deepinfer_jax.numerics.products import dot, einsum, group_dot, linear, linear_f32
from deepinfer_jax.numerics.scores import attend, index_scores
from deepinfer_jax.numerics.settings import Numerics
from deepinfer_jax.numerics.sums import (
    axis_sum,
    integer_sums,
    log_softmax,
    logsumexp,
    mean_square,
    ordered_sum,
    plain_sum,
    rms_norm,
    row_sum,
    unit_sum,
)

__all__ = [
    "Numerics",
    "attend",
    "axis_sum",
    "dot",
    "einsum",
    "float_weight",
    "group_dot",
    "index_scores",
    "integer_sums",
    "linear",
    "linear_f32",
    "log_softmax",
    "logsumexp",
    "map_experts",
    "map_rows",
    "mean_square",
    "ordered_sum",
    "pin",
    "plain_sum",
    "quotient",
    "rms_norm",
    "round_to",
    "row_sum",
    "top_k",
    "unit_sum",
]
