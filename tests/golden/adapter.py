"""Runs a recorded model and returns arrays by recorded names.

Everything a stage returns is NumPy, at every position; the comparisons pick what was recorded.

Compiling dominates, so recorded models share programs: slots, rows and capacity are rounded up
(padding rows change nothing, which is a property tested elsewhere), text and image models get one
parameter tree. Models of short prompts run them in one call and decode token by token in `fp32`;
elsewhere both are a few calls of many positions, cut where drafts are recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import cache as caches
from deepinfer_jax import checkpoint, tables
from deepinfer_jax import params as parameters
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, draft, forward, head, hyper, index
from deepinfer_jax.model import block as blocks
from deepinfer_jax.model.program import ordinals
from deepinfer_jax.numerics import Numerics, at_layer, rms_norm
from deepinfer_jax.rows import Rows
from tests.golden import adapter_images, compare
from tests.golden.reader import Arrays, Folder

FAST = {"xla_backend_optimization_level": 0}  # halves compile time; these programs run once
SHORT = 24  # positions of the `shortN` arrays
ROUND = 25  # positions that prompts are rounded up to
WIDEST = 125  # most positions of a slot in one traced call; longer prompts come in chunks


@dataclasses.dataclass(frozen=True)
class Model:
    """A recorded model as the package sees it; `images` are what `encode_images` takes of it."""

    cfg: ModelConfig
    numerics: Numerics
    params: Any
    tables: tables.Tables
    images: tuple[Any, ModelConfig]


def _multiple(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _capacity(cfg: ModelConfig, tokens: int) -> int:
    return min(_multiple(tokens, 40), cfg.max_position_embeddings)


def load(folder: Folder, mode: str, scratch: Path, index_rounding: str = "once") -> Model:
    """Load a folder for a numeric mode.

    The float32 modes widen the weights first (exact). Text models get a `bias_vl` that no row uses
    and image models keep their tower apart, so that both have one tree.
    """
    where = folder.unpacked_model(scratch)
    cfg = ModelConfig.from_json(where)
    params = checkpoint.load_params(where)
    numerics = {
        "fp32": Numerics.fp32(),
        "fp32_kvq": Numerics.fp32_kvq(),
        "native": Numerics.native(cfg.quantized),
    }[mode]
    numerics = dataclasses.replace(numerics, index_rounding=index_rounding)
    if mode != "native":
        params, cfg = parameters.widen(params), dataclasses.replace(cfg, quantized=False)
    images = {"vision": params.pop("vision", {})}, cfg
    for stack in (params, params.get("draft")):
        if stack is not None:
            gate = stack["layers"]["ffn"]["gate"]
            gate.setdefault("bias_vl", gate["bias"])
    cfg = dataclasses.replace(cfg, vision=None, image_token_id=None)
    inputs = folder.inputs
    length = _capacity(cfg, inputs["tokens"].shape[1]) + cfg.dspark_block_size  # drafts look ahead
    length = min(length, cfg.max_position_embeddings)
    made = tables.make_tables(cfg, inputs.get("engram_token_map"), length)
    return Model(cfg, numerics, params, made, images)


# -- one traced call -------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"), compiler_options=FAST)
def _traced(
    params: Any, made: tables.Tables, rows: Rows, cache: Cache, cfg: ModelConfig, numerics: Numerics
) -> tuple[dict[str, jax.Array], Cache]:
    """Arrays by the last part of their recorded name, rows flat, and the cache."""
    seen, after = forward.trace(params, made, rows, cache, cfg, numerics)
    assert after is not None
    call, _ = forward.make_call(params, made, rows, cache, cfg, numerics)
    first = forward.first_stream(call, cache)
    last = seen[-1][0]
    u = hyper.collapse(last.pre, last.x, numerics)
    normed = rms_norm(u, params["norm"], cfg.rms_norm_eps, numerics)
    out = {
        "block0_in": first.x[:, 0],
        "block_out": jnp.stack([s.x for s, _ in seen]),
        "pre_mix": jnp.stack([s.pre for s, _ in seen]),
        "attn_out": jnp.stack([r.attention for _, r in seen]),
        "ffn_out": jnp.stack([r.moe for _, r in seen]),
        "router_i": jnp.stack([r.route.experts for _, r in seen]),
        "router_w": jnp.stack([r.route.weights for _, r in seen]),
        "main_hidden": jnp.concatenate(list(last.taps), axis=-1),
        "final_norm": normed,
        "logits": head.logits(params, normed, numerics),
    }
    hidden = forward.Hidden(normed, last.taps, last.routed, rows)
    if cfg.num_nextn_predict_layers:
        after = draft.store_context(params, made, hidden, after, cfg, numerics)
    if cfg.engram_layer_ids:
        out["engram_hash"] = _engram_rows(call)
    for layer, kind in enumerate(cfg.kinds()):
        stream, record = seen[layer]
        if kind.engram is not None:
            out[f"after_engram.{layer}"] = record.entered
        if kind.index_source:
            scored = dataclasses.replace(stream, cache=after)
            out[f"index_topk.{layer}"] = stream.selected
            out[f"index_score.{layer}"] = _index_scores(call, layer, record.normed, scored)
        if kind.candidate_source:
            out[f"candidate_blocks.{layer}"] = stream.candidates
    return out, after


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"), compiler_options=FAST)
def _forward(
    params: Any, made: tables.Tables, rows: Rows, cache: Cache, cfg: ModelConfig, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """Logits and experts of the function in use, of which the trace above is a copy that shows."""
    hidden, _ = forward.forward(params, made, rows, cache, cfg, numerics)
    return head.logits(params, hidden.output, numerics), hidden.routed


def _greedy(logits: jax.Array, *_: Any) -> jax.Array:
    """Drafts are recorded at temperature zero."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"), compiler_options=FAST)
