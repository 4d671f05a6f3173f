"""Tables and heads whose rows lie on several devices, read as if they were whole.

Inside `jax.shard_map` a device holds a slice of the rows, wrapped in `Divided`; an index goes to
every device, and the owner's answer comes back. Answers are moved, not added, so they have the bits
of one device. Columns of a product are made where their rows of the weight are; each has its own
sum, so that they have them too, as long as the order of that sum does not follow the number of
columns (docs/scale.md 2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.model.exchange import AXIS
from deepinfer_jax.numerics import Numerics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Divided:
    """A device's rows of a table or weight [local, ..], which has `total` rows in all, in order.

    The last device may hold rows beyond the total, which nobody asks for.
    """

    part: Any
    total: int = dataclasses.field(metadata={"static": True})

    @property
    def local(self) -> int:
        """Rows that each device holds."""
        return jax.tree.leaves(self.part)[0].shape[0]


def rows(table: Any, index: jax.Array) -> Any:
    """Rows of a table [N, W] at index [...] int32: [..., W], or a `Quantized` of such.

    Every device must come here with an index of one shape.
    """
    if not isinstance(table, Divided):
        return _pick(table, index)
    local = table.local
    everybody = lax.all_gather(index, AXIS)
    mine = everybody - lax.axis_index(AXIS).astype(jnp.int32) * local
    found = _pick(table.part, jnp.clip(mine, 0, local - 1))
    owner = (index // local)[None, ..., None]

    def back(answers: jax.Array) -> jax.Array:
        answers = lax.all_to_all(answers, AXIS, 0, 0)  # [devices, ..., W]: of my index, from each
        return jnp.take_along_axis(answers, owner, axis=0)[0]

    return jax.tree.map(back, found)


def _pick(table: Any, index: jax.Array) -> Any:
    if isinstance(table, quant.Quantized):
        return quant.Quantized(table.codes[index], table.scale[index], table.format)
    return table[index]


def products(x: jax.Array, weight: Any, numerics: Numerics) -> jax.Array:
    """`nx.linear_f32` of rows x [T, K] with a weight [N, K] -> float32 [T, N]."""
    if not isinstance(weight, Divided):
        return nx.linear_f32(x, weight, numerics)
    columns = nx.linear_f32(lax.all_gather(x, AXIS, tiled=True), weight.part, numerics)
    return lax.all_to_all(columns, AXIS, 0, 1, tiled=True)[:, : weight.total]
