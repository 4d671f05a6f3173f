"""Data and expert parallelism on virtual devices: the bits of one device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import parallel, rl, sampling, steps, tables
from deepinfer_jax import params as parameters
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.model import exchange
from deepinfer_jax.numerics import Numerics
from tests.training import small_training

CFG = dataclasses.replace(
    small_training.CONFIG, n_routed_experts=8, dspark_n_routed_experts=8, dspark_block_size=2
)
B, S, NEW = 8, 13, 6
LENGTHS = np.array([13, 5, 9, 1, 13, 12, 2, 7], np.int32)
NUMERICS = Numerics.fp32_kvq()  # float32 shows what bfloat16 may round away
MORE = [pytest.param(*sizes, marks=pytest.mark.exhaustive) for sizes in ((1, 2), (1, 8), (4, 2))]
NUMBERS = ("raw", "processed", "kept_mass", "top_ids", "top_logprobs")
TOP = 3
SAMPLING = sampling.make_sampling(B, [1.0, 20.0] * 4, [1.0, 1.0, 0.7, 0.9] * 2, seeds=range(B))


@functools.cache
def model() -> tuple[parameters.Params, tables.Tables]:
    table = tables.make_tables(CFG, np.arange(67, dtype=np.int32), 32)
    return parameters.init(jax.random.key(3), CFG), table


@functools.cache
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 66, (B, S)).astype(np.int32)


def known(scores: steps.Scores) -> dict[str, np.ndarray]:
    """What a score says of tokens; the rest of its arrays is arbitrary."""
    inside = np.arange(S)[None] < LENGTHS[:, None]
    numbers = {n: np.asarray(getattr(scores, n))[inside[:, 1:]] for n in NUMBERS}
    return numbers | {"routed": np.asarray(scores.routed)[:, inside]}


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, value in want.items():
        np.testing.assert_array_equal(bits(got[name]), bits(value), err_msg=name)


@functools.cache
def alone() -> steps.Scores:
    score = jax.jit(steps.score, static_argnames=("cfg", "numerics", "top"))
    return score(*model(), tokens(), LENGTHS, CFG, NUMERICS, sampling=SAMPLING, top=TOP)


_score = jax.jit(parallel.score, static_argnames=("cfg", "numerics", "mesh", "top"))


@pytest.mark.slow
@pytest.mark.parametrize(("data", "expert"), [(2, 2), *MORE])
def test_scores_over_a_mesh_are_those_of_one_device(data, expert):
    params, table = model()
    mesh = parallel.data_expert_mesh(data, expert, CFG, jax.devices()[: data * expert])
    placed = parallel.place(params, mesh)
    got = _score(placed, table, tokens(), LENGTHS, CFG, NUMERICS, mesh, sampling=SAMPLING, top=TOP)
    same(known(got), known(alone()))


@pytest.mark.exhaustive
def test_rollouts_over_a_mesh_are_those_of_one_device():
    """Prefill, drafts and verification; devices that finish early wait for the others."""
    params, table = model()
    stops = np.array([1], np.int32)
    names = ("cfg", "numerics", "mesh", "new", "size")
    arguments = (table, tokens(), LENGTHS, SAMPLING, stops, CFG, NUMERICS)
    one = jax.jit(rl.rollout, static_argnames=[n for n in names if n != "mesh"])
    want = one(params, *arguments, new=NEW, size=2)
    mesh = parallel.data_expert_mesh(2, 2, CFG, jax.devices()[:4])
    many = jax.jit(parallel.rollout, static_argnames=names)
    got = many(parallel.place(params, mesh), *arguments, mesh, new=NEW, size=2)
    same(vars(got), vars(want))


@pytest.mark.exhaustive
def test_adding_up_over_devices_would_be_noticed(monkeypatch):
    """Partial sums of each device added by `psum`, as is usual: the bits change."""

    def summed(outputs, x, experts, weights, local, total):
        first = jax.lax.axis_index(exchange.AXIS).astype(jnp.int32) * local
        own = (experts >= first) & (experts < first + local)
        y = outputs(x, jnp.where(own, experts - first, 2**31 - 1), weights)
        part = jnp.sum(jnp.where(own[:, :, None], y, 0), axis=1)
        whole = jax.lax.psum(part, exchange.AXIS)
        return jnp.stack([whole] + [jnp.zeros_like(whole)] * (experts.shape[1] - 1), axis=1)

    params, table = model()
    monkeypatch.setattr(exchange, "over_devices", summed)
    # The rows stay together: on this mesh every device scores all of them.
    cfg = dataclasses.replace(CFG, num_experts_per_tok=4)
    mesh = parallel.data_expert_mesh(1, 4, cfg, jax.devices()[:4])
    specs = parallel.param_specs(params)
    everywhere = jax.sharding.PartitionSpec()

    def own(params, table, tokens, lengths):
        return steps.score(params, table, tokens, lengths, cfg, NUMERICS)

    over = jax.jit(
        jax.shard_map(
            own, mesh=mesh, in_specs=(specs, everywhere, everywhere, everywhere),
            out_specs=everywhere, check_vma=False,
        )
    )  # fmt: skip
    got = over(parallel.place(params, mesh), table, tokens(), LENGTHS)
    want = jax.jit(own)(params, table, tokens(), LENGTHS)
    assert (bits(known(got)["raw"]) != bits(known(want)["raw"])).any()


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match=r"n_routed_experts=8 is not divisible by expert=3"):
        parallel.data_expert_mesh(1, 3, CFG, jax.devices()[:3])
    mesh = parallel.data_expert_mesh(2, 1, CFG, jax.devices()[:2])
    with pytest.raises(ValueError, match="3 sequences cannot be split over 2 devices"):
        parallel.score(*model(), tokens()[:3], LENGTHS[:3], CFG, NUMERICS, mesh)