def _drafted(
    params: Any, made: tables.Tables, cache: Cache, slots: jax.Array, positions: jax.Array,
    anchors: jax.Array, cfg: ModelConfig, numerics: Numerics,
) -> draft.Draft:  # fmt: skip
    return draft.draft(params, made, cache, slots, positions, anchors, _greedy, cfg, numerics)


def _engram_rows(call: blocks.Call) -> jax.Array:
    """Table rows [T, Engram layers, columns]."""
    count = len(call.cfg.engram_layer_ids)
    return jnp.stack([blocks.engram_rows(call, n) for n in range(count)], axis=1)


def _index_scores(call: blocks.Call, layer: int, x: jax.Array, s: blocks.Stream) -> jax.Array:
    """Scores [T, entries] of an index source, -inf where the candidate blocks leave entries out.

    x [T, D] is the layer's normed input, `s` holds its candidates and the cache with its keys.
    """
    cfg, numerics, kind = call.cfg, call.numerics, call.cfg.kinds()[layer]
    assert s.cache is not None
    p = blocks.block_params(call.params["layers"], layer, call.numerics)
    low = attention.query(p["attn"], x, call.yarn, cfg, numerics).low
    places, which = ordinals(cfg), cfg.ratios.index(kind.ratio)
    own = {
        n: at_layer(call.params["indexer"][n], int(places.indexer[layer]), numerics)
        for n in ("wq_b", "weights_proj")
    }
    query = index.index_query(own, x, low, call.yarn, cfg, numerics)
    count = blocks.entry_count(call, s.cache, kind.ratio)
    field = index.Field(kind.ratio, caches.index_codec(cfg, numerics))
    ids = jnp.arange(count, dtype=jnp.int32)
    stored = int(places.stored[layer])
    keys = attention.Entries(s.cache.keys[which], stored, s.cache.pages)
    score = index.scores(query, keys, ids, call.rows, call.spans, field, numerics)
    if not kind.uses_candidates:
        return score
    block = (ids // cfg.candidate_block_size)[None, :, None]
    allowed = (s.candidates[:, None, :] == block).any(axis=-1)
    return jnp.where(allowed, score, -jnp.inf)


# -- whole runs ------------------------------------------------------------------------------------


class Run:
    """One recorded model in one mode; each stage is computed once, when first asked for."""

    def __init__(self, folder: Folder, mode: str, scratch: Path) -> None:
        self.folder, self.model = folder, load(folder, mode, scratch)
        self.golden = folder.golden(mode)
        self.tokens = folder.inputs["tokens"]
        self.batch, self.total = self.tokens.shape
        self.prompt = prompt_length(self.golden, self.total)
        self.width = min(_multiple(self.prompt, ROUND), WIDEST)
        self.slots = _multiple(self.batch, 2) if self.width < WIDEST else self.batch
        self.stepwise = mode == "fp32" and self.width < WIDEST
        self._stages: dict[str, Arrays] = {}
        self._caches: dict[str, Cache] = {}
        self._seen: dict[int, Cache] = {}  # by recorded draft position, the cache after it

    def stage(self, name: str) -> Arrays:
        """Produced arrays of one stage: `prefill`, `decode`, `short2`, `cache_end`, `dspark`."""
        if name not in self._stages:
            if name.startswith("short"):
                made = self._short(int(name.removeprefix("short")))
            else:
                made = getattr(self, f"_{name}")()
            self._stages[name] = Arrays({f"{name}.{k}": v for k, v in made.items()})
        return self._stages[name]

    # -- calls -------------------------------------------------------------------------------------

    def _empty(self) -> Cache:
        m = self.model
        return caches.init_cache(m.cfg, m.numerics, self.slots, _capacity(m.cfg, self.total))

    def _call(
        self, start: int, stop: int, cache: Cache, width: int
    ) -> tuple[dict[str, np.ndarray], Cache]:
        """Feed positions start..stop of every batch row; arrays [.., B, stop - start, ..].

        The call has slots x width rows, those behind the real ones being padding.
        """
        m, count = self.model, stop - start
        rows = self._rows(start, stop, self.slots * width)
        out, cache = _traced(m.params, m.tables, rows, cache, m.cfg, m.numerics)
        return {k: self._batched(k, np.asarray(v), count) for k, v in out.items()}, cache

    def _rows(self, start: int, stop: int, size: int) -> Rows:
        count = stop - start
        pad = (0, size - self.batch * count)
        slots = np.repeat(np.arange(self.batch, dtype=np.int32), count)
        positions = np.tile(np.arange(start, stop, dtype=np.int32), self.batch)
        image, embeddings = image_rows(self.folder, self.model, start, stop)
        return Rows(
            jnp.asarray(np.pad(self.tokens[:, start:stop].reshape(-1), pad)),
            jnp.asarray(np.pad(slots, pad, constant_values=-1)),
            jnp.asarray(np.pad(positions, pad)),
            jnp.asarray(np.pad(image, pad)),
            jnp.asarray(np.pad(embeddings, (pad, (0, 0)))),
        )

    def _batched(self, name: str, value: np.ndarray, count: int) -> np.ndarray:
        """[.., B * count (and padding), ..] -> [.., B, count, ..]; block numbers become a mask."""
        axis = compare.AXES[name.split(".")[0]].index("batch")
        value = np.take(value, np.arange(self.batch * count), axis=axis)
        value = value.reshape(*value.shape[:axis], self.batch, count, *value.shape[axis + 1 :])
        if name.startswith("candidate_blocks"):
            return compare.block_mask(value, -(-self.total // self.model.cfg.candidate_block_size))
        return value

    def _calls(
        self, start: int, stop: int, cache: Cache, width: int
    ) -> tuple[dict[str, np.ndarray], Cache]:
        """The same in calls of at most `width` positions."""
        pieces = []
        for first in range(start, stop, width):
            out, cache = self._call(first, min(first + width, stop), cache, width)
            pieces.append(out)
        return _joined(pieces), cache

    # -- stages ------------------------------------------------------------------------------------

    def _prefill(self) -> dict[str, np.ndarray]:
        out, self._caches["prefill"] = self._calls(0, self.prompt, self._empty(), self.width)
        out["argmax"] = out["logits"].argmax(axis=-1)
        return out

    def _forward(self) -> dict[str, np.ndarray]:
        """The whole prompt through `forward` instead of the trace."""
        size = self.slots * _multiple(self.prompt, ROUND)
        m, rows = self.model, self._rows(0, self.prompt, size)
        made = _forward(m.params, m.tables, rows, self._empty(), m.cfg, m.numerics)
        out = dict(zip(("logits", "router_i"), map(np.asarray, made), strict=True))
        out = {name: self._batched(name, value, self.prompt) for name, value in out.items()}
        return out | {"argmax": out["logits"].argmax(axis=-1)}

    def _decode(self) -> dict[str, np.ndarray]:
        self.stage("prefill")
        cache, pieces = self._caches["prefill"], []
        drafts = self.golden.wide("dspark.pos").tolist() if "dspark.pos" in self.golden else []
        cuts = {self.prompt, *(p + 1 for p in drafts), self.total}
        for start, stop in itertools.pairwise(sorted(cuts)):
            out, cache = self._calls(start, stop, cache, 1 if self.stepwise else self.width)
            self._seen[stop - 1] = cache
            pieces.append(out)
        self._caches["end"] = cache
        return _joined(pieces)

    def _short(self, prompt: int) -> dict[str, np.ndarray]:
        """A prompt of one to three tokens, then decoding up to position 24."""
        first, cache = self._call(0, prompt, self._empty(), self.width)
        rest, _ = self._calls(prompt, SHORT, cache, 1)
        return {"logits": np.concatenate([first["logits"], rest["logits"]], axis=1)}

    def _draft(self, position: int, cache: Cache) -> dict[str, np.ndarray]:
        """The draft that follows `position`, with the given next token as its anchor."""
        m, spare = self.model, (0, self.slots - self.batch)
        anchors = self.tokens[:, position + 1]
        slots = np.pad(np.arange(self.batch, dtype=np.int32), spare, constant_values=-1)
        made = _drafted(
            m.params, m.tables, cache, jnp.asarray(slots),
            jnp.full((self.slots,), position + 1, jnp.int32),
            jnp.asarray(np.pad(anchors, spare)), m.cfg, m.numerics,
        )  # fmt: skip
        d = jax.tree.map(np.asarray, made)

        def rows(value: np.ndarray) -> np.ndarray:
            split = value.reshape(value.shape[0], self.slots, -1, *value.shape[2:])
            return split[:, : self.batch]

        return {
            "output_ids": np.concatenate([anchors[:, None], d.tokens[: self.batch]], axis=1),
            "logits": d.logits[: self.batch],
            "base_logits": d.base[: self.batch],
            "confidence": d.confidence[: self.batch],
            "block_out": rows(d.streams),
            "router_i": rows(d.routed),
        }

    def _dspark(self) -> dict[str, np.ndarray]:
        self.stage("decode")
        made = [self._draft(p, self._seen[p]) for p in self.golden.wide("dspark.pos").tolist()]
        return {name: np.stack([d[name] for d in made]) for name in made[0]}

    def _dspark_after_prefill(self) -> dict[str, np.ndarray]:
        self.stage("prefill")
        return self._draft(self.prompt - 1, self._caches["prefill"])

    # -- caches in the recorded form ---------------------------------------------------------------

    def _cache_prefill(self) -> dict[str, np.ndarray]:
        self.stage("prefill")
        return recorded_cache(self.model, self._caches["prefill"], self.batch, self.prompt)

    def _cache_end(self) -> dict[str, np.ndarray]:
        self.stage("decode")
        return recorded_cache(self.model, self._caches["end"], self.batch, self.total)

    def _cache_end_tail(self) -> dict[str, np.ndarray]:
        return {k.removeprefix("cache_end."): v for k, v in self.stage("cache_end").items()}


def _joined(pieces: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Outputs of consecutive calls along their position axes."""
    axes = {name: compare.AXES[name.split(".")[0]].index("position") for name in pieces[0]}
    return {n: np.concatenate([p[n] for p in pieces], a) for n, a in axes.items()}


@functools.cache
def run(folder: Folder, mode: str, scratch: Path) -> Run:
    """The run of a folder in a mode, made once."""
    return Run(folder, mode, scratch)


def prompt_length(golden: Arrays, total: int) -> int:
    """Tokens of the prompt, from whatever the folder records."""
    if "decode.pos" in golden:
        return int(golden.wide("decode.pos")[0])
    return golden["prefill.argmax"].shape[-1] if "prefill.argmax" in golden else total


def image_rows(
    folder: Folder, model: Model, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """(inside an image span [B * n], embeddings there [B * n, D]) for positions start..stop."""
    inputs = folder.inputs
    tokens = inputs["tokens"]
    kinds = inputs["token_types"] if "token_types" in inputs else np.full_like(tokens, -1)
    embeddings = np.zeros((*kinds.shape, model.cfg.hidden_size), np.float32)
    if (kinds >= 0).any():
        params, cfg = model.images
        embeddings[kinds >= 0] = adapter_images.spans(folder, params, cfg, model.numerics)
    window = slice(start, stop)
    flat = embeddings[:, window].reshape(-1, embeddings.shape[-1])
    return (kinds[:, window] >= 0).reshape(-1), flat


def recorded_cache(model: Model, cache: Cache, batch: int, length: int) -> dict[str, np.ndarray]:
    """Float views by layer: rings with position p in slot p mod window, entries in order."""
    cfg, numerics = model.cfg, model.numerics
    dtype, window = jnp.dtype(numerics.dtype), cfg.sliding_window
    codec, out = caches.window_codec(cfg, numerics), {}
    for name, rings in (("window_kv", cache.window), ("mtp_window_kv", cache.draft)):
        value = np.asarray(codec.load(rings[:, :batch], dtype))
        positions = np.arange(max(0, length - window), length)
        ring = np.zeros((*value.shape[:2], window, value.shape[-1]), value.dtype)
        ring[:, :, positions % window] = value[:, :, positions % value.shape[2]]
        out |= {f"{name}.{layer}": ring[layer] for layer in range(len(ring))}
    main, keys = caches.main_codec(cfg, numerics), caches.index_codec(cfg, numerics)
    pooled = [s for s in cfg.kv_source_layer_ids if cfg.compress_ratios[s] > 1]
    for which, ratio in enumerate(cfg.ratios):
        groups = length // ratio
        for stored, layer in enumerate(cfg.kv_sources(ratio)):
            kv, key = cache.kv[which][stored], cache.keys[which][stored]
            out[f"compress_kv.{layer}"] = np.asarray(main.load(kv[:batch, :groups], dtype))
            out[f"index_k.{layer}"] = np.asarray(keys.load(key[:batch, :groups], dtype))
            if ratio > 1:
                pending = np.asarray(cache.pending[pooled.index(layer)])[:batch]
                state = _unfinished(pending, length, ratio)
                out[f"comp_kv_state.{layer}"] = state[:, :, 0]
                out[f"comp_score_state.{layer}"] = state[:, :, 1]
    return out


def _unfinished(pending: np.ndarray, length: int, ratio: int) -> np.ndarray:
    """[B, ratio, 2, Hd]: the pending pairs of the last `ratio` positions, by p mod ratio."""
    positions = np.arange(max(0, length - ratio), length)
    state = np.zeros((pending.shape[0], ratio, *pending.shape[2:]), pending.dtype)
    state[:, positions % ratio] = pending[:, positions % pending.shape[1]]
    return state
