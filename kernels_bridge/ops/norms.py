"""RMSNorm of rows, and then the rotation of their last features (docs/model.md 1 and 6).

As the model makes window vectors: normalised in float32, rounded, turned in float32, rounded.
"""

from __future__ import annotations

from typing import Any, cast

from deepinfer_jax import numerics
from deepinfer_jax.model import rope
from deepinfer_jax.tables import Rotation
from kernels_bridge.ops import twins
from kernels_bridge.ops.operands import fit
from kernels_bridge.registry import Op


def _rule(x, weight, cos, sin, *, eps: float) -> Any:
    sizes: dict[str, int] = {}
    name, wide = "norm_rope", ("float32",)
    fit(name, sizes, operand="x", shape=x, dims="T N", dtypes=("bfloat16", "float32"))
    fit(name, sizes, operand="weight", shape=weight, dims="N", dtypes=wide)
    fit(name, sizes, operand="cos", shape=cos, dims="T R", dtypes=wide)
    fit(name, sizes, operand="sin", shape=sin, dims="T R", dtypes=wide)
    if 2 * sizes["R"] > sizes["N"]:
        raise ValueError(
            f"norm_rope: cos must have at most N/2={sizes['N'] // 2} angles for the pairs of x, "
            f"got {sizes['R']}"
        )
    return x


def norm_rope_twin(x, weight, cos, sin, *, eps: float):
    """x [T, N], weight [N] float32, cos and sin [T, R] float32 of the last R pairs -> [T, N] of
    x's dtype, a row's bits its own."""
    form = numerics.Numerics(dtype=cast(Any, str(x.dtype)))
    normed = numerics.rms_norm(x, weight, eps, form)
    return rope.rotate(normed, Rotation(cos, sin))


norm_rope = Op(
    "norm_rope",
    "RMSNorm of rows and the rotation of their last features",
    _rule,
    norm_rope_twin,
    twins.of_model(norm_rope_twin, "the model's own norm and rotation"),
)
OPS = (norm_rope,)
