"""Feeds sequences to a few compiled programs in any schedule, for the tests of invariance.

A program has a fixed number of rows; what a call does not need is padding. So chunks of a prompt,
single decode steps and verification of wrong drafts all run through the same executables, and a
schedule costs milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import cache as caches
from deepinfer_jax import checkpoint, sampling, steps, tables
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import draft, head
from deepinfer_jax.model.forward import OFF, Replay
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows
from tests.oracle import Oracle, dequantize, random_model
from tests.oracle.storage import store
from tests.oracle.weights import Tensors, widen

# Window only; full m=2 with Engram; reuse; full m=1 with candidates; reindex. Window and pool are
# small, so that 48 tokens wrap every ring and leave candidate blocks out.
CONFIG_FILE = Path(__file__).with_name("every_role.json")
SLOTS, CAPACITY, POSITIONS = 4, 64, 64


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its numerics."""

    cfg: ModelConfig
    numerics: Numerics
    params: Any
    tables: tables.Tables


@functools.cache
def sources() -> tuple[dict, Tensors, np.ndarray]:
    """Configuration, tensors of released storage and token map of the model that is fed here.

    One group of the latents is scaled to where the FP4 quantizer of the main KV is not idempotent.
    """
    config = json.loads(CONFIG_FILE.read_text())
    rng = np.random.default_rng(7)
    tensors = random_model.random_weights(config, rng)
    for layer in config["text_config"]["kv_source_layer_ids"]:
        name = f"layers.{layer}.attn.compressor.norm.weight"
        gain = widen(*tensors[name])
        gain[:16] *= 0.0095
        tensors |= store(name, "BF", gain)
    return config, tensors, random_model.random_token_map(config, rng)


@functools.cache
def model(dtype: str) -> Model:
    """The model of `sources` in the shipped numerics ("bfloat16") or in "float32".

    The numerics switch to long tiles at 16 rows, so that both tile heights are in use.
    """
    config, tensors, token_map = sources()
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model.write_folder(Path(scratch), config, tensors)
        params = checkpoint.load_params(folder)
        cfg = ModelConfig.from_json(folder)
    start = {"float32": Numerics.fp32(), "bfloat16": Numerics.native()}[dtype]
    numerics = dataclasses.replace(start, long_rows=16)
    return Model(cfg, numerics, params, tables.make_tables(cfg, token_map, POSITIONS))


def oracle(replay: tuple[str, int] = ("off", 0)) -> Oracle:
    """The slow model of the same weights, in float64."""
    config, tensors, token_map = sources()
    return Oracle(config, dequantize(tensors), token_map, replay=replay)


@dataclasses.dataclass(frozen=True)
class Text:
    """tokens [N]; image [N] bool and embeddings [N, D] of the rows inside an image span."""

    tokens: np.ndarray
    image: np.ndarray
    embeddings: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def text(cfg: ModelConfig, length: int, seed: int, image: range = range(0)) -> Text:
    """A random sequence, with an image span at the positions `image`; some n-grams repeat."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, cfg.vocab_size, length).astype(np.int32)
    tokens[length // 2 : length // 2 + 5] = tokens[3:8]
    inside = np.isin(np.arange(length), image)
    embeddings = rng.normal(size=(length, cfg.hidden_size)).astype(np.float32)
    return Text(tokens, inside, embeddings * inside[:, None])


# -- one call --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive rows of one slot: `part` stands at positions start, start + 1, ..."""

    slot: int
    start: int
    part: Text


def piece(slot: int, source: Text, start: int, stop: int) -> Piece:
    """Rows start..stop of a text."""
    window = slice(start, stop)
    part = Text(source.tokens[window], source.image[window], source.embeddings[window])
    return Piece(slot, start, part)


def wrong(p: Piece, good: int, vocabulary: int) -> Piece:
    """`p` with every token from number `good` on replaced by another one, outside of images."""
    other = (p.part.tokens + 1 + np.arange(len(p.part), dtype=np.int32)) % vocabulary
    bad = np.arange(len(p.part)) >= good
    tokens = np.where(bad, other, p.part.tokens).astype(np.int32)
    return Piece(p.slot, p.start, Text(tokens, p.part.image & ~bad, p.part.embeddings))


