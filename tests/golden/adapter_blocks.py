"""The adapter for one block at a time: recorded inputs in, what the block makes of them out.

In bfloat16 two correct implementations part ways after a few layers: one rounding flips a choice,
and the flip grows. Fed with the recorded stream, mix, selection and compressed KV, each block is on
its own; so are the compressor, the Engram write and the ends of the model.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import tables
from deepinfer_jax.config import LayerKind, ModelConfig
from deepinfer_jax.model import attention, draft, forward, head, hyper, index
from deepinfer_jax.model import block as blocks
from deepinfer_jax.numerics import Numerics, at_layer, rms_norm
from deepinfer_jax.rows import Rows
from tests.golden import adapter, compare
from tests.golden.adapter import Model
from tests.golden.reader import Arrays, Folder

ONCE = "prefill.index_topk_once"  # selections with the package's single rounding of a score
Named = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Given:
    """Recorded inputs of one block; `unwritten`: the stream before its Engram, where it has one."""

    x: jax.Array
    pre: jax.Array
    selected: jax.Array
    candidates: jax.Array
    latest: tuple[jax.Array, jax.Array]
    unwritten: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ends:
    """Recorded inputs of what follows: last stream and mix, normed output, taps."""

    x: jax.Array
    pre: jax.Array
    normed: jax.Array
    taps: jax.Array


# -- programs --------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"), compiler_options=adapter.FAST)
def _everything(
    params: Any, made: tables.Tables, rows: Rows, given: tuple[Given, ...], ends: Ends,
    cfg: ModelConfig, numerics: Numerics,
) -> tuple[list[Named], Named]:  # fmt: skip
    """Every block and the ends, none of them fed by another: one program, compiled once."""
    once = dataclasses.replace(numerics, index_rounding="once")
    calls = [forward.make_call(params, made, rows, None, cfg, n)[0] for n in (numerics, once)]
    empty = forward.first_stream(calls[0], None)
    layers = []
    for layer, g in enumerate(given):
        s = dataclasses.replace(
            empty, x=g.x, pre=g.pre, selected=g.selected, candidates=g.candidates, latest=g.latest
        )
        out = _block(calls[0], layer, s) | _entering(calls[0], layer, s, g.unwritten)
        if cfg.kinds()[layer].index_source:
            out[ONCE] = blocks.block(calls[1], _alone(cfg, layer), layer, s)[0].selected
        layers.append(out)
    return layers, _ending(calls[0], given, ends)


def _alone(cfg: ModelConfig, layer: int) -> LayerKind:
    """The layer's kind without what is compared separately."""
    return dataclasses.replace(cfg.kinds()[layer], engram=None, kv_source=False, tap=False)


def _block(call: blocks.Call, layer: int, s: blocks.Stream) -> Named:
    cfg, numerics, kind = call.cfg, call.numerics, _alone(call.cfg, layer)
    after, record = blocks.block(call, kind, layer, s)
    p = blocks.block_params(call.params["layers"], layer, call.numerics)["attn"]
    angle = call.yarn if kind.ratio else call.base
    out = {
        "prefill.attn_out": record.attention,
        "prefill.ffn_out": record.moe,
        "prefill.block_out": after.x,
        "prefill.pre_mix": after.pre,
        "prefill.router_i": record.route.experts,
        "prefill.router_w": record.route.weights,
        "cache_prefill.window_kv": attention.window_kv(p, record.normed, angle, cfg, numerics),
    }
    if kind.index_source:
        out["prefill.index_topk"] = after.selected
    if kind.candidate_source:
        out["prefill.candidate_blocks"] = after.candidates
    return out


def _entering(
    call: blocks.Call, layer: int, s: blocks.Stream, unwritten: jax.Array | None
) -> Named:
    """Engram write, and compressed KV of the recorded stream after it."""
    kind, out = call.cfg.kinds()[layer], {}
    if unwritten is not None:
        writing = dataclasses.replace(_alone(call.cfg, layer), engram=kind.engram)
        before = dataclasses.replace(s, x=unwritten)
        out["prefill.after_engram"] = blocks.enter(call, writing, layer, before).x
    if kind.kv_source:
        publishing = dataclasses.replace(_alone(call.cfg, layer), kv_source=True)
        latest = blocks.enter(call, publishing, layer, s).latest
        assert latest is not None
        out["cache_prefill.compress_kv"], out["cache_prefill.index_k"] = latest
    return out


