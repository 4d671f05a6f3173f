"""Feeds sequences to a few compiled programs in any schedule.

A program has a fixed number of rows; what a call does not need is padding. So chunks of a prompt,
single decode steps and verification of wrong drafts all run through the same executables, and a
schedule costs milliseconds instead of a compilation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import cache as caches
from deepinfer_jax import edits, steps
from deepinfer_jax import sampling as samplers
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.loading import Model
from deepinfer_jax.model import head
from deepinfer_jax.model.forward import OFF, Replay
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.tables import Tables

# NaNs, also in the bits of bfloat16; a byte that decodes to large numbers in every packed format.
_SPOILED = {"float32": np.nan, "uint16": 0x7FC0, "uint8": 0x7B}

# -- sequences and their pieces --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """tokens [N] int32; image [N] bool and embeddings [N, D] of the rows inside an image span."""

    tokens: np.ndarray
    image: np.ndarray
    embeddings: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Text:
        return Text(self.tokens[part], self.image[part], self.embeddings[part])


def plain_text(tokens: Sequence[int] | np.ndarray, cfg: ModelConfig) -> Text:
    """A sequence without images."""
    tokens = np.asarray(tokens, np.int32)
    blank = np.zeros((len(tokens), cfg.hidden_size), np.float32)
    return Text(tokens, np.zeros(len(tokens), bool), blank)


def joined(first: Text, second: Text) -> Text:
    """One sequence after the other."""
    pairs = ((getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(Text))
    return Text(*(np.concatenate(pair) for pair in pairs))


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive rows of one slot: `part` stands at positions start, start + 1, ...

    following [len(part)] int32: the token after each, whose log-probability is reported; 0 after
    the end of the sequence.
    """

    slot: int
    start: int
    part: Text
    following: np.ndarray


def piece(slot: int, source: Text, start: int, stop: int) -> Piece:
    """Rows start..stop of a text."""
    following = np.append(source.tokens, np.int32(0))[start + 1 : stop + 1]
    return Piece(slot, start, source[start:stop], following)


def wrong(p: Piece, good: int, vocabulary: int) -> Piece:
    """`p` with every token from number `good` on replaced by another one, outside of images."""
    other = (p.part.tokens + 1 + np.arange(len(p.part), dtype=np.int32)) % vocabulary
    bad = np.arange(len(p.part)) >= good
    tokens = np.where(bad, other, p.part.tokens).astype(np.int32)
    part = Text(tokens, p.part.image & ~bad, p.part.embeddings)
    return dataclasses.replace(p, part=part)


def places(pieces: Sequence[Piece], size: int, gaps: Iterable[int] = ()) -> list[slice]:
    """The row numbers of each piece in a call of `size` rows, gaps[i] padding rows before piece i.

    Raises ValueError where they do not fit.
    """
    found, at = [], 0
    for p, gap in zip(pieces, [*gaps, *[0] * len(pieces)], strict=False):
        found.append(slice(at + gap, at + gap + len(p.part)))
        at += gap + len(p.part)
    if at > size:
        raise ValueError(f"{at} rows do not fit into a call of {size}")
    return found


def rows_of(pieces: Sequence[Piece], size: int, gaps: Iterable[int] = ()) -> Rows:
    """`size` rows: the pieces at their `places`, the rest padding with senseless contents."""
    width = pieces[0].part.embeddings.shape[1]
    tokens, positions = np.full(size, 3, np.int32), np.zeros(size, np.int32)
    slots, image = np.full(size, -1, np.int32), np.zeros(size, bool)
    embeddings = np.ones((size, width), np.float32)
    for p, to in zip(pieces, places(pieces, size, gaps), strict=True):
        tokens[to], image[to] = p.part.tokens, p.part.image
        slots[to], embeddings[to] = p.slot, p.part.embeddings
        positions[to] = p.start + np.arange(len(p.part))
    return Rows(tokens, slots, positions, image, embeddings)  # pyright: ignore[reportArgumentType]


# -- one call --------------------------------------------------------------------------------------


def observe(
    params: Any, tables: Tables, rows: Rows, following: jax.Array, sampling: Sampling,
    prompts: jax.Array, cache: Cache, cfg: ModelConfig, numerics: Numerics, replay: Replay = OFF,
) -> tuple[dict[str, jax.Array], Cache]:  # fmt: skip
    """`steps.extend`, and everything it lets out, by name with the row number in front.

    following [T]: tokens whose log-probability is wanted (`scored`); sampling: of the cache's
    slots, for the next token that every row would draw (`token`, `raw`, `processed`, `kept`);
    prompts [B]: lengths of the prompts, used by a replay only. `routed` [T, L, k] and `scored` [T]
    exist where the rows of the call and of the result are the same, that is without a replay.
    """
    hidden, cache = steps.extend(
        params, tables, rows, cache, cfg, numerics, replay=replay,
        prompt_lengths=None if replay == OFF else prompts,
    )  # fmt: skip
    logits = head.logits(params, hidden.output, numerics)
    own = jax.tree.map(lambda a: jnp.asarray(a)[jnp.maximum(hidden.rows.slots, 0)], sampling)
    spoken = edits.spoken(logits, cfg)
    sampled = samplers.sample(logits, own, hidden.rows.positions + 1, edited=spoken)
    seen = {
        "output": hidden.output,
        "taps": jnp.moveaxis(hidden.taps, 1, 0),
        "logits": logits,
        "token": sampled.token,
        "raw": sampled.logprob_raw,
        "processed": sampled.logprob_processed,
        "kept": sampled.kept_mass,
        "slots": hidden.rows.slots,
        "positions": hidden.rows.positions,
    }
    if replay == OFF:
        seen["scored"] = samplers.logprob(logits, following)
        seen["routed"] = jnp.moveaxis(hidden.routed, 1, 0)
    return seen, cache


