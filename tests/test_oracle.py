"""The package against the slow NumPy model of tests/oracle, on random models.

Float32 against float64: numbers to 1e-4 of their size, every decision the same. The oracle shares
nothing with the package, not even the reading of weights. Each random configuration costs a
compilation, so the default run takes one and the exhaustive one the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from deepinfer_jax import cache as caches
from deepinfer_jax import checkpoint, steps, tables
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.determinism import feeding
from deepinfer_jax.determinism.feeding import Text
from deepinfer_jax.loading import Model
from deepinfer_jax.model import draft, head
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.program import program
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows
from tests import every_role
from tests.oracle import Oracle, random_model, read_folder

PROMPT, STEPS = 29, 4
ROWS, CAPACITY, POSITIONS = PROMPT + 3, 40, 128
MODES = {"fp32": Numerics.fp32(), "fp32_kvq": Numerics.fp32_kvq()}
BOUND = 1e-4  # of the largest magnitude; two independent implementations stay within 2.5e-5
TIE = 2e-6  # a decision closer than this may fall either way
FLIP = 1e-5  # beyond it, a rounding of the KV quantizers fell on the other side somewhere


# Halves the time to compile; these programs run a few times and owe nobody their bits.
FAST = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"), compiler_options=FAST)
def _traced(params, made, rows, cache, where, cfg, numerics):
    """Numbers and decisions of every row by name, the cache, and the draft that would follow."""
    wanted = Capture(
        streams="all", router_weights="all", expert_mix="all", engram_rows="all",
        selected=cfg.index_source_layer_ids, index_scores="all",
        candidates=(cfg.candidate_source_layer_id,),
    )  # fmt: skip
    hidden, after = steps.extend(params, made, rows, cache, cfg, numerics, capture=wanted)
    seen = hidden.captured
    out = {
        "streams": seen.streams,
        "experts": hidden.routed,
        "weights": seen.router_weights,
        "pre": seen.expert_mix.pre,
        "engram": seen.engram_rows,
        "selected": seen.selected,
        "index_scores": seen.index_scores,
        "candidates": seen.candidates,
    }
    out = {name: jnp.moveaxis(value, 0, 1) for name, value in out.items()}  # rows first
    out["logits"] = head.logits(params, hidden.output, numerics)
    out["main_hidden"] = jnp.concatenate(list(hidden.taps), axis=-1)
    return out, after, draft.draft(params, made, after, *where, _greedy, cfg, numerics)


def _greedy(logits: jax.Array, *_: Any) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One random model as both sides see it."""

    cfg: ModelConfig
    params: Any
    tables: tables.Tables
    oracle: Oracle


def _pair(config: dict, mode: str, seed: int, folder) -> Pair:
    rng = np.random.default_rng(seed)
    path = random_model.write_folder(folder, config, random_model.random_weights(config, rng))
    token_map = random_model.random_token_map(config, rng)
    cfg = ModelConfig.from_json(path)
    read, weights = read_folder(path)
    return Pair(
        cfg,
        checkpoint.load_params(path),
        tables.make_tables(cfg, token_map, POSITIONS),
        Oracle(read, weights, token_map, quantize_kv=mode == "fp32_kvq"),
    )


def _rows(source: Text, start: int, stop: int) -> Rows:
    return feeding.rows_of([feeding.piece(0, source, start, stop)], ROWS)


def _package_run(pair: Pair, mode: str, source: Text, anchor: int):
    """Prefill, single steps and a draft: arrays with the position in front, and the draft."""
    cfg, numerics = pair.cfg, MODES[mode]
    cache = caches.init_cache(cfg, numerics, 1, CAPACITY)
    cuts = [0, *range(PROMPT, PROMPT + STEPS + 1)]
    parts, drafted = [], None
    for start, stop in itertools.pairwise(cuts):
        where = [jnp.asarray([v], jnp.int32) for v in (0, stop, anchor)]
        rows = _rows(source, start, stop)
        out, cache, drafted = _traced(pair.params, pair.tables, rows, cache, where, cfg, numerics)
        parts.append({name: np.asarray(v)[: stop - start] for name, v in out.items()})
    return {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}, drafted


