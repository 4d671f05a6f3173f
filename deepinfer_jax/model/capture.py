"""What a forward saw on its way, on request: `Capture` names it, `Captured` holds it.

Nothing is hooked in and no layer runs differently: a block offers its intermediate values by name,
and those that are wanted are written to arrays that go through the layers beside the streams. What
nobody wants is not computed, and without a `Capture` the program is the one without this module.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import summaries
from deepinfer_jax.config import LayerKind, ModelConfig
from deepinfer_jax.model.hyper import Mix

Layers = tuple[int, ...] | Literal["all"]

# Where a value exists; those not named here exist in every layer.
_OWNERS: dict[str, tuple[str, Callable[[LayerKind], bool]]] = {
    "selected": ("layers with global KV", lambda kind: kind.ratio > 0),
    "candidates": ("the candidate source", lambda kind: kind.candidate_source),
    "index_scores": ("index sources", lambda kind: kind.index_source),
    "engram_rows": ("Engram layers", lambda kind: kind.engram is not None),
    "engram_gates": ("Engram layers", lambda kind: kind.engram is not None),
}
_OF_THE_CALL = ("router_load",)  # have no axis over rows


@dataclasses.dataclass(frozen=True)
class Capture:
    """Which values a forward gives back, and of which backbone layers; hashable, a static argument.

    Every field is a tuple of ascending layer numbers, `()` for none, or "all" for every layer that
    has the value. Fields, shapes and meanings are those of `Captured`.

    Raises TypeError or ValueError for anything else; whether the model has the layers is checked by
    the function that it is given to.
    """

    windows: Layers = ()
    selected: Layers = ()
    candidates: Layers = ()
    index_scores: Layers = ()
    probabilities: Layers = ()
    router_scores: Layers = ()
    router_weights: Layers = ()
    router_load: Layers = ()
    attention_mix: Layers = ()
    expert_mix: Layers = ()
    engram_rows: Layers = ()
    engram_gates: Layers = ()
    streams: Layers = ()
    stream_norms: Layers = ()

    def __post_init__(self) -> None:
        for name, given in _fields(self).items():
            if given == "all":
                continue
            whole = isinstance(given, tuple) and all(type(layer) is int for layer in given)
            if not whole:
                raise TypeError(
                    f'Capture.{name} must be "all" or a tuple of layer numbers such as (0, 3), got '
                    f"{given!r}"
                )
            if any(b <= a for a, b in itertools.pairwise(given)):
                raise ValueError(
                    f"Capture.{name} must name each layer once, in ascending order, got {given}"
                )

    def layers(self, cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
        """The layers of every value that is wanted, by name.

        Raises ValueError for layers that the model does not have, or that have no such value.
        """
        found = {}
        for name, given in _fields(self).items():
            where, has = _OWNERS.get(name, ("the backbone", lambda kind: True))
            known = tuple(layer for layer, kind in enumerate(cfg.kinds()) if has(kind))
            strange = [] if given == "all" else [layer for layer in given if layer not in known]
            if strange:
                raise ValueError(
                    f"Capture.{name}: layer {strange[0]} has no such value; in this model it is "
                    f"one of {where}: {list(known) or 'none'}"
                )
            if given:
                found[name] = known if given == "all" else given
        return found


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Captured:
    """What was captured: arrays stacked by layer, None where nothing was asked for.

    Letters as in docs/model.md 1; n is the number of layers of a value, `places` says which. Rows T
    are those of the call (`steps.score`: [n, B, S, ...] for [n, T, ...]). In padding rows, and in
    rows that a compact replay dropped before the layer, values mean nothing.

    windows [n, T, 2] int32: first and last position of the window; first > last: empty.
    selected [n, T, S] int32: compressed entries attended to, ascending, then -1; entry j of a layer
      of ratio m is of the tokens jm .. jm + m - 1.
    candidates [n, T, b] int32: candidate blocks, ascending, then -1.
    index_scores [n, T, e] float32: of entry j in column j; -inf where the row does not see the
      entry, or it is in no candidate block. e: most entries of a slot (no cache: of the call).
    probabilities [n, T, H, W + S + 1] float32: attention of every head to the window's slots, its
      own position in slot W - 1; to the entries in the order of `selected`; to the sink. They add
      up to 1. Taken beside the attention, which is not changed, hence not by its kernel.
    router_scores [n, T, E] float32: before any bias. router_weights [n, T, k] float32: of the
      experts in `Hidden.routed`, in its order. router_load [n, E] int32: choices of each expert.
    attention_mix, expert_mix: the mHC mixes of the two sub-layers (docs/model.md 4.1), a
      `hyper.Mix` of pre [n, T, C], post [n, T, C] and comb [n, T, C source, C destination].
    engram_rows [n, T, columns] int32: rows of the table. engram_gates [n, T, C] float32.
    streams [n, T, C, D]: the residual streams that leave the layer, in the numerics' dtype.
    stream_norms [n, T, C] float32: their root mean square.

    places: (name, layers) of every value that is here; static.
    """

    windows: jax.Array | None = None
    selected: jax.Array | None = None
    candidates: jax.Array | None = None
    index_scores: jax.Array | None = None
    probabilities: jax.Array | None = None
    router_scores: jax.Array | None = None
    router_weights: jax.Array | None = None
    router_load: jax.Array | None = None
    attention_mix: Mix | None = None
    expert_mix: Mix | None = None
    engram_rows: jax.Array | None = None
    engram_gates: jax.Array | None = None
    streams: jax.Array | None = None
    stream_norms: jax.Array | None = None
    places: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(
        default=(), repr=False, metadata={"static": True}
    )

    __repr__ = summaries.of_fields

    def layers(self, name: str) -> tuple[int, ...]:
        """The layers of value `name`, in the order of its first axis; () where it was not asked."""
        return dict(self.places).get(name, ())

    def of(self, name: str, layer: int) -> Any:
        """Value `name` of one layer. Raises ValueError where it was not captured."""
        if layer not in self.layers(name):
            raise ValueError(
                f"{name} of layer {layer} was not captured, got layers {list(self.layers(name))}: "
                f"ask for Capture({name}=({layer},))"
            )
        place = self.layers(name).index(layer)
        return jax.tree.map(lambda a: a[place], getattr(self, name))

    def by_sequence(self, batch: int) -> Captured:
        """The same with rows [T] cut into sequences: [n, `batch`, T / `batch`, ...]."""

        def cut(a: jax.Array) -> jax.Array:
            return a.reshape(a.shape[0], batch, a.shape[1] // batch, *a.shape[2:])

        names = [name for name, _ in self.places if name not in _OF_THE_CALL]
        values = {name: jax.tree.map(cut, getattr(self, name)) for name in names}
        return dataclasses.replace(self, **values)


def empty(
    capture: Capture, cfg: ModelConfig, rows: int, entries: Mapping[int, int], blocks: int,
    dtype: Any,
) -> Captured:  # fmt: skip
    """Arrays for what `capture` wants of a call of `rows` rows, to be filled layer by layer.

    entries: most entries of a slot, by ratio; blocks: candidate blocks of a row. dtype: of streams.
    """
    wanted = capture.layers(cfg)
    c, chosen, experts = cfg.hc_mult, cfg.index_topk, cfg.n_routed_experts
    searched = {cfg.compress_ratios[layer] for layer in wanted.get("index_scores", ())}
    widest = max((entries[ratio] for ratio in searched), default=0)

    def ints(*shape: int) -> Any:
        return lambda n: jnp.full((n, *shape), -1, jnp.int32)

    def floats(*shape: int, fill: float = 0, of: Any = jnp.float32) -> Any:
        return lambda n: jnp.full((n, *shape), fill, of)

    def mixes(n: int) -> Mix:
        return Mix(*(floats(rows, *shape)(n) for shape in ((c,), (c,), (c, c))))

    makers: dict[str, Callable[[int], Any]] = {
        "windows": ints(rows, 2),
        "selected": ints(rows, chosen),
        "candidates": ints(rows, blocks),
        "index_scores": floats(rows, widest, fill=-np.inf),
        "probabilities": floats(
            rows, cfg.num_attention_heads, cfg.sliding_window + chosen + 1
        ),
        "router_scores": floats(rows, experts),
        "router_weights": floats(rows, cfg.num_experts_per_tok),
        "router_load": ints(experts),
        "attention_mix": mixes,
        "expert_mix": mixes,
        "engram_rows": ints(rows, cfg.engram_lookback * cfg.engram_n_heads),
        "engram_gates": floats(rows, c),
        "streams": floats(rows, c, cfg.hidden_size, of=dtype),
        "stream_norms": floats(rows, c),
    }  # fmt: skip
    made = {name: makers[name](len(layers)) for name, layers in wanted.items()}
    return Captured(**made, places=tuple(wanted.items()))


def keep(
    seen: Captured, layer: Any, count: int, origin: jax.Array | None,
    values: Mapping[str, Callable[[], Any]],
) -> Captured:  # fmt: skip
    """`seen` with those of `values`, by name, that are wanted of `layer`, which may be traced.

    count: layers of the model. origin [T']: row numbers in the call of the rows of `values`, or
    None where they are all of them. A value that is not wanted is not asked for.
    """
    found = {}
    for name, make in values.items():
        layers = seen.layers(name)
        if not layers or (isinstance(layer, int) and layer not in layers):
            continue
        to = None if name in _OF_THE_CALL else origin
        held = getattr(seen, name)
        if isinstance(layer, int):
            found[name] = _written(held, make(), layers.index(layer), to)
            continue
        table = np.full(count, len(layers), np.int32)
        table[list(layers)] = np.arange(len(layers))
        place = jnp.asarray(table)[layer]
        found[name] = lax.cond(
            place < len(layers),
            lambda held, make=make, place=place, to=to: _written(held, make(), place, to),
            lambda held: held,
            held,
        )
    return dataclasses.replace(seen, **found)


def _written(held: Any, value: Any, place: Any, origin: jax.Array | None) -> Any:
    """`held` with `value` at `place`, in the rows `origin`."""

    def one(to: jax.Array, new: jax.Array) -> jax.Array:
        new = lax.stop_gradient(new).astype(to.dtype)
        if origin is None:
            return to.at[place].set(new)
        return to.at[place, origin].set(new, mode="drop")

    return jax.tree.map(one, held, value)


def score_columns(score: jax.Array, ids: jax.Array, width: int) -> jax.Array:
    """Scores [T, n] of entries `ids` ([n] or [T, n], -1: none) by entry: [T, width], else -inf."""
    columns = jnp.broadcast_to(jnp.where(ids >= 0, ids, width), score.shape)
    row = jnp.broadcast_to(jnp.arange(score.shape[0], dtype=jnp.int32)[:, None], score.shape)
    nothing = jnp.full((score.shape[0], width), -jnp.inf, score.dtype)
    return nothing.at[row, columns].set(score, mode="drop")
