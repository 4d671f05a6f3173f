"""Data, context and expert parallelism on virtual devices: the bits of one device.

Most of it on physical slots (docs/parallel.md 2): experts with replicas, in any places.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import eplb, layout, moving, parallel, rl, sampling, steps, tables
from deepinfer_jax import params as parameters
from deepinfer_jax.axes import Rules
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.engine import warming
from deepinfer_jax.engine.sites import Site, State
from deepinfer_jax.engine.watch import compilations
from deepinfer_jax.model import exchange
from deepinfer_jax.numerics import Numerics
from tests.training import small_training

CFG = dataclasses.replace(
    small_training.CONFIG, n_routed_experts=8, dspark_n_routed_experts=8, dspark_block_size=2
)
B, S, NEW = 8, 13, 6
LENGTHS = np.array([13, 5, 9, 1, 13, 12, 2, 7], np.int32)
NUMERICS = Numerics.fp32_kvq()  # float32 shows what bfloat16 may round away
MESHES = [  # data, context, expert
    (1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 1, 8), (1, 2, 1), (1, 2, 2), (2, 2, 1),
    (2, 2, 2), (1, 4, 1), (4, 1, 2),
]  # fmt: skip
# Compiling is the cost of a mesh: a layer of pooled entries and one of entries of single tokens.
TWO_LAYERS = dataclasses.replace(
    CFG, num_hidden_layers=2, compress_ratios=(2, 1, 0), kv_source_layer_ids=(0, 1),
    index_source_layer_ids=(0, 1), candidate_source_layer_id=1, engram_layer_ids=(0,),
    dspark_target_layer_ids=(1,),
)  # fmt: skip
DEFAULT_MESHES = [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 1, 8), (1, 2, 1)]
RULES = dataclasses.replace(
    Rules.of(expert="expert", vocab="expert", engram_rows="expert"), padded=("engram_rows", "vocab")
)
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
    return _score_one(*model(), tokens(), LENGTHS, CFG, NUMERICS, sampling=SAMPLING, top=TOP)


_STATIC = ("cfg", "numerics", "mesh", "rules")
_score_one: Any = jax.jit(steps.score, static_argnames=(*_STATIC[:2], "top"))
_score: Any = jax.jit(parallel.score, static_argnames=(*_STATIC, "top"))
_rollout_one: Any = jax.jit(rl.rollout, static_argnames=(*_STATIC[:2], "new", "size"))
_rollout: Any = jax.jit(parallel.rollout, static_argnames=(*_STATIC, "new", "size"))


@pytest.mark.slow
def test_drafted_replies_over_a_mesh_have_the_scores_of_one_device():
    """Prompts, drafts and verification over shared global KV, experts with replicas, vocabulary and
    Engram rows, before and after weights have moved, by one program. The scores are of finished
    sequences.
    """
    params, table = model()
    mesh = device_mesh(1, 2, 2)
    placements = layout.initial_placements(CFG, 2, least=4)
    placed = layout.place(layout.on_slots(params, placements), CFG, mesh, RULES)
    stops, compiled = np.full(1, 1, np.int32), _size(_rollout)
    for _ in range(2):
        made = _rollout(
            placed, table, tokens(), LENGTHS, SAMPLING, stops, CFG, NUMERICS, mesh, new=NEW,
            size=2, rules=RULES,
        )  # fmt: skip
        want = _score_one(
            params, table, made.tokens, made.lengths, CFG, NUMERICS, sampling=SAMPLING
        )
        assert (np.asarray(made.lengths) > LENGTHS).all()
        for name in ("raw", "processed", "kept_mass"):
            one = np.where(made.sampled, getattr(want, name), 0)
            np.testing.assert_array_equal(bits(getattr(made, name)), bits(one), err_msg=name)
        placed, placements = everything_moved(placed, placements, mesh)
    assert _size(_rollout) == compiled + 1


@functools.cache
def two_layers() -> tuple[parameters.Params, dict[str, Any], Any]:
    """(Parameters, arguments of all rollouts, the replies of one device without drafts)."""
    # In the host's memory experts are laid on slots without a program for every shape.
    params = jax.tree.map(np.asarray, parameters.init(jax.random.key(3), TWO_LAYERS))
    # Truncation is a row's own matter, and a part of what is compiled.
    asked = sampling.untruncated(sampling.make_sampling(B, [20.0, 4.0] * 4, seeds=range(B)))
    given = {
        "tables": tables.make_tables(TWO_LAYERS, np.arange(67, dtype=np.int32), 32),
        "prompts": tokens(), "lengths": LENGTHS, "stops": np.full(1, 1, np.int32),
        "sampling": asked, "cfg": TWO_LAYERS, "numerics": NUMERICS, "new": NEW, "size": 2,
    }  # fmt: skip
    return params, given, _rollout_one(params, **given, scheduled=drafted(0))


def drafted(count: int) -> np.ndarray:
    """So many drafts to verify in every round of every reply."""
    return np.full((1, B), count, np.int32)


def same_replies(rollout: Any, params: parameters.Params, **given: Any) -> None:
    """Tokens and log-probs are those of one device without drafts, whether drafts are verified or
    not, which is data of one program.
    """
    want, rounds = two_layers()[2], []
    for count in (0, 2):
        got = rollout(params, **given, scheduled=drafted(count))
        rounds.append(int(got.rounds))
        for name in ("tokens", "lengths", "raw", "processed", "kept_mass", "stopped"):
            one, here = (bits(getattr(made, name)) for made in (want, got))
            np.testing.assert_array_equal(here, one, err_msg=f"{name}, {count} drafts")
    assert rounds[1] < rounds[0] == NEW - 1  # drafts were made, and right ones among them


@pytest.mark.slow
def test_replies_of_one_device_are_the_same_with_drafts():
    params, given, _ = two_layers()
    same_replies(_rollout_one, params, **given)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", DEFAULT_MESHES, ids=str)
def test_replies_over_a_mesh_are_those_of_one_device_with_and_without_drafts(sizes):
    params, given, _ = two_layers()
    mesh = device_mesh(*sizes)
    params = layout.on_slots(params, layout.initial_placements(TWO_LAYERS, sizes[2], least=2))
    params = layout.place(params, TWO_LAYERS, mesh, RULES)
    same_replies(_rollout, params, **given, mesh=mesh, rules=RULES)


@pytest.mark.exhaustive  # every mesh compiles a program of its own
@pytest.mark.parametrize(("data", "context", "expert"), MESHES)
def test_scores_over_a_mesh_are_those_of_one_device(data, context, expert):
    """With replicas, before and after their weights have moved, by one program; vocabulary and
    Engram rows split too.
    """
    params, table = model()
    mesh = device_mesh(data, context, expert)
    placements = layout.initial_placements(CFG, expert, least=4)
    placed = layout.place(layout.on_slots(params, placements), CFG, mesh, RULES)
    compiled = _size(_score)
    for _ in range(2):
        got = _score(
            placed, table, tokens(), LENGTHS, CFG, NUMERICS, mesh, sampling=SAMPLING, top=TOP,
            rules=RULES,
        )  # fmt: skip
        same(known(got), known(alone()))
        placed, placements = everything_moved(placed, placements, mesh)
    assert _size(_score) == compiled + 1


def device_mesh(data: int, context: int, expert: int):
    devices = jax.devices()[: data * context * expert]
    return layout.device_mesh(data, expert, devices, context=context)


def _size(program: Any) -> int:
    """Programs compiled for a jitted function."""
    return program._cache_size()


def everything_moved(placed, placements, mesh):
    """Every layer of every stack in an order drawn at random, some replicas given to others."""
    rng, moved = np.random.default_rng(5), {}
    for name, old in placements.items():
        rest = rng.integers(0, old.experts, (old.layers, old.slots - old.experts))
        whole = np.tile(np.arange(old.experts), (old.layers, 1))
        shuffled = rng.permuted(np.concatenate([whole, rest], axis=1), axis=1)
        new = eplb.make_placement(shuffled, old.experts, old.devices)
        for layer in range(old.layers):
            placed, old = moving.move(placed, name, layer, old, new, mesh)
        moved[name] = old
    return placed, moved


def moves_ahead(placed, placements, mesh) -> list[warming.Planned]:
    """What of a run over this mesh is planned for experts that move."""
    nothing: Any = None  # of the state only the parameters are looked at
    state = State(nothing, nothing, nothing, None, placed, nothing)
    return list(warming._movings(state, Site(mesh, placements)))


def test_moved_weights_are_where_the_placement_says():
    """Every slot of every layer, for stored codes and scales; one program moves them all, the one
    that an engine compiles ahead.
    """
    params, _ = model()
    mesh = layout.device_mesh(2, 4, jax.devices())
    placements = layout.initial_placements(CFG, 4, least=6)
    placed = layout.place(layout.on_slots(params, placements), CFG, mesh)
    before = _size(moving._moved)
    for each in moves_ahead(placed, placements, mesh):
        each.compile()
    with compilations() as found:
        for _ in range(2):
            placed, placements = everything_moved(placed, placements, mesh)
    assert found.count == 0
    assert _size(moving._moved) == before + len(placements)  # stacks of other sizes
    for name, placement in placements.items():
        held, logical = layout.experts_of(placed, name), layout.experts_of(params, name)
        for key in layout.WEIGHTS:
            for got, want in zip(*map(jax.tree.leaves, (held[key], logical[key])), strict=True):
                layer = np.arange(placement.layers)[:, None]
                want = np.asarray(want)[layer, placement.physical_to_logical]
                np.testing.assert_array_equal(bits(np.asarray(got)), bits(want))
        same_table = np.asarray(held["placement"].order)
        np.testing.assert_array_equal(same_table, placement.order)


def test_what_a_sequence_has_of_its_own_is_split_with_it():
    """Traced, not compiled: limits, stop tokens and drafts of each reply, images of a sequence."""
    params, table = model()
    mesh, places = device_mesh(2, 2, 2), np.zeros((B, S), bool)
    shown = np.zeros((B, S, CFG.hidden_size), np.float32)
    arguments = params, table, tokens(), LENGTHS
    ends, most = np.full((B, 3), -1, np.int32), np.full(B, NEW, np.int32)
    drafts = np.zeros((4, B), np.int32)
    replies = jax.eval_shape(
        lambda: parallel.rollout(
            *arguments, SAMPLING, ends, CFG, NUMERICS, mesh, new=NEW, limits=most,
            scheduled=drafts,
        )
    )  # fmt: skip
    assert replies.tokens.shape == (B, S + NEW)
    scores = jax.eval_shape(
        lambda: parallel.score(*arguments, CFG, NUMERICS, mesh, image=places, embeddings=shown)
    )
    assert scores.raw.shape == (B, S - 1)


@functools.cache
def alone_replied(size: int) -> tuple[dict, dict[str, Any]]:
    """(Arguments that differ by reply, the replies)."""
    stops = np.stack([np.arange(B), np.full(B, 1)], axis=1).astype(np.int32)
    own = {
        "stops": stops,
        "limits": np.arange(B, dtype=np.int32) % NEW + 1,
        "scheduled": np.arange(3 * B, dtype=np.int32).reshape(3, B) % (size + 1),
    }
    arguments = (*model(), tokens(), LENGTHS, SAMPLING)
    made = _rollout_one(*arguments, cfg=CFG, numerics=NUMERICS, new=NEW, size=size, **own)
    return own, {name: value for name, value in vars(made).items() if value is not None}


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("sizes", MESHES)
def test_rollouts_over_a_mesh_are_those_of_one_device(sizes, size):
    """Prefill, drafts and verification; devices that finish early wait for the others. Limits, stop
    tokens and numbers of drafts are each reply's own.
    """
    (params, table), (own, want) = model(), alone_replied(size)
    mesh = device_mesh(*sizes)
    params = layout.on_slots(params, layout.initial_placements(CFG, sizes[2], least=2))
    got = _rollout(
        layout.place(params, CFG, mesh, RULES), table, tokens(), LENGTHS, SAMPLING, cfg=CFG,
        numerics=NUMERICS, mesh=mesh, new=NEW, size=size, rules=RULES, **own,
    )  # fmt: skip
    same(vars(got), want)


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
    everywhere = jax.sharding.PartitionSpec()

    def own(params, table, tokens, lengths):
        return steps.score(params, table, tokens, lengths, cfg, NUMERICS)

    split = layout.over(own, params, CFG, mesh, layout.EXPERTS, (everywhere,) * 3, everywhere)
    got = jax.jit(split)(layout.place(params, CFG, mesh), table, tokens(), LENGTHS)
    want = jax.jit(own)(params, table, tokens(), LENGTHS)
    assert (bits(known(got)["raw"]) != bits(known(want)["raw"])).any()


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match=r"n_routed_experts=8 is not divisible by expert=3"):
        parallel.data_expert_mesh(1, 3, CFG, jax.devices()[:3])
    mesh = parallel.data_expert_mesh(2, 1, CFG, jax.devices()[:2])
    with pytest.raises(ValueError, match="3 sequences cannot be split over 2 devices"):
        parallel.score(*model(), tokens()[:3], LENGTHS[:3], CFG, NUMERICS, mesh)
    params, wrong = model()[0], layout.initial_placements(small_training.CONFIG, 2)
    with pytest.raises(ValueError, match=r"'layers' must be of \(layers, experts\) = \(3, 8\)"):
        layout.on_slots(params, wrong)
    placed = layout.on_slots(params, layout.initial_placements(CFG, 2))
    with pytest.raises(ValueError, match="lie on slots already"):
        layout.on_slots(placed, layout.initial_placements(CFG, 2))
