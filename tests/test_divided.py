"""Tables and heads over several devices: the bits of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from deepinfer_jax import axes, quant
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.model import divided
from deepinfer_jax.model.divided import Divided
from deepinfer_jax.numerics import Numerics

DEVICES = 4
SPLIT, WHOLE = PartitionSpec("expert"), PartitionSpec()


def over(body, table, given):
    """`body(table's part, my rows)` on four devices, of which each has a quarter of `given`."""
    mesh = axes.make_mesh({"expert": DEVICES}, jax.devices()[:DEVICES])
    placed = jax.tree.map(lambda _: SPLIT, table)
    run = jax.shard_map(body, mesh=mesh, in_specs=(placed, SPLIT), out_specs=SPLIT, check_vma=False)
    return jax.jit(run)(table, given)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def padded(table, total):
    more = -total % DEVICES
    return jax.tree.map(lambda a: jnp.pad(a, ((0, more), (0, 0))), table)


@pytest.mark.parametrize("total", [32, 29])  # of 29 rows the last device has padding
def test_rows_of_a_table_come_from_whoever_has_them(total):
    table = jnp.asarray(drawn(total, 7), jnp.bfloat16)
    index = np.random.default_rng(1).integers(0, total, (12, 3)).astype(np.int32)
    got = over(
        lambda part, mine: divided.rows(Divided(part, total), mine), padded(table, total), index
    )
    np.testing.assert_array_equal(bits(got), bits(table[index]))


def test_rows_of_a_quantized_table_are_codes_and_scales():
    table = quant.quantize(jnp.asarray(drawn(24, 64)), "fp8_group")
    index = np.arange(24, dtype=np.int32)[::-1].copy()
    got = over(lambda part, mine: divided.rows(Divided(part, 24), mine), table, index)
    want = divided.rows(table, index)
    assert got.format == want.format
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scale, want.scale)


@pytest.mark.parametrize("total", [2048, 2045])
def test_columns_of_a_product_are_those_of_one_device(total):
    """For sizes whose sums do not depend on the number of columns, as those of a head."""
    numerics = Numerics()
    weight = jnp.asarray(drawn(total, 256) / 16, jnp.bfloat16)
    x = jnp.asarray(drawn(20, 256, seed=2), jnp.bfloat16)
    got = over(
        lambda part, mine: divided.products(mine, Divided(part, total), numerics),
        padded(weight, total),
        x,
    )
    want = jax.jit(lambda x, w: divided.products(x, w, numerics))(x, weight)
    assert got.shape == want.shape
    np.testing.assert_array_equal(bits(got), bits(want))
