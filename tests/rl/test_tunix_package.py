"""The adapter with the package itself: `pip install 'deepinfer-jax[tunix]'` and it runs.

tunix's whole GRPO loop is `bench/tunix_grpo.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import params as parameters
from deepinfer_jax import steps
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.numerics import Numerics
from tests.rl import tunix_surface
from tests.training import small_training

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tunix") is None,
    reason="needs google-tunix (the extra 'tunix'), which is not installed",
)
CFG, NUMERICS = small_training.CONFIG, Numerics.fp32()
PAD, B, P, T = 2, 3, 5, 4


@pytest.fixture(autouse=True)
def others_rules():
    """tunix mixes dtypes and ranks, and warns of its own dependencies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield


@functools.cache
def policy():
    from deepinfer_jax.rl.tunix import Policy

    stored = parameters.init(jax.random.key(4), CFG)
    return Policy(
        types.SimpleNamespace(
            cfg=CFG, numerics=NUMERICS, params=stored, tables=small_training.table()
        )
    )


@functools.cache
def sequences() -> list[tuple[list[int], list[int]]]:
    """Prompts and completions of other lengths."""
    draw = np.random.default_rng(6).integers(3, 67, (B, P + T)).tolist()
    return [(row[:p], row[P : P + t]) for row, p, t in zip(draw, (5, 2, 3), (1, 4, 3), strict=True)]


def tunix_logps(width: int, new: int) -> list[np.ndarray]:
    """tunix's log-probs of the completions, prompts and completions padded to these sizes."""
    from tunix.rl import common

    from deepinfer_jax.rl.groups import padded
    from deepinfer_jax.rl.tunix import module

    graph, trained, rest = module.parts(policy())
    found = common.compute_per_token_logps(
        graph, module.whole(trained, rest),
        prompt_tokens=jnp.asarray(
            padded([p for p, _ in sequences()], width, PAD, left=True)
        ),
        completion_tokens=jnp.asarray(padded([t for _, t in sequences()], new, PAD)),
        pad_id=PAD, eos_id=1,
    )  # fmt: skip
    return [row[: len(t)] for row, (_, t) in zip(np.asarray(found), sequences(), strict=True)]


def test_the_recorded_surface_is_the_packages():
    assert tunix_surface.read() == json.loads(tunix_surface.RECORD.read_text("utf-8"))


def test_the_modules_log_probs_are_the_scorers():
    """But for the last bits of log-sum-exp, which tunix takes by plain XLA operations."""
    whole = [p + t for p, t in sequences()]
    tokens, lengths = np.zeros((B, P + T), np.int32), np.array([len(x) for x in whole], np.int32)
    for row, ids in zip(tokens, whole, strict=True):
        row[: len(ids)] = ids
    score = jax.jit(steps.score, static_argnames=("cfg", "numerics"))
    seen = score(
        parameters.init(jax.random.key(4), CFG), small_training.table(), tokens, lengths, CFG,
        NUMERICS,
    )  # fmt: skip
    for row, (got, (prompt, _)) in enumerate(zip(tunix_logps(P, T), sequences(), strict=True)):
        want = np.asarray(seen.raw)[row, len(prompt) - 1 : lengths[row] - 1]
        np.testing.assert_allclose(got, want, atol=2e-6, rtol=0)  # a few ulp of log-sum-exp near 5


def test_logits_do_not_depend_on_where_the_padding_stands():
    (prompt, completion), call = sequences()[1], jax.jit(type(policy()).__call__)
    ids, found = [*prompt, *completion], []
    for before, behind in ((0, 3), (3, 0), (1, 2)):
        tokens = np.array([[PAD] * before + ids + [PAD] * behind], np.int32)
        real = tokens != PAD
        mask = np.tril(np.ones((tokens.shape[1],) * 2, bool))[None] & real[:, None, :]
        logits, cache = call(policy(), jnp.asarray(tokens), None, None, jnp.asarray(mask))
        assert cache is None
        found.append(np.asarray(logits)[0][real[0]])
    for other in found[1:]:
        np.testing.assert_array_equal(bits(other), bits(found[0]))


def test_every_weight_of_the_backbone_has_a_gradient():
    from flax import nnx

    tokens = jnp.asarray(np.random.default_rng(1).integers(3, 67, (2, 9)), jnp.int32)

    def loss(model):
        logits, _ = model(tokens)
        return jnp.mean(jax.nn.log_softmax(logits)[..., 5])

    slopes = jax.tree_util.tree_leaves_with_path(nnx.jit(nnx.grad(loss))(policy()))
    moved = {path[0].key for path, slope in slopes if np.asarray(slope).any()}
    names = {path[0].key for path, slope in slopes if not path[0].key.startswith("draft")}
    # What chooses, experts or entries, has no slope.
    still = {name for name in names if name.startswith("indexer.")} | {"layers.ffn.gate.bias"}
    assert names - moved <= still
