"""Pieces that a compiler treats differently beyond some width, in calls of many rows.

XLA:CPU gives "max, subtract, exp" of more than 4,096 numbers to a kernel with another exp. Whole
models with so many rows are costly to compile; these pieces are not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import sampling
from deepinfer_jax.determinism import equality
from deepinfer_jax.model import compress, hyper
from tests import every_role

WIDE, FEW = 1200, 8


def check_rows(f, *inputs, step=5 * FEW):
    """f of many rows is f of a few at a time, in every bit of every output."""
    whole = jax.tree.map(np.asarray, f(*inputs))
    for start in range(0, WIDE, step):
        part = slice(start, start + FEW)
        few = f(*jax.tree.map(lambda a, part=part: a[part], inputs))
        for got, want in zip(jax.tree.leaves(few), jax.tree.leaves(whole), strict=True):
            assert not equality.unequal(got, want[part]).any(), start


def test_mixes_of_the_residual_streams():
    model = every_role.model("float32")
    cfg, numerics = model.cfg, model.numerics
    rng = np.random.default_rng(2)
    streams = cfg.hc_mult
    width = streams * (2 + streams)
    p = {"base": np.float32(rng.normal(size=width)), "scale": np.float32(rng.normal(size=3))}
    mixes = np.float32(rng.normal(size=(WIDE, width)))
    check_rows(jax.jit(lambda mixes: hyper.split(mixes, p, cfg, numerics)), mixes)


def test_pooling_of_compressed_groups():
    groups = np.float32(np.random.default_rng(3).normal(size=(WIDE, 2, 2, 32)) * 2)
    check_rows(jax.jit(compress.pool), groups)


def test_truncation_at_its_very_edge():
    """min_p is the weight of the third token itself: one bit less and that token is gone."""
    rng = np.random.default_rng(4)
    logits = np.float32(rng.normal(size=(WIDE, 131)) * 3)
    third = np.sort(logits, axis=1)[:, -3]
    weight = jax.jit(jnp.exp)
    edges = [weight(x) for x in np.split(third - logits.max(axis=1), WIDE // FEW)]
    limits = sampling.make_sampling(
        WIDE, min_p=np.concatenate(edges).tolist(), seeds=list(range(WIDE))
    )
    check_rows(jax.jit(sampling.sample), logits, limits, np.arange(WIDE, dtype=np.int32), step=FEW)
