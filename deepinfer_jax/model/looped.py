"""The backbone as one loop over its layers, in which roles are branches: the small program.

What every layer does stands in the loop once; what only some do, Engram and compressed KV before
attention, and where attention looks, stands in the branches of two switches, once for each role.
So XLA has each of them to compile once, where a program of layers in a row (`forward`) has all that
roles share once for every role. A branch costs nothing on a CPU, where compiling is what a first
call waits for; on a GPU the host would have to learn which one it is.

The operations and their numbers are those of the layers in a row, and so are the bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.cache import Cache
from deepinfer_jax.config import LayerKind, ModelConfig
from deepinfer_jax.model import block as blocks
from deepinfer_jax.model import hyper
from deepinfer_jax.model.block import Asked, Call, Published, Stream
from deepinfer_jax.model.program import ordinals
from deepinfer_jax.numerics import Numerics


def serves(cache: Cache | None, numerics: Numerics) -> bool:
    """Whether a call runs its layers so: on a CPU, unless devices share the cache."""
    return numerics.rows in ("tiled", "ffi") and (cache is None or cache.ranks == 1)


class _Each(NamedTuple):
    """What the loop takes of every layer: its number, its branches, whether it has global KV, and
    its places among taps, pending pairs and the stored entries of each ratio, beyond all of them
    where it has none.
    """

    layer: Any
    entering: Any
    looking: Any
    compressed: Any
    tap: Any
    pooled: Any
    stored: Any


def run(call: Call, s: Stream, remat: bool) -> Stream:
    """All layers, for calls without replay, split and capture. remat: as for `forward`."""
    cfg = call.cfg
    kinds = [dataclasses.replace(k, decoder=False, boundary=False, tap=False) for k in cfg.kinds()]
    enter, entering = _switch(kinds, _entering, functools.partial(_enter, call))
    look, looking = _switch(kinds, _looking, functools.partial(_look, call))

    def body(s: Stream, each: _Each) -> tuple[Stream, None]:
        x, made = enter(each.entering, each.layer, s)
        s = _tapped(call, each.tap, dataclasses.replace(s, x=x))
        s = _stored(call, each, s, made)
        p = blocks.block_params(call.params["layers"], each.layer, call.numerics)
        angle = jax.tree.map(functools.partial(jnp.where, each.compressed), call.yarn, call.base)
        with jax.named_scope("attention"):
            s, asked = blocks.ask(call, angle, each.layer, p, s)
            o, selected, candidates = look(each.looking, each.layer, p, asked, s)
            s = dataclasses.replace(s, selected=selected, candidates=candidates)
            s, _ = blocks.answer(call, angle, each.layer, p, asked, o, s)
        with jax.named_scope("moe"):
            return blocks.moe_part(call, each.layer, p, s)[0], None

    compressed = np.array([kind.ratio > 0 for kind in kinds])
    numbers = np.arange(len(kinds), dtype=np.int32)
    every = _Each(numbers, entering, looking, compressed, *_places(cfg))
    with jax.named_scope("layers"):
        return lax.scan(jax.checkpoint(body, prevent_cse=False) if remat else body, s, every)[0]


def _places(cfg: ModelConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(taps [L], pooled [L], stored [L, ratios]) of `_Each`."""
    places, kinds = ordinals(cfg), cfg.kinds()

    def among(ordinal: np.ndarray, has: Callable[[LayerKind], bool]) -> np.ndarray:
        return np.where([has(kind) for kind in kinds], ordinal, len(kinds)).astype(np.int32)

    stored = [
        among(places.stored, lambda kind, ratio=ratio: kind.kv_source and kind.ratio == ratio)
        for ratio in cfg.ratios
    ]
    return (
        among(places.tap, lambda kind: kind.tap),
        among(places.pooled, lambda kind: kind.kv_source and kind.ratio > 1),
        np.stack(stored, axis=1) if stored else np.zeros((len(kinds), 0), np.int32),
    )