def rows_of(pieces: Sequence[Piece], size: int, gaps: Iterable[int] = ()) -> Rows:
    """`size` rows: the pieces in order, gaps[i] padding rows before piece i, padding to the end."""
    width = pieces[0].part.embeddings.shape[1]
    tokens, positions = np.full(size, 3, np.int32), np.zeros(size, np.int32)
    slots, image = np.full(size, -1, np.int32), np.zeros(size, bool)
    embeddings = np.ones((size, width), np.float32)
    at = 0
    for p, gap in zip(pieces, [*gaps, *[0] * len(pieces)], strict=False):
        at += gap
        to = slice(at, at + len(p.part))
        tokens[to], image[to] = p.part.tokens, p.part.image
        slots[to], embeddings[to] = p.slot, p.part.embeddings
        positions[to] = p.start + np.arange(len(p.part))
        at += len(p.part)
    if at > size:
        raise ValueError(f"{at} rows do not fit into a call of {size}")
    return Rows(tokens, slots, positions, image, embeddings)


def _step(params, made, rows, following, prompts, cache, cfg, numerics, replay):
    """What a call lets out, by name with the row number in front, and the cache."""
    hidden, cache = steps.extend(
        params, made, rows, cache, cfg, numerics, replay=replay,
        prompt_lengths=None if replay == OFF else prompts,
    )  # fmt: skip
    logits = head.logits(params, hidden.output, numerics)
    seen = {
        "output": hidden.output,
        "taps": jnp.moveaxis(hidden.taps, 1, 0),
        "logits": logits,
        "slots": hidden.rows.slots,
        "positions": hidden.rows.positions,
    }
    if replay == OFF:  # rows of the call and rows of the result are the same
        seen["logprob"] = sampling.logprob(logits, following)[:, None]
        seen["routed"] = jnp.moveaxis(hidden.routed, 1, 0)
    return seen, cache


def compiled(options: dict[str, Any] | None = None) -> Any:
    """A new compilation of the step, shared with nothing that came before."""

    def fresh(params, made, rows, following, prompts, cache, cfg, numerics, replay):
        return _step(params, made, rows, following, prompts, cache, cfg, numerics, replay)

    names = ("cfg", "numerics", "replay")
    return jax.jit(fresh, static_argnames=names, compiler_options=options)


step = compiled()


def _drafts(params, made, cache, slots, positions, anchors, cfg, numerics):
    def greedy(logits, _):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return draft.draft(params, made, cache, slots, positions, anchors, greedy, cfg, numerics)


_drafted = jax.jit(_drafts, static_argnames=("cfg", "numerics"))


def draft_of(
    m: Model, cache: Cache, slots: Sequence[int], positions: Sequence[int], anchors: Sequence[int]
) -> draft.Draft:
    """Greedy drafts after `anchors` at `positions` of `slots` (three of them; -1: none)."""
    where = [np.array(v, np.int32) for v in (slots, positions, anchors)]
    made = _drafted(m.params, m.tables, cache, *where, m.cfg, m.numerics)
    return jax.tree.map(np.asarray, made)


@dataclasses.dataclass(frozen=True)
class Fed:
    """What the rows of one call gave: arrays by name with the row number in front."""

    seen: dict[str, np.ndarray]

    def of(self, slot: int, position: int) -> dict[str, np.ndarray] | None:
        """Everything that came out of one row; None where it did not run to the end."""
        where = (self.seen["slots"] == slot) & (self.seen["positions"] == position)
        (number,) = np.nonzero(where)
        if not number.size:
            return None
        return {name: value[number[0]] for name, value in self.seen.items() if name != "slots"}