def compiled(*, donate: bool = False, options: dict[str, Any] | None = None) -> Any:
    """`observe` jitted afresh: it shares no compiled program with any other.

    donate: the cache is given up to the call; options: the compiler's.
    """

    def fresh(params, tables, rows, following, sampling, prompts, cache, cfg, numerics, replay):
        return observe(
            params, tables, rows, following, sampling, prompts, cache, cfg, numerics, replay
        )

    return jax.jit(
        fresh,
        static_argnames=("cfg", "numerics", "replay"),
        donate_argnames=("cache",) if donate else (),
        compiler_options=options,
    )


step = compiled()


@dataclasses.dataclass(frozen=True, eq=False)
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


def greedy(slots: int) -> Sampling:
    """Sampling parameters of slots that take the most probable token."""
    return samplers.make_sampling(slots, 0.0, seeds=[0] * slots)


def feed(
    model: Model, cache: Cache, pieces: Sequence[Piece], size: int, gaps: Iterable[int] = (), *,
    sampling: Sampling | None = None, program: Any = step, replay: Replay = OFF,
    prompts: np.ndarray | None = None, names: Iterable[str] | None = None,
) -> tuple[Fed, Cache]:  # fmt: skip
    """One call of `size` rows through `program`, a jitted `observe`.

    sampling: of the cache's slots, default greedy; names: what to copy to the host, default all.
    """
    gaps = tuple(gaps)
    rows = rows_of(pieces, size, gaps)
    following = np.zeros(size, np.int32)
    for p, to in zip(pieces, places(pieces, size, gaps), strict=True):
        following[to] = p.following
    sampling = greedy(cache.slots) if sampling is None else sampling
    prompts = np.zeros(cache.slots, np.int32) if prompts is None else prompts
    seen, cache = program(
        model.params, model.tables, rows, following, sampling, prompts, cache, model.cfg,
        model.numerics, replay,
    )  # fmt: skip
    wanted = seen if names is None else names
    return Fed({name: np.asarray(seen[name]) for name in wanted}), cache


# -- caches ----------------------------------------------------------------------------------------


def garbage(model: Model, slots: int, capacity: int, slack: int | None = None) -> Cache:
    """A cache in which nothing was ever written: NaNs, and bytes that decode to large numbers."""

    shapes = caches.cache_shapes(model.cfg, model.numerics, slots, capacity, slack)

    def spoil(spec: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.full(spec.shape, _SPOILED.get(str(spec.dtype), 77), spec.dtype)

    pages = np.arange(slots, dtype=np.int32)[:, None]
    return dataclasses.replace(jax.tree.map(spoil, shapes), pages=pages)


def visible(
    model: Model, cache: Cache, slot: int, length: int, floor: int = 0
) -> dict[str, np.ndarray]:
    """What a slot of `length` tokens may still read, in the order of positions.

    floor: first position that a decoder window holds (replay).
    """
    cfg = model.cfg
    out = {}
    for name, ring, first in (
        ("encoder", cache.window[: cfg.num_encoder_layers], 0),
        ("decoder", cache.window[cfg.num_encoder_layers :], floor),
        ("draft", cache.draft, floor),
    ):
        recent = np.arange(max(length - cfg.sliding_window, first), length)
        out[name] = np.asarray(ring)[:, slot, recent % ring.shape[2]]
    for ratio, kv, keys in zip(cfg.ratios, cache.kv, cache.keys, strict=True):
        entry = np.arange(length // ratio)
        page = np.asarray(cache.pages)[slot, entry // kv.shape[2]]
        out[f"kv{ratio}"] = np.asarray(kv)[:, page, entry % kv.shape[2]]
        out[f"keys{ratio}"] = np.asarray(keys)[:, page, entry % keys.shape[2]]
    most = max(cfg.ratios, default=1)
    unfinished = np.arange(length - length % most, length)
    places = max(cache.pending.shape[2], 1)
    out["pending"] = np.asarray(cache.pending)[:, slot, unfinished % places]
    recent = np.arange(max(length - cfg.engram_lookback, 0), length)
    out["history"] = np.asarray(cache.history)[slot, recent % max(cache.history.shape[1], 1)]
    return out