def _ending(call: blocks.Call, given: tuple[Given, ...], ends: Ends) -> Named:
    cfg, numerics, params = call.cfg, call.numerics, call.params
    u = hyper.collapse(ends.pre, ends.x, numerics)
    targets = [given[layer].x for layer in cfg.dspark_target_layer_ids]
    context = draft.context(params, ends.taps, cfg, numerics)
    own = params["draft"]["layers"]["attn"]
    rings = [
        attention.window_kv(at_layer(own, n, numerics), context, call.base, cfg, numerics)
        for n in range(cfg.num_nextn_predict_layers)
    ]
    return {
        "prefill.final_norm": rms_norm(u, params["norm"], cfg.rms_norm_eps, numerics),
        "prefill.logits": head.logits(params, ends.normed, numerics),
        "prefill.main_hidden": jnp.concatenate(
            [hyper.stream_mean(x, numerics) for x in targets], axis=-1
        ),
        "cache_prefill.mtp_window_kv": jnp.stack(rings),
    }


# -- recorded inputs -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A model and what is recorded of its prompt, batch row 0, at every position."""

    model: Model
    golden: Arrays
    rows: Rows
    prompt: int

    def row(self, name: str) -> np.ndarray:
        """Batch row 0 of a recorded array, in the mode's dtype."""
        axes = compare.AXES.get(compare.kind(name), ("batch",))
        return np.take(self.golden[name], 0, axis=axes.index("batch"))

    def entering(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Stream and mix that enter a layer, before its Engram."""
        cfg = self.model.cfg
        if layer:
            stream, mix = self.row("prefill.block_out"), self.row("prefill.pre_mix")
            return stream[layer - 1], mix[layer - 1]
        x = np.repeat(self.row("prefill.block0_in")[:, None], cfg.hc_mult, axis=1)
        return x, np.asarray(hyper.first_pre(self.prompt, cfg.hc_mult))

    def entries(self, name: str, ratio: int) -> np.ndarray:
        """Recorded entries, each at the row of its group's last token: the form without a cache."""
        entries = self.row(name)
        rows = np.zeros((self.prompt, entries.shape[-1]), entries.dtype)
        rows[ratio * (1 + np.arange(len(entries))) - 1] = entries
        return rows

    def given(self, layer: int) -> Given:
        """The recorded inputs of a block."""
        cfg, count, dtype = self.model.cfg, self.prompt, self.model.numerics.dtype
        kind = cfg.kinds()[layer]
        x, pre = self.entering(layer)
        unwritten = None
        if kind.engram is not None:
            x, unwritten = self.row(f"prefill.after_engram.{layer}"), jnp.asarray(x)
        selected = pool = np.full((count, 1), -1)
        latest = [np.zeros((count, w), dtype) for w in (cfg.head_dim, cfg.index_head_dim)]
        if kind.ratio:
            source = max(i for i in cfg.kv_source_layer_ids if i <= layer)
            chooser = max(i for i in cfg.index_source_layer_ids if i <= layer)
            selected = self.row(f"prefill.index_topk.{chooser}")
            names = (f"cache_prefill.compress_kv.{source}", f"cache_prefill.index_k.{source}")
            latest = [self.entries(name, kind.ratio) for name in names]
        if kind.uses_candidates:
            mask = self.row(f"prefill.candidate_blocks.{cfg.candidate_source_layer_id}")
            pool = compare.chosen_rows(np.where(mask > 0, np.arange(mask.shape[1]), -1), 1)
        return Given(
            jnp.asarray(x), jnp.asarray(pre), _padded(selected, cfg.index_topk),
            _padded(pool, index.candidate_width(cfg, count)),
            (jnp.asarray(latest[0]), jnp.asarray(latest[1])), unwritten,
        )  # fmt: skip

    def ends(self) -> Ends:
        """The recorded inputs of what follows the last block."""
        taps = np.split(
            self.row("prefill.main_hidden"), len(self.model.cfg.dspark_target_layer_ids), axis=-1
        )
        x, pre = self.row("prefill.block_out")[-1], self.row("prefill.pre_mix")[-1]
        return jax.tree.map(
            jnp.asarray, Ends(x, pre, self.row("prefill.final_norm"), np.stack(taps))
        )


def _padded(value: np.ndarray, width: int) -> jax.Array:
    spare = max(0, width - value.shape[1])
    wide = np.pad(value[:, :width].astype(np.int32), ((0, 0), (0, spare)), constant_values=-1)
    return jnp.asarray(wide)


NEEDED = "block0_in block_out pre_mix attn_out ffn_out final_norm main_hidden router_w".split()


def is_recorded(golden: Arrays) -> bool:
    """True where the prefill of batch row 0 is recorded layer by layer at every position."""
    names = [f"prefill.{n}" for n in NEEDED]
    if not all(n in golden for n in [*names, "prefill.pos", "cache_prefill.window_kv.0"]):
        return False
    return len(golden["prefill.pos"]) == golden["prefill.argmax"].shape[-1]


@functools.cache
def recorded(folder: Folder, mode: str, scratch: Path) -> Recorded:
    """The folder's model, with the reference's roundings of index scores."""
    model = adapter.load(folder, mode, scratch, index_rounding="reference")
    golden, tokens = folder.golden(mode), folder.inputs["tokens"]
    prompt = adapter.prompt_length(golden, tokens.shape[1])
    image, embeddings = adapter.image_rows(folder, model, 0, prompt)
    rows = Rows(
        jnp.asarray(tokens[0, :prompt]),
        jnp.zeros((prompt,), jnp.int32),
        jnp.arange(prompt, dtype=jnp.int32),
        jnp.asarray(image[:prompt]),
        jnp.asarray(embeddings[:prompt]),
    )
    return Recorded(model, golden, rows, prompt)


@functools.cache
def produce(folder: Folder, mode: str, scratch: Path) -> Arrays:
    """Arrays by recorded name, for batch row 0 alone (kept as an axis of one)."""
    r = recorded(folder, mode, scratch)
    m, cfg = r.model, r.model.cfg
    given = tuple(r.given(layer) for layer in range(cfg.num_hidden_layers))
    made = _everything(m.params, m.tables, r.rows, given, r.ends(), cfg, m.numerics)
    layers, last = jax.tree.map(np.asarray, made)
    out = Arrays()
    for name in ("attn_out", "ffn_out", "block_out", "pre_mix", "router_i", "router_w"):
        out[f"prefill.{name}"] = np.stack([v[f"prefill.{name}"] for v in layers])[:, None]
    for layer, kind in enumerate(cfg.kinds()):
        v = layers[layer]
        out[f"cache_prefill.window_kv.{layer}"] = _ring(v["cache_prefill.window_kv"], cfg)
        for name in ("prefill.after_engram", "prefill.index_topk", ONCE):
            if name in v:
                out[f"{name}.{layer}"] = v[name][None]
        for name in ("cache_prefill.compress_kv", "cache_prefill.index_k"):
            if name in v:
                ends_at = kind.ratio * (1 + np.arange(r.prompt // kind.ratio)) - 1
                out[f"{name}.{layer}"] = v[name][ends_at][None]
        if kind.candidate_source:
            count = -(-r.prompt // cfg.candidate_block_size)
            mask = compare.block_mask(v["prefill.candidate_blocks"], count)
            out[f"prefill.candidate_blocks.{layer}"] = mask[None]
    for name in ("final_norm", "logits", "main_hidden"):
        out[f"prefill.{name}"] = last[f"prefill.{name}"][None]
    for n, rows in enumerate(last["cache_prefill.mtp_window_kv"]):
        out[f"cache_prefill.mtp_window_kv.{n}"] = _ring(rows, cfg)
    return out


def _ring(rows: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    """Window vectors of all positions [P, Hd] -> the recorded ring [1, window, Hd]."""
    window, count = cfg.sliding_window, len(rows)
    positions = np.arange(max(0, count - window), count)
    ring = np.zeros((1, window, rows.shape[-1]), rows.dtype)
    ring[0, positions % window] = rows[positions]
    return ring