def feed(
    m: Model, cache: Cache, pieces: Sequence[Piece], size: int, gaps: Iterable[int] = (),
    program: Any = step, replay: Replay = OFF, prompts: np.ndarray | None = None,
) -> tuple[Fed, Cache]:  # fmt: skip
    """One call of `size` rows."""
    rows = rows_of(pieces, size, gaps)
    following = np.roll(rows.tokens, -1)
    if prompts is None:
        prompts = np.zeros(cache.slots, np.int32)
    seen, cache = program(
        m.params, m.tables, rows, following, prompts, cache, m.cfg, m.numerics, replay
    )
    return Fed({name: np.asarray(value) for name, value in seen.items()}), cache


# -- caches ----------------------------------------------------------------------------------------


def garbage(m: Model, slots: int = SLOTS, capacity: int = CAPACITY, slack: int | None = None):
    """A cache in which nothing was ever written: NaNs, and bytes that decode to large numbers."""

    def spoil(spec: jax.ShapeDtypeStruct) -> np.ndarray:
        if spec.dtype == jnp.float32:
            return np.full(spec.shape, np.nan, np.float32)
        return np.full(spec.shape, 0x7B if spec.dtype == jnp.uint8 else 77, spec.dtype)

    return jax.tree.map(spoil, caches.cache_shapes(m.cfg, m.numerics, slots, capacity, slack))


def visible(
    m: Model, cache: Cache, slot: int, length: int, floor: int = 0
) -> dict[str, np.ndarray]:
    """What a slot of `length` tokens may still read, in the order of positions.

    floor: first position that a decoder window holds (replay).
    """
    cfg = m.cfg
    out = {}
    for name, ring, first in (
        ("encoder", cache.window[: cfg.num_encoder_layers], 0),
        ("decoder", cache.window[cfg.num_encoder_layers :], floor),
        ("draft", cache.draft, floor),
    ):
        recent = np.arange(max(length - cfg.sliding_window, first), length)
        out[name] = np.asarray(ring)[:, slot, recent % ring.shape[2]]
    for ratio, kv, keys in zip(cfg.ratios, cache.kv, cache.keys, strict=True):
        out[f"kv{ratio}"] = np.asarray(kv)[:, slot, : length // ratio]
        out[f"keys{ratio}"] = np.asarray(keys)[:, slot, : length // ratio]
    unfinished = np.arange(length - length % max(cfg.ratios), length)
    out["pending"] = np.asarray(cache.pending)[:, slot, unfinished % cache.pending.shape[2]]
    recent = np.arange(max(length - cfg.engram_lookback, 0), length)
    out["history"] = np.asarray(cache.history)[slot, recent % cache.history.shape[1]]
    return out


def moved(m: Model, cache: Cache, slot: int, capacity: int) -> Cache:
    """One slot alone in a cache of another capacity, the added entries spoiled."""
    target = garbage(m, 1, capacity)

    def put(new: np.ndarray, old: jax.Array) -> np.ndarray:
        new = new.copy()
        new[:, :, : old.shape[2]] = np.asarray(old)[:, slot : slot + 1]
        return new

    names = ("window", "draft", "pending")
    own = {name: np.asarray(getattr(cache, name))[:, slot : slot + 1] for name in names}
    return dataclasses.replace(
        target,
        **own,
        kv=tuple(put(new, old) for new, old in zip(target.kv, cache.kv, strict=True)),
        keys=tuple(put(new, old) for new, old in zip(target.keys, cache.keys, strict=True)),
        history=np.asarray(cache.history)[slot : slot + 1],
    )


# -- equality of bits ------------------------------------------------------------------------------


def bits(value: Any) -> np.ndarray:
    """Floats as unsigned integers, so that NaN equals itself and -0 differs from 0."""
    value = np.ascontiguousarray(np.asarray(value))
    return value.view(f"u{value.itemsize}") if value.dtype.kind not in "iub" else value


def different(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Names whose bits differ."""
    if got.keys() != want.keys():
        raise ValueError(f"different names: {sorted(got)} and {sorted(want)}")
    return [name for name in want if not np.array_equal(bits(got[name]), bits(want[name]))]
