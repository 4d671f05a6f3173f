"""What the transitions refuse before anything is compiled."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import cache as caches
from deepinfer_jax import parallel, rl, rounds, sampling, steps, tables
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rounds import Running
from tests.small import PLAIN, WINDOW_ONLY

B = 3
NUMERICS = Numerics.fp32()
TABLES = tables.make_tables(PLAIN, np.arange(131, dtype=np.int32) % 83, 40)
TOKENS = jnp.zeros((B,), jnp.int32)
ACTIVE = jnp.ones((B,), bool)


def options(rows: int) -> sampling.Sampling:
    return sampling.make_sampling(rows, seeds=range(rows))


def verify(drafts: int, rows: int = B, **more):
    cache = caches.init_cache(PLAIN, NUMERICS, B, 24, **more)
    proposed = jnp.zeros((B, drafts), jnp.int32)
    return rounds.verify(
        {}, TABLES, TOKENS, proposed, TOKENS, ACTIVE, cache, options(rows), PLAIN, NUMERICS
    )


def test_more_drafts_than_the_rings_have_room_for():
    most = PLAIN.dspark_block_size
    with pytest.raises(ValueError, match=rf"{most + 1} drafts are {most + 2} rows of a slot"):
        verify(most + 1)
    with pytest.raises(ValueError, match=r"has room for 2 .*verify at most 1 drafts"):
        verify(2, slack=2)


def test_parameters_of_one_row_are_not_for_all():
    """They would be broadcast, and every member of a group would get the same noise."""
    with pytest.raises(ValueError, match="parameters of 1 rows for 3 sequences"):
        verify(1, rows=1)
    tokens = np.ones((B, 4), np.int32)
    with pytest.raises(ValueError, match="parameters of 1 rows for 3 sequences"):
        steps.score({}, TABLES, tokens, TOKENS, PLAIN, NUMERICS, sampling=options(1))


def test_a_model_without_drafter_makes_no_drafts():
    cache = caches.init_cache(WINDOW_ONLY, NUMERICS, B, 24)
    running = Running(TOKENS, ACTIVE, TOKENS, jnp.zeros((B, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"no draft layers .*use size=0"):
        rounds.propose({}, TABLES, running, cache, options(B), WINDOW_ONLY, NUMERICS, size=1)


def rollout(cfg=PLAIN, width: int = 5, **more):
    prompts, stops = np.ones((B, width), np.int32), np.array([1], np.int32)
    more = {"new": 4, **more}
    return rl.rollout(
        {}, TABLES, prompts, np.full(B, 3, np.int32), options(B), stops, cfg, NUMERICS, **more
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"new": 0}, r"new \(most tokens of a reply\) must be at least 1, got 0"),
        ({"new": 36}, "reach 41 tokens, the tables have 40 positions"),
        ({"size": 4}, r"must lie in 0\.\.3 for this model, got 4"),
        ({"cfg": WINDOW_ONLY, "size": 1}, r"must lie in 0\.\.0 for this model, got 1"),
        ({"scheduled": np.ones(3, np.int32)}, r"shape \[rounds, 3\].*got \[3\]"),
        ({"scheduled": np.ones((1, 4), np.int32)}, r"shape \[rounds, 3\].*got \[1, 4\]"),
    ],
)
def test_rollouts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        rollout(**arguments)


def test_a_mesh_of_nothing():
    with pytest.raises(ValueError, match="must be at least 1, got data=1, expert=0"):
        parallel.data_expert_mesh(1, 0, PLAIN)
