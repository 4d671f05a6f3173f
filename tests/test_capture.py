"""What `capture` gives back: documented shapes, values that agree with each other, no other bits.

`tests/test_oracle.py` holds values to the slow NumPy model (exhaustive).
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import params, rows, steps, tables
from deepinfer_jax.cache import cache_shapes
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.determinism import feeding
from deepinfer_jax.model import capture as capturing
from deepinfer_jax.model import forward
from deepinfer_jax.model.capture import Capture, Captured
from deepinfer_jax.model.forward import Replay
from deepinfer_jax.numerics import Numerics
from tests import every_role, tiny_model
from tests.test_forward import DEEP

FIELDS = [field.name for field in dataclasses.fields(Capture)]
ALL = Capture(**dict.fromkeys(FIELDS, "all"))
EVERY_ROLE = ModelConfig.from_dict(json.loads(every_role.CONFIG_FILE.read_text("utf-8")))
B, S = 2, 22  # sequences and their length
TWO = jax.ShapeDtypeStruct((B,), jnp.int32)


# -- shapes, without a computation -----------------------------------------------------------------


def traced(capture, cfg=EVERY_ROLE, numerics=None, cached=True, replay=forward.OFF):
    """`Hidden` of a call of B x S rows as shapes."""
    numerics = numerics or Numerics.native()
    batch = jax.eval_shape(rows.batch_rows, jax.ShapeDtypeStruct((B, S), jnp.int32), TWO)
    cache = cache_shapes(cfg, numerics, B, 40) if cached else None
    call = functools.partial(
        forward.forward, cfg=cfg, numerics=numerics, length=None if cached else S, replay=replay,
        capture=capture,
    )  # fmt: skip
    lengths = {} if replay == forward.OFF else {"prompt_lengths": TWO}
    made = tables.table_shapes(cfg, 40)
    return jax.eval_shape(call, params.shapes(cfg), made, batch, cache, **lengths)[0]


FORMS = {
    "cache": {},
    "no cache": {"cached": False},
    "dense": {"cached": False, "numerics": Numerics(rows="dense")},
    "kernels": {"numerics": Numerics.native(rows="ffi")},
    "compact": {"replay": Replay("compact", 18)},
}


@pytest.mark.parametrize(
    "form", [f if f == "compact" else pytest.param(f, marks=pytest.mark.exhaustive) for f in FORMS]
)
def test_shapes_are_those_of_the_docstring(form):
    cfg, t = EVERY_ROLE, B * S
    c, d, h, e = cfg.hc_mult, cfg.hidden_size, cfg.num_attention_heads, cfg.n_routed_experts
    entries = S if FORMS[form].get("cached") is False else 40
    want = {
        "windows": (5, t, 2),
        "selected": (4, t, cfg.index_topk),
        "candidates": (1, t, cfg.candidate_topk_blocks),
        "index_scores": (3, t, entries),
        "probabilities": (5, t, h, cfg.sliding_window + cfg.index_topk + 1),
        "router_scores": (5, t, e),
        "router_weights": (5, t, cfg.num_experts_per_tok),
        "router_load": (5, e),
        "engram_rows": (1, t, cfg.engram_lookback * cfg.engram_n_heads),
        "engram_gates": (1, t, c),
        "streams": (5, t, c, d),
        "stream_norms": (5, t, c),
    }
    found = traced(ALL, **FORMS[form]).captured
    got = {name: getattr(found, name).shape for name in want}
    assert got == want
    for mix in (found.attention_mix, found.expert_mix):
        assert (mix.pre.shape, mix.post.shape, mix.comb.shape) == (
            (5, t, c), (5, t, c), (5, t, c, c),
        )  # fmt: skip
    assert dict(found.places)["index_scores"] == (1, 3, 4)


def test_only_what_was_asked_for_is_there():
    found = traced(Capture(router_load=(0, 3, 4), selected=(2,)), cached=False).captured
    assert found.router_load.shape == (3, EVERY_ROLE.n_routed_experts)
    assert (found.layers("router_load"), found.layers("streams")) == ((0, 3, 4), ())
    given = {name for name in FIELDS if getattr(found, name) is not None}
    assert given == {"router_load", "selected"}


@pytest.mark.exhaustive
def test_nothing_to_capture_leaves_the_program_as_it_is():
    """The text of the lowered program, loops included, with a `Capture` of nothing and without."""

    def lowered(capture):
        shapes = (params.shapes(DEEP), tables.table_shapes(DEEP, 40))
        tokens = jax.ShapeDtypeStruct((B, S), jnp.int32)
        program = jax.jit(steps.score, static_argnames=("cfg", "numerics", "capture"))
        return program.lower(
            *shapes, tokens, TWO, DEEP, Numerics.native(), capture=capture
        ).as_text()

    assert lowered(Capture()) == lowered(None)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"streams": [1]}, TypeError, r'must be "all" or a tuple of layer numbers .* got \[1\]'),
        ({"streams": "some"}, TypeError, "got 'some'"),
        ({"streams": (True,)}, TypeError, "tuple of layer numbers"),
        ({"streams": (2, 1)}, ValueError, r"ascending order, got \(2, 1\)"),
        ({"streams": (1, 1)}, ValueError, "each layer once"),
    ],
)
def test_what_names_no_layers_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        Capture(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"streams": (4, 5)}, r"streams: layer 5 .* one of the backbone: \[0, 1, 2, 3, 4\]"),
        ({"streams": (-1,)}, "layer -1 has no such value"),
        ({"selected": (0,)}, r"selected: layer 0 .* layers with global KV: \[1, 2, 3, 4\]"),
        ({"index_scores": (1, 2)}, r"layer 2 .* index sources: \[1, 3, 4\]"),
        ({"candidates": (4,)}, r"the candidate source: \[3\]"),
        ({"engram_gates": (0,)}, r"Engram layers: \[1\]"),
    ],
)
def test_layers_without_the_value_are_refused_before_anything_runs(given, message):
    with pytest.raises(ValueError, match=message):
        traced(Capture(**given))


def test_what_was_not_captured_is_refused():
    found = Captured(router_load=jnp.ones((1, 3)), places=(("router_load", (4,)),))
    assert found.of("router_load", 4).shape == (3,)
    with pytest.raises(ValueError, match=r"streams of layer 4 .* Capture\(streams=\(4,\)\)"):
        found.of("streams", 4)


# -- parts -----------------------------------------------------------------------------------------


def test_scores_go_to_the_columns_of_their_entries():
    score = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    ids = jnp.array([[4, 0, -1], [1, -1, 3]])
    got = capturing.score_columns(score, ids, 5)
    low = -np.inf
    np.testing.assert_array_equal(got, [[2, low, low, low, 1], [low, 4, low, 6, low]])


@pytest.mark.parametrize("traced_layer", [False, True])
def test_values_go_to_the_place_of_their_layer(traced_layer):
    """Also from inside a loop, where the number of the layer is traced."""
    seen = Captured(stream_norms=jnp.zeros((2, 4, 1)), places=(("stream_norms", (1, 3)),))
    origin = jnp.array([2, 0, 4])  # the third row is padding: beyond the rows

    def one(seen, layer):
        value = jnp.full((3, 1), layer, jnp.float32)
        return capturing.keep(seen, layer, 5, origin, {"stream_norms": lambda: value})

    for layer in range(5):
        place = jnp.int32(layer) if traced_layer else layer
        seen = jax.jit(one)(seen, place) if traced_layer else one(seen, place)
    got = np.asarray(seen.stream_norms)[..., 0]
    np.testing.assert_array_equal(got, [[1, 0, 1, 0], [3, 0, 3, 0]])


# -- values ----------------------------------------------------------------------------------------

# Values are held to each other and to NumPy within a rounding: no bits are at stake.
FAST = {"xla_backend_optimization_level": 0}
LENGTHS = np.array([S, 15], np.int32)


@functools.cache
def inside() -> steps.Scores:
    """Of two sequences under a random model of two layers: a window with Engram, a full one."""
    model = tiny_model.model()
    tokens = np.random.default_rng(5).integers(0, model.cfg.vocab_size, (B, S), np.int32)
    program = jax.jit(
        steps.score, static_argnames=("cfg", "numerics", "capture"), compiler_options=FAST
    )
    made = program(
        model.params, model.tables, tokens, LENGTHS, model.cfg, model.numerics, capture=ALL
    )
    return jax.tree.map(np.asarray, made)


def real(values: np.ndarray) -> np.ndarray:
    """The rows that are no padding, of [B, S, ...]."""
    return values[np.arange(S) < LENGTHS[:, None]]


def test_experts_follow_from_the_scores_and_are_counted():
    found, cfg = inside(), tiny_model.model().cfg
    gate = tiny_model.model().params["layers"]["ffn"]["gate"]
    for layer in range(2):
        scores = real(found.captured.of("router_scores", layer))
        experts = real(found.routed[layer])
        order = np.argsort(-(scores + np.asarray(gate["bias"])[layer]), axis=1, kind="stable")
        np.testing.assert_array_equal(experts, order[:, : cfg.num_experts_per_tok])
        picked = np.take_along_axis(scores, experts, 1)
        want = cfg.routed_scaling_factor * picked / picked.sum(1, keepdims=True)
        got = real(found.captured.of("router_weights", layer))
        np.testing.assert_allclose(got, want, rtol=1e-6)
        load = np.bincount(experts.ravel(), minlength=cfg.n_routed_experts)
        np.testing.assert_array_equal(found.captured.of("router_load", layer), load)


def test_the_selection_is_the_best_of_the_scores():
    found, cfg = inside().captured, tiny_model.model().cfg
    scores, selected = (real(found.of(name, 1)) for name in ("index_scores", "selected"))
    position = real(np.broadcast_to(np.arange(S), (B, S)))
    for row, chosen, at in zip(scores, selected, position, strict=True):
        visible = (at + 1) // 2
        assert (row > -np.inf).sum() == visible
        best = np.sort(np.argsort(-row, kind="stable")[: min(visible, cfg.index_topk)])
        np.testing.assert_array_equal(chosen[chosen >= 0], best)


def test_attention_goes_to_the_window_the_selection_and_the_sink():
    found, cfg = inside().captured, tiny_model.model().cfg
    w, windows = cfg.sliding_window, real(found.of("windows", 0))
    position = real(np.broadcast_to(np.arange(S), (B, S)))
    np.testing.assert_array_equal(windows[:, 1], position)
    np.testing.assert_array_equal(windows[:, 0], np.maximum(position - w + 1, 0))
    for layer in range(2):
        p = real(found.of("probabilities", layer))
        np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-5)
        slots = position[:, None] - w + 1 + np.arange(w)
        given = np.full((len(p), cfg.index_topk), layer == 1)
        given &= real(found.of("selected", 1)) >= 0
        seen = np.concatenate([slots >= 0, given, np.ones((len(p), 1), bool)], 1)
        assert ((p > 0) == seen[:, None]).all()


def test_mixes_gates_and_norms_are_what_they_are_named():
    found, cfg = inside().captured, tiny_model.model().cfg
    for mix in (found.attention_mix, found.expert_mix):
        for layer in range(2):
            comb = real(mix.comb[layer])
            np.testing.assert_allclose(comb.sum(1), 1, atol=1e-3)  # over sources: the last step
            np.testing.assert_allclose(comb.sum(2), 1, atol=2e-2)  # nineteen steps have converged
            assert (real(mix.post[layer]) < 2).all()
            assert (real(mix.pre[layer]) > 0).all()
    streams = real(found.of("streams", 1)).astype(np.float32)
    norms = np.sqrt(np.mean(np.square(streams), axis=-1))
    np.testing.assert_allclose(real(found.of("stream_norms", 1)), norms, rtol=1e-5)
    gates, entries = real(found.of("engram_gates", 0)), real(found.of("engram_rows", 0))
    assert ((gates > 0) & (gates < 1)).all()
    assert ((entries >= 0) & (entries < cfg.engram_num_embeddings[0])).all()


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows_of", ["tiled", "ffi"])
def test_capturing_changes_no_bit(rows_of):
    """Hidden rows, experts and cache of chunks that wrap every ring, with everything captured."""
    m = every_role.model("bfloat16", rows_of)
    program = jax.jit(steps.extend, static_argnames=("cfg", "numerics", "capture"))
    text = every_role.text(m.cfg, 48, 3, range(9, 15))
    states = {None: every_role.garbage(m), ALL: every_role.garbage(m)}
    for start, stop in ((0, 29), (29, 30), (30, 48)):
        batch = feeding.rows_of([feeding.piece(5, text, start, stop)], 32)
        found = {}
        for capture, cache in states.items():
            hidden, states[capture] = program(
                m.params, m.tables, batch, cache, m.cfg, m.numerics, capture=capture
            )
            own = slice(0, stop - start)
            found[capture] = hidden.output[own], hidden.taps[:, own], hidden.routed[:, own]
        jax.tree.map(np.testing.assert_array_equal, found[None], found[ALL])
    states = {key: feeding.visible(m, cache, 5, 48) for key, cache in states.items()}
    jax.tree.map(np.testing.assert_array_equal, states[None], states[ALL])