def _entering(kind: LayerKind) -> Hashable:
    """What decides what happens before attention."""
    return kind.engram, kind.ratio if kind.kv_source else None


def _looking(kind: LayerKind) -> Hashable:
    """What decides where attention looks."""
    return kind.ratio, kind.index_source, kind.candidate_source, kind.uses_candidates


def _switch(
    kinds: Sequence[LayerKind], key: Callable[[LayerKind], Hashable],
    branch: Callable[[LayerKind, int | None], Callable[..., Any]],
) -> tuple[Callable[..., Any], np.ndarray]:  # fmt: skip
    """(f(number, layer, ...), number of each layer), with one branch for each value of `key`.

    branch(kind, at): of the layers like `kind`; `at` is the layer where it is the only one, whose
    places in stacks are constants then.
    """
    keys = [key(kind) for kind in kinds]
    distinct = list(dict.fromkeys(keys))
    branches = []
    for each in distinct:
        layers = [layer for layer, other in enumerate(keys) if other == each]
        branches.append(branch(kinds[layers[0]], layers[0] if len(layers) == 1 else None))

    def switch(number: Any, *args: Any) -> Any:
        return lax.switch(number, branches, *args)

    return switch, np.array([distinct.index(each) for each in keys], np.int32)


def _enter(call: Call, kind: LayerKind, at: int | None) -> Callable[..., Any]:
    def run(layer: Any, s: Stream) -> tuple[jax.Array, Published | None]:
        """The streams, and what is published of this layer or, from another one, nothing."""
        layer, made = layer if at is None else at, _nothing(s)
        with jax.named_scope(kind.role):
            if kind.engram is not None:
                s = blocks.write_engram(call, kind.engram, layer, s)
            if kind.kv_source:
                assert made is not None
                with jax.named_scope("compress"):
                    new = blocks.publish(call, kind, layer, s)
                made = dataclasses.replace(new, pair=made.pair if new.pair is None else new.pair)
        return s.x, made

    return run


def _nothing(s: Stream) -> Published | None:
    """What a layer publishes that is no source: zeros, which are not stored, or what there was.

    None in a model without sources.
    """
    if s.cache is None:
        assert s.latest is not None
        return Published(*s.latest, None)
    cache = s.cache
    if not cache.kv:
        return None

    def zeros(stack: jax.Array) -> jax.Array:
        return jnp.zeros((s.x.shape[0], *stack.shape[3:]), stack.dtype)

    pooled = cache.pending.shape[0] > 0
    pair = zeros(cache.pending) if pooled else None
    return Published(zeros(cache.kv[0]), zeros(cache.keys[0]), pair)


def _stored(call: Call, each: _Each, s: Stream, made: Published | None) -> Stream:
    """In every layer, so that no cache goes through a switch, where it would be copied: what is no
    source's has a place beyond all and is dropped.
    """
    cache = s.cache
    if made is None:
        return s
    if cache is None:
        return dataclasses.replace(s, latest=(made.main, made.key))
    if made.pair is not None:
        cache = blocks.store_pending(cache, each.pooled, made.pair, call.whole, call.spans)
    for number, ratio in enumerate(call.cfg.ratios):
        place = each.stored[number]
        cache = blocks.store_entries(call, cache, ratio, place, made.main, made.key)
    return dataclasses.replace(s, cache=cache)


def _look(call: Call, kind: LayerKind, at: int | None) -> Callable[..., tuple[jax.Array, ...]]:
    def run(layer: Any, p: Any, asked: Asked, s: Stream) -> tuple[jax.Array, ...]:
        with jax.named_scope(kind.role):
            s, o = blocks.look(call, kind, layer if at is None else at, p, asked, s)
        return o, s.selected, s.candidates

    return run


def _tapped(call: Call, place: Any, s: Stream) -> Stream:
    if not call.cfg.dspark_target_layer_ids:
        return s
    mean = hyper.stream_mean(s.x, call.numerics)
    return dataclasses.replace(s, taps=s.taps.at[place].set(mean, mode="drop"))
