"""The one module where floating-point sums happen, each in an order fixed by the model.

A row of any result is a function of that row's operands alone: never of the number of rows, their
order, padding, neighbours, or of the program around it. On CPU that needs four rules:

- a dot runs on whole tiles of a few fixed heights, never on one row and never on whatever number
  there is; where the number of rows chooses the height, the height decides no bit (`tiles`);
- a row sum uses a reducer that the compiler does not recognise;
- an inexact product that feeds an addition is pinned, so that it is never contracted to one fused
  multiply-add in one program and not in another;
- roundings to bfloat16 are explicit.

`rows="ffi"` keeps the promise on a CPU with C++ kernels instead (`kernels_bridge`), in an order of
their own: about twice as fast, where a compiler can build them.

On an NVIDIA GPU (`rows="pallas"`) long sums are kernels of `numerics.pallas`, in an order of their
own; those of one short axis (`axis_sum`) are written out in index order, and those of integers have
none. `rows="batched"` trades the promise for plain XLA operations; `rows="dense"` goes further and
works on whole sequences at once, with masks instead of gathers (training on accelerators).
"""

from deepinfer_jax.numerics.elements import (
    ascending,
    best,
    chosen,
    finite_max,
    float_weight,
    pin,
    quotient,
    round_to,
    top_k,
)
from deepinfer_jax.numerics.experts import (
    Groups,
    collect,
    group_rows,
    grouped_linear,
    map_groups,
    spread,
)
from deepinfer_jax.numerics.forms import rows_for
from deepinfer_jax.numerics.full import attend_all
from deepinfer_jax.numerics.mapping import map_rows
from deepinfer_jax.numerics.mixing import mixes
from deepinfer_jax.numerics.naming import by_name
from deepinfer_jax.numerics.products import (
    alike,
    at_layer,
    dot,
    einsum,
    group_dot,
    is_readable,
    linear,
    linear_f32,
    prepared,
    readable,
)
from deepinfer_jax.numerics.replacing import in_kernel
from deepinfer_jax.numerics.scores import (
    attend,
    attend_cache,
    attention_probabilities,
    index_cache,
    index_scores,
    index_width,
    reads_cache,
    store_in_place,
)
from deepinfer_jax.numerics.settings import Form, Numerics
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
    "Form",
    "Groups",
    "Numerics",
    "alike",
    "ascending",
    "at_layer",
    "attend",
    "attend_all",
    "attend_cache",
    "attention_probabilities",
    "axis_sum",
    "best",
    "by_name",
    "chosen",
    "collect",
    "dot",
    "einsum",
    "finite_max",
    "float_weight",
    "group_dot",
    "group_rows",
    "grouped_linear",
    "in_kernel",
    "index_cache",
    "index_scores",
    "index_width",
    "integer_sums",
    "is_readable",
    "linear",
    "linear_f32",
    "log_softmax",
    "logsumexp",
    "map_groups",
    "map_rows",
    "mean_square",
    "mixes",
    "ordered_sum",
    "pin",
    "plain_sum",
    "prepared",
    "quotient",
    "readable",
    "reads_cache",
    "rms_norm",
    "round_to",
    "row_sum",
    "rows_for",
    "spread",
    "store_in_place",
    "top_k",
    "unit_sum",
]