def _oracle_run(pair: Pair, source: Text, anchor: int):
    images = {i: source.embeddings[i] for i in np.flatnonzero(source.image).tolist()}
    state = pair.oracle.new_state()
    records = pair.oracle.prefill(state, source.tokens.tolist(), images)
    return records, pair.oracle.draft(state, anchor)


def near_tie(records) -> bool:
    """Some decision is too close to call."""
    gaps = [np.asarray(list(r.router_gap)) for r in records]
    gaps += [np.array([*r.index_gap.values(), *r.block_gap.values()]) for r in records]
    return bool(np.concatenate(gaps).min() < TIE)


def close(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """By position: within `BOUND` of the largest magnitude."""
    error = np.abs(got - want).reshape(len(want), -1).max(axis=-1)
    return error <= BOUND * max(1.0, float(np.abs(want).max()))


def before_flips(got: np.ndarray, want: np.ndarray) -> int:
    """Positions before the first flip of a quantizer, which later positions may inherit.

    Flips are rare and small: most positions stay close, which no misplaced quantizer leaves so.
    """
    error = np.abs(got - want).reshape(len(want), -1).max(axis=-1)
    assert np.median(error) < 1e-2
    return int(np.argmax(np.append(error, np.inf) > FLIP * np.abs(want).max()))


def _padded(lists, width: int) -> np.ndarray:
    return np.array([[*items, *[-1] * (width - len(items))] for items in lists])


def check_decisions(cfg: ModelConfig, got: dict[str, np.ndarray], records, stop: int) -> None:
    """Experts, table rows, selected entries and candidate blocks of the first `stop` rows."""
    records = records[:stop]
    got = {name: value[:stop] for name, value in got.items()}
    np.testing.assert_array_equal(got["experts"], [r.router_ids for r in records])
    rows = [[r.engram_rows[layer] for layer in cfg.engram_layer_ids] for r in records]
    np.testing.assert_array_equal(got["engram"], rows)
    for place, layer in enumerate(cfg.index_source_layer_ids):
        want = _padded([r.index_topk[layer].tolist() for r in records], cfg.index_topk)
        np.testing.assert_array_equal(got["selected"][:, place], want, err_msg=f"layer {layer}")
        check_scores(got["index_scores"][:, place], [r.index_scores[layer] for r in records])
    kept = [np.flatnonzero(r.candidate_blocks[cfg.candidate_source_layer_id]) for r in records]
    width = got["candidates"].shape[-1]
    want = _padded([k.tolist() for k in kept], width)
    np.testing.assert_array_equal(got["candidates"][:, 0], want)


def check_scores(got: np.ndarray, scores: list[np.ndarray]) -> None:
    """Index scores [rows, entries]: of the entries that there were, outside of candidates -inf."""
    for row, want in zip(got, scores, strict=True):
        known = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(row[: len(want)]), known)
        assert not np.isfinite(row[len(want) :]).any()
        if known.any():
            assert close(row[: len(want)][known][None], want[known][None]).all()


def check_draft(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got.tokens)[0], want.ids)
    shape = want.router_ids.shape
    np.testing.assert_array_equal(np.asarray(got.routed).reshape(shape), want.router_ids)
    for name, value in (
        ("logits", want.logits), ("base", want.base_logits), ("confidence", want.confidence)
    ):  # fmt: skip
        assert close(np.asarray(getattr(got, name))[0], value).all(), name


def compare(config: dict, mode: str, seed: int, folder) -> None:
    """All of one random model: numbers, decisions, the draft."""
    pair = _pair(config, mode, seed, folder)
    vision = pair.cfg.vision is not None
    source = every_role.text(pair.cfg, PROMPT + STEPS, seed, range(8, 14) if vision else range(0))
    anchor = seed % pair.cfg.vocab_size
    records, want_draft = _oracle_run(pair, source, anchor)
    assume(not near_tie(records))
    got, got_draft = _package_run(pair, mode, source, anchor)
    want = {
        "logits": np.stack([r.logits for r in records]),
        "main_hidden": np.stack([r.main_hidden for r in records]),
        "streams": np.stack([np.stack(r.block_out) for r in records]),
        "weights": np.stack([np.stack(r.router_weights) for r in records]),
        "pre": np.stack([np.stack(r.pre_mix) for r in records]),
    }
    stop = len(records) if mode == "fp32" else before_flips(got["streams"], want["streams"])
    for name, value in want.items():
        assert close(got[name][:stop], value[:stop]).all(), name
    check_decisions(pair.cfg, got, records, stop)
    if stop == len(records):
        check_draft(got_draft, want_draft)


