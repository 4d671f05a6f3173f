"""DeepSelect: the largest values of every row.

It writes its columns into the memory it is given. Among equal values it takes whichever it meets,
so `ops.selection` checks its ties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_bridge import dlpack
from kernels_bridge.registry import Capability, Impl, Need
from kernels_bridge.signatures import function_of, signature

_MEND = "build and install deepseek-ai/DeepSelect 1.0 (on Hopper with DEEP_SELECT_CUDA_ARCHS=90a)"
LIBRARY = Need("deep_select", at_least="1.0", mend=_MEND)
TOPK = signature(
    LIBRARY, "topk",
    "input topk sorted begin end indices_type sorted_index hint output_idx output_idx_offset "
    "idx_oob_fill_value value_oob_fill_value return_value abort_when_nan_found",
    "input topk end indices_type sorted_index output_idx idx_oob_fill_value return_value "
    "abort_when_nan_found",
)  # fmt: skip
_ROW_BYTES, _RESULT_BYTES, _MOST, _COLUMNS = 1024, 32, 4096, 1 << 23


def accepts(x, end, *, k: int) -> list[str]:
    """What `deep_select.topk` demands of sizes."""
    said = [] if k <= _MOST else [f"it takes k up to {_MOST}, not {k}"]
    if x.shape[1] >= _COLUMNS:
        said.append(f"it takes fewer than {_COLUMNS} columns, not {x.shape[1]}")
    return said if x.size else [*said, "it takes no empty arrays"]


def topk(x: jax.Array, end: jax.Array, k: int) -> jax.Array:
    """Ascending columns [T, k] of k largest values of columns 0 .. end - 1, -1 behind them.

    Rows are padded to the strides that the library demands.
    """
    function = function_of(TOPK)
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (_ROW_BYTES // x.dtype.itemsize))))
    width = k + -k % (_RESULT_BYTES // 4)

    def kernel(results, padded, end):
        torch = dlpack.import_torch()
        function(
            input=padded[:, : x.shape[1]], topk=k, end=end, indices_type=torch.int32,
            sorted_index=True, output_idx=results[0][:, :k], idx_oob_fill_value=-1,
            return_value=False, abort_when_nan_found=False,
        )  # fmt: skip

    shape = jax.ShapeDtypeStruct((x.shape[0], width), jnp.int32)
    name = f"{TOPK.path}[{k} of {x.shape[1]}]"
    found = dlpack.call(kernel, name, shape, padded, end)[:, :k]
    # A NaN in a row puts another number there; `ops.selection` finds the NaN itself.
    return jnp.where((found >= 0) & (found < x.shape[1]), found, -1)


def implementation(run: Callable[..., Any]) -> Impl:
    """With `run`, which checks what is found."""
    can = Capability(
        ("cuda",), (9, 10), ("bfloat16", "float32"), (Need("torch", at_least="2.3"), LIBRARY),
        batch_invariant=True,
    )  # fmt: skip
    return Impl("deep_select", "dlpack", can, "topk, then a check of ties", run, accepts)
