"""The cache: everything a sequence carries between calls, as one pytree of slots.

Nothing is rolled back. A slot's committed length decides what is real; rejected draft tokens leave
entries at positions that are overwritten before anything can read them, because every ring has
`slack` positions more than its reader needs (docs/model.md 10).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax import axes, quant, summaries
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, Spans


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """State of B slots. Vectors are stored as `Codec` says.

    window   [L, B, R, w]   window KV, position p at p mod R, R = window + slack
    draft    [M, B, R, w]   context KV of the DSpark layers, same ring
    kv       per ratio m: [sources, P, E/m, c]  compressed KV in pages of E tokens
    keys     per ratio m: [sources, P, E/m, i]  index keys of the same entries
    pages    [B, G] int32: the page of tokens gE .. gE+E-1 of a slot; -1: none, nothing is kept
    pending  [pooled sources, B, P, 2, Hd] float32: (projection, gate) of recent tokens, ring
    history  [B, Q] int32: compressed token ids of recent tokens (-1 inside an image), ring
    lengths  [B] int32: committed tokens; set by transitions (`steps`, `rounds`), never by the model
    ranks    static: devices of the mesh axis "context" that share global KV, 1: none do. Device r
             has the entries e with e mod ranks = r of every slot: entry e of it lies where entry
             e // ranks would lie alone, in pages of E/m/ranks (inside `jax.shard_map`)
    """

    window: jax.Array
    draft: jax.Array
    kv: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]
    pages: jax.Array
    pending: jax.Array
    history: jax.Array
    lengths: jax.Array
    ranks: int = dataclasses.field(default=1, metadata={"static": True}, repr=False)

    __repr__ = summaries.of_fields

    @property
    def slots(self) -> int:
        """Number of slots B."""
        return self.lengths.shape[0]


@dataclasses.dataclass(frozen=True)
class Codec:
    """How one kind of vector is stored.

    packed: the released bytes, `size` of them; words: the same, four in a uint32, of which a kernel
    reaches four times as many; decoded: the bits of what comes back from there, in
    bfloat16, which holds it exactly; plain: float32, when the KV is not quantized.
    """

    form: Literal["packed", "words", "decoded", "plain"]
    width: int
    size: int
    pack: Any = None
    unpack: Any = None
    round_trip: Any = None

    @classmethod
    def plain(cls, width: int) -> Codec:
        """Vectors as they are."""
        return cls("plain", width, width)

    def store(self, x: jax.Array) -> jax.Array:
        """[..., width] -> what the cache holds."""
        if self.form == "packed":
            return self.pack(x)
        if self.form == "words":
            code = self.pack(x)
            return lax.bitcast_convert_type(code.reshape(*code.shape[:-1], -1, 4), jnp.uint32)
        if self.form == "decoded":
            exact = self.round_trip(x).astype(jnp.bfloat16)
            return lax.bitcast_convert_type(exact, jnp.uint16)
        return x.astype(jnp.float32)

    def load(self, row: jax.Array, dtype: Any) -> jax.Array:
        """What the cache holds -> [..., width], equal in every bit to the vector stored."""
        if self.form == "words":
            row = lax.bitcast_convert_type(row, jnp.uint8).reshape(*row.shape[:-1], -1)
        if self.form in ("packed", "words"):
            return self.unpack(row, self.width, dtype)
        if self.form == "decoded":
            row = lax.bitcast_convert_type(row, jnp.bfloat16)
        return row.astype(dtype)

    def shaped(self, *lead: int) -> Any:
        """The `jax.ShapeDtypeStruct` of vectors [*lead, width] as the cache holds them."""
        last, dtype = {
            "packed": (self.size, jnp.uint8),
            "words": (self.size // 4, jnp.uint32),
            "decoded": (self.width, jnp.uint16),
            "plain": (self.width, jnp.float32),
        }[self.form]
        return jax.ShapeDtypeStruct((*lead, last), dtype)


def _codec(width: int, numerics: Numerics, size: int, pack: Any, unpack: Any, trip: Any) -> Codec:
    """On a CPU vectors are read more often than bytes are dear: decoding takes longer there than
    attending to what was decoded.
    """
    if not numerics.quantize_kv:
        return Codec.plain(width)
    form = "decoded" if numerics.rows in ("tiled", "ffi") else "packed"
    return Codec(form, width, size, pack, unpack, trip)


def window_codec(cfg: ModelConfig, numerics: Numerics) -> Codec:
    """Codec of window and draft context KV."""
    size = quant.window_bytes(cfg.head_dim)
    return _codec(
        cfg.head_dim, numerics, size, quant.pack_window, quant.unpack_window, quant.qdq_fp8
    )


def main_codec(cfg: ModelConfig, numerics: Numerics) -> Codec:
    """Codec of compressed KV."""
    size = quant.main_bytes(cfg.head_dim)
    return _codec(cfg.head_dim, numerics, size, quant.pack_main, quant.unpack_main, quant.qdq_main)


def index_codec(cfg: ModelConfig, numerics: Numerics) -> Codec:
    """Codec of index keys."""
    width = cfg.index_head_dim
    size = quant.index_bytes(width)
    codec = _codec(width, numerics, size, quant.pack_index, quant.unpack_index, quant.qdq_index)
    if codec.form == "packed" and numerics.uses_pallas and width % (4 * quant.GROUP) == 0:
        return dataclasses.replace(codec, form="words")
    return codec


@dataclasses.dataclass(frozen=True)
class Paging:
    """How global KV is cut: pages of `tokens` tokens, `count` of them for all slots together."""

    tokens: int
    count: int


def cache_shapes(
    cfg: ModelConfig, numerics: Numerics, slots: int, capacity: int, slack: int | None = None,
    paging: Paging | None = None, ranks: int = 1,
) -> Cache:  # fmt: skip
    """The cache as `jax.ShapeDtypeStruct`.

    Args:
      slots: number of sequences held.
      capacity: tokens a slot can hold; rounded up to whole pages, or to whole entries.
      slack: most rows of one slot in a verification call; default: DSpark block + 1.
      paging: default: one page for every slot, as long as its capacity.
      ranks: devices that share global KV; the shapes are those of all of them together.
    """
    slack = cfg.dspark_block_size + 1 if slack is None else slack
    sizes = (("slots", slots), ("capacity", capacity), ("slack", slack), ("ranks", ranks))
    for name, value in sizes:
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if capacity > cfg.max_position_embeddings:
        raise ValueError(
            f"capacity {capacity} exceeds max_position_embeddings={cfg.max_position_embeddings}"
        )
    paging = Paging(capacity, slots) if paging is None else paging
    _check_paging(paging, capacity, cfg, ranks)
    most = max(cfg.ratios, default=1)
    ring = cfg.sliding_window + slack
    pooled = sum(1 for s in cfg.kv_source_layer_ids if cfg.compress_ratios[s] > 1)

    shaped: Any = jax.ShapeDtypeStruct

    def entries(codec: Codec) -> tuple[Any, ...]:
        return tuple(
            codec.shaped(
                len(cfg.kv_sources(m)), paging.count, ranks * -(-paging.tokens // (m * ranks))
            )
            for m in cfg.ratios
        )

    window = window_codec(cfg, numerics)
    return Cache(
        window=window.shaped(cfg.num_hidden_layers, slots, ring),
        draft=window.shaped(cfg.num_nextn_predict_layers, slots, ring),
        kv=entries(main_codec(cfg, numerics)),
        keys=entries(index_codec(cfg, numerics)),
        pages=shaped((slots, -(-capacity // paging.tokens)), jnp.int32),
        pending=shaped((pooled, slots, most - 1 + slack, 2, cfg.head_dim), jnp.float32),
        history=shaped((slots, cfg.engram_lookback + slack), jnp.int32),
        lengths=shaped((slots,), jnp.int32),
        ranks=ranks,
    )


# One name per dimension. The width of a vector has none: packed bytes are of no use in parts.
_AXES = {
    "window": ("layer", "slot", None, None),
    "draft": ("draft_layer", "slot", None, None),
    "kv": ("kv_source", "page", "entry", None),
    "keys": ("kv_source", "page", "entry", None),
    "pages": ("slot", None),
    "pending": ("kv_source", "slot", None, None, None),
    "history": ("slot", None),
    "lengths": ("slot",),
}


def slot_axis(name: str) -> int:
    """Which axis of the field `name` counts slots, or the pages of slots."""
    return next(place for place, axis in enumerate(_AXES[name]) if axis in ("slot", "page"))


def split_over(kind: Any, slots: Any, entries: Any, **static: Any) -> Any:
    """How a `Cache`, or a part such as `Snapshots`, lies on a mesh: each field's `PartitionSpec`.

    slots, entries: mesh axes of slots and their pages, and of the entries of a page.
    """
    over = {"slot": slots, "page": slots, "entry": entries}

    names = [field.name for field in dataclasses.fields(kind) if field.name in _AXES]
    specs = {name: axes.partition(over.get(axis or "") for axis in _AXES[name]) for name in names}
    return kind(**specs, **static)


def cache_leaves(shapes: Cache) -> Cache:
    """`cache_shapes` with the logical axes of every leaf, as `axes.Leaf`."""

    def one(name: str, shaped: Any) -> Any:
        if isinstance(shaped, tuple):
            return tuple(one(name, each) for each in shaped)
        return axes.Leaf(shaped.shape, shaped.dtype, _AXES[name], f"cache.{name}")

    leaves = {name: one(name, getattr(shapes, name)) for name in _AXES}
    return dataclasses.replace(shapes, **leaves)


def cache_shardings(shapes: Cache, mesh: Any, rules: axes.Rules) -> Cache:
    """The cache as `NamedSharding`; ValueError names the leaf that the rules do not fit.

    Pages are numbered within a device: where slots and pages are split they are split alike.
    """
    if rules.mesh_axes("slot") != rules.mesh_axes("page"):
        raise ValueError(
            f"slots are split over {rules.mesh_axes('slot')} and pages over "
            f"{rules.mesh_axes('page')}: a slot's pages must be where the slot is, so give both "
            "one rule"
        )
    return jax.tree.map(lambda leaf: axes.sharding_of(leaf, mesh, rules), cache_leaves(shapes))


def _check_paging(paging: Paging, capacity: int, cfg: ModelConfig, ranks: int) -> None:
    for name in ("tokens", "count"):
        if getattr(paging, name) < 1:
            raise ValueError(f"paging.{name} must be at least 1, got {getattr(paging, name)}")
    for ratio in cfg.ratios if capacity > paging.tokens else ():
        if paging.tokens % (ratio * ranks):
            each = "" if ranks == 1 else f" for each of {ranks} devices"
            raise ValueError(
                f"paging.tokens must be a multiple of {ratio * ranks}, the tokens of a compressed "
                f"entry{each}, where a slot has several pages, got {paging.tokens}"
            )


def zeros(shapes: Any) -> Any:
    """Arrays for a tree of shapes: one program makes them all, not one for every shape."""
    leaves, kind = jax.tree.flatten(shapes)
    return jax.tree.unflatten(kind, _zeros(tuple(leaves)))


@functools.partial(jax.jit, static_argnums=0)
def _zeros(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    return [jnp.zeros(s.shape, s.dtype) for s in shapes]


def init_cache(
    cfg: ModelConfig, numerics: Numerics, slots: int, capacity: int, slack: int | None = None,
    paging: Paging | None = None, ranks: int = 1,
) -> Cache:  # fmt: skip
    """An empty cache; see `cache_shapes` for the arguments.

    With `paging` no slot has a page yet: whoever gives pages out sets `pages`.
    """
    cache = zeros(cache_shapes(cfg, numerics, slots, capacity, slack, paging, ranks))
    return (
        _own_pages(cache) if paging is None else dataclasses.replace(cache, pages=cache.pages - 1)
    )


def init_share(
    cfg: ModelConfig, numerics: Numerics, slots: int, capacity: int, ranks: int
) -> Cache:
    """What each of `ranks` devices has of an empty cache that they share (inside `jax.shard_map`):
    all of it but the global KV, of which no device makes more than its part.
    """
    shapes = cache_shapes(cfg, numerics, slots, capacity, ranks=ranks)

    def own(stacks: tuple[Any, ...]) -> tuple[Any, ...]:
        sizes = ((*kv.shape[:2], kv.shape[2] // ranks, kv.shape[3]) for kv in stacks)
        each = zip(sizes, stacks, strict=True)
        return tuple(jax.ShapeDtypeStruct(size, kv.dtype) for size, kv in each)

    return _own_pages(zeros(dataclasses.replace(shapes, kv=own(shapes.kv), keys=own(shapes.keys))))


def _own_pages(cache: Cache) -> Cache:
    """Without paging every slot has one page."""
    return dataclasses.replace(cache, pages=jnp.arange(cache.slots, dtype=jnp.int32)[:, None])


def ring_targets(rows: Rows, spans: Spans, ring: int) -> tuple[jax.Array, jax.Array]:
    """Where rows go in a ring: (slot [T], place [T]); dropped rows get an out-of-range slot.

    Padding is dropped, and so is a row whose place a later row of the same call takes.
    """
    to = jnp.where(rows.real, rows.slots, spans.slots)
    last = jnp.full((spans.slots,), -1, jnp.int32).at[to].max(rows.positions, mode="drop")
    kept = rows.real & (rows.positions > last[jnp.maximum(rows.slots, 0)] - ring)
    return jnp.where(kept, rows.slots, spans.slots), rows.positions % ring