@st.composite
def cases(draw) -> tuple[dict, str, int]:
    vision = draw(st.booleans())
    config = random_model.random_config(draw, vision=vision)
    mode = draw(st.sampled_from(("fp32", "fp32", "fp32", "fp32_kvq")))
    return config, mode, draw(st.integers(0, 1 << 20))


# -- the scanned program ---------------------------------------------------------------------------


def released_pattern() -> dict:
    """The fed configuration with layers as in the release: repeated units, runs of reuse layers."""
    config = json.loads(every_role.CONFIG_FILE.read_text())
    config["text_config"] |= {
        "num_hidden_layers": 20,
        "compress_ratios": [0] * 2 + [2] * 6 + [1] * 12 + [0] * 2,
        "kv_source_layer_ids": [2, 5, 8],
        "index_source_layer_ids": [2, 5, 8, 11, 14, 17],
        "candidate_source_layer_id": 8,
        "dspark_target_layer_ids": [18, 19],
    }
    return config


@pytest.mark.exhaustive
def test_layers_in_loops_are_layers(tmp_path):
    """`forward` loops over equal layers: output, experts, cache and draft of 20 of them."""
    pair = _pair(released_pattern(), "fp32", 5, tmp_path)
    units = [(u.repeat, [n for _, n in u.runs]) for u in program(pair.cfg)]
    assert units == [(1, [1, 1]), (2, [1, 2]), (1, [1, 2]), (2, [1, 2]), (1, [1, 2])]
    source = every_role.text(pair.cfg, 48, 6, range(9, 15))
    images = {i: source.embeddings[i] for i in np.flatnonzero(source.image).tolist()}
    state = pair.oracle.new_state()
    records = pair.oracle.prefill(state, source.tokens.tolist(), images)
    m = Model("random", pair.cfg, MODES["fp32"], pair.params, pair.tables, None)
    pieces = [feeding.piece(0, source, 0, 48)]
    names = ("cfg", "numerics", "replay")
    compiled = jax.jit(feeding.observe, static_argnames=names, compiler_options=FAST)
    fed, cache = feeding.feed(m, every_role.garbage(m), pieces, 48, program=compiled)
    rows = [fed.of(0, p) for p in range(48)]
    assert close(np.stack([r["logits"] for r in rows]), np.stack([r.logits for r in records])).all()
    want = np.stack([np.stack(r.router_ids) for r in records])
    np.testing.assert_array_equal(np.stack([r["routed"] for r in rows]), want)
    check_cache(m, cache, state)
    drafted = every_role.draft_of(m, cache, [-1, 0, -1], [0, 48, 0], [0, 11, 0])
    want = pair.oracle.draft(state, 11)
    np.testing.assert_array_equal(drafted.tokens[1], want.ids)
    assert close(drafted.logits[1], want.logits).all()


def check_cache(m: Model, cache: caches.Cache, state: Any) -> None:
    """Rings and entries of slot 0 hold the oracle's rows of every layer."""
    cfg, got = m.cfg, feeding.visible(m, cache, 0, state.length)
    recent = range(state.length - cfg.sliding_window, state.length)
    windows = np.concatenate([got["encoder"], got["decoder"]])
    for ours, theirs in ((windows, state.window), (got["draft"], state.context)):
        want = np.array([[theirs[layer][p] for p in recent] for layer in range(len(ours))])
        assert close(ours, want).all()
    for ratio in cfg.ratios:
        for name, theirs in (("kv", state.compressed), ("keys", state.index_keys)):
            want = np.array([theirs[layer] for layer in cfg.kv_sources(ratio)])
            assert close(got[f"{name}{ratio}"], want).all(), (name, ratio)


# -- random configurations -------------------------------------------------------------------------

# A failing example is reported as drawn: shrinking it would compile dozens of programs.
_PHASES = (Phase.explicit, Phase.generate)


@pytest.mark.exhaustive
@given(case=cases())
@settings(max_examples=12, phases=_PHASES)
def test_random_models(tmp_path_factory, case):
    compare(*case, tmp_path_factory.mktemp("model"))
