"""How many rows a tile of a product has: the rules of every form, in one place.

A tile is always whole, filled up with zeros, and never one row. Its height is one of a few that are
fixed in `Numerics`; which of them is taken depends on the number of rows, so it may decide no bit:

- for weights of `tall_from` elements and more, with sums of `long_sum` terms and more in whole
  blocks of `sum_block`, it decides none, since XLA:CPU multiplies in blocks of K there
  (tests/test_numerics.py: test_tiles_of_any_height_agree_for_large_weights);
- of other products tall tiles have other bits (of odd sums in the last of many columns), so only
  two heights are in use, `row_tile` and `long_row_tile`, which agree
  (test_short_and_long_tiles_agree).
"""

from __future__ import annotations

from typing import Any

from deepinfer_jax.numerics import cuda, stored
from deepinfer_jax.numerics.pallas import schedule
from deepinfer_jax.numerics.settings import Numerics

_READ = 16  # rows that take as long as reading the weight: a tile's cost beside its own rows


def of_product(count: int, k: int, elements: int, numerics: Numerics) -> int:
    """Height for `count` rows and a weight of `elements`, sums of k terms; `rows="tiled"`.

    A tall tile reads the weight once for more rows: the cheapest of `tall_tiles` where all agree.
    """
    tall = k >= numerics.long_sum and k % numerics.sum_block == 0
    if not tall or elements < numerics.tall_from:
        return numerics.row_tile if count < numerics.long_rows else numerics.long_row_tile
    return min(
        numerics.tall_tiles, key=lambda height: (-(-count // height) * (height + _READ), height)
    )


def of_experts(count: int, weight: Any, numerics: Numerics) -> int:
    """Height of a tile of one expert, for `count` rows spread over the experts, in every form.

    weight: one of the stacks [layers, E, N, K] that the rows will be multiplied with. A few rows
    fall to one expert, so tall tiles would be mostly empty.
    """
    experts = stored.shape(weight)[1]
    if numerics.rows == "cuda" and cuda.takes_both_ways(weight, numerics.dtype):
        return cuda.tile_rows(count, experts)
    if numerics.uses_pallas:
        return schedule.tile_rows(count, experts, stored.packed(weight))
    if numerics.rows == "ffi":  # which computes no empty place of a tile
        return 8
    if numerics.rows == "tiled":
        return numerics.row_tile if count < 4 * numerics.long_rows else numerics.long_row_tile
    return 128 if count >= 4096 else 16
