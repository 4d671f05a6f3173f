"""Functions of the model as single operations of the system's compiler, on torch's CPU.

What a kernel is on a chip: one call in the place of many small ones, by the names that jaxprs have
for them, with the same results up to the order of sums. Everything is float32; where a function's
operands are of another form it is left to `functions`, or opened up. The operations themselves are
`kernels_bridge.direct`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ascend.executor.builder import Builder
from ascend.executor.kinds import torch
from ascend.executor.lowering import Written
from ascend.executor.rules import whole
from ascend.executor.values import Value
from ascend.functions import STORED, decoded, of_layer, paired
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import engram
from deepinfer_jax.numerics import Numerics
from kernels_bridge import direct

ANOTHER = 'let torch compute them, by placed(..., kernels="torch")'
Shaped = tuple[tuple[int, ...], Any]  # of a result: shape, dtype
_F32, _I32 = torch.float32, torch.int32


def named(cfg: ModelConfig, numerics: Numerics) -> Mapping[str, Written]:
    """The functions of a model that single operations take over; none that rounds inside.

    Raises NoKernelsError where they cannot be built.
    """
    direct.load(ANOTHER)
    mixes = functools.partial(write_mixes, cfg=cfg)
    if numerics.dtype != "float32" or numerics.quantize_activations or numerics.quantize_kv:
        return {"mixes": Written(mixes)}
    of_model = {
        "mixes": mixes, "raw_mixes": write_raw_mixes, "rms_norm": write_norm,
        "normed": write_normed, "expand": write_expand, "route": write_route,
        "routed_experts": write_experts, "shared_expert": write_shared,
        "attend": write_attend, "_scores": write_scores,
        "candidate_blocks": write_candidates, "_hashed": write_hashed,
    }  # fmt: skip
    return {
        "rotated": Written(write_rotated),
        "select": Written(write_select),
        "store_window": Written(write_store),
        "_dot": Written(write_dot),
        "_group_dot": Written(write_group_dot),
        **{name: Written(functools.partial(write, cfg=cfg)) for name, write in of_model.items()},
    }


# -- calls -----------------------------------------------------------------------------------------


@functools.cache  # equal calls are one function, which is how the builder knows them
def _call(name: str, made: tuple[Shaped, ...], numbers: tuple[Any, ...]) -> Callable[..., Any]:
    """Tensors -> new tensors `made`, by the operation `name` with `numbers`."""
    run, empty = direct.function(name, ANOTHER), torch.empty

    shape, dtype = made[0]

    def one(*tensors: Any) -> Any:
        result = empty(shape, dtype=dtype)
        if run(*[t.data_ptr() for t in tensors], result.data_ptr(), *numbers):
            raise _outside(name)
        return result

    def several(*tensors: Any) -> Any:
        results = tuple([empty(shape, dtype=dtype) for shape, dtype in made])
        if run(*[t.data_ptr() for t in (*tensors, *results)], *numbers):
            raise _outside(name)
        return results

    return several if len(made) > 1 else one


def _outside(name: str) -> IndexError:
    return IndexError(f"{name}: an index points outside of what it was given")


def _emit(
    b: Builder, name: str, values: Sequence[Value], made: Sequence[Shaped], *numbers: int | float
) -> Any:
    """The results of an operation of whole tensors."""
    made = tuple(made)
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in made]
    fn = _call(name, made, numbers)
    return b.emit(fn, values, shaped=tuple(metas) if len(metas) > 1 else metas[0])


def _whole(b: Builder, eqn: Any, values: Sequence[Value], *places: int) -> list[Value]:
    """Operands with all of their elements, without gaps."""
    return [whole(b, values[i], eqn.invars[i].aval.shape) for i in places]


def _made(eqn: Any) -> list[Shaped]:
    """The results of an equation, of float32 and int32."""
    return [
        (v.aval.shape, _F32 if v.aval.dtype == "float32" else _I32) for v in eqn.outvars
    ]  # fmt: skip


def _floats(eqn: Any, *places: int) -> bool:
    """Whether operands are float32."""
    return all(eqn.invars[i].aval.dtype == "float32" for i in places)


def _shape(eqn: Any, place: int) -> tuple[int, ...]:
    return tuple(eqn.invars[place].aval.shape)


def _weight(b: Builder, eqn: Any, values: Sequence[Value], place: int) -> Value:
    """A weight in float32, made once."""
    (weight,) = _whole(b, eqn, values, place)
    return weight if weight.meta.dtype == _F32 else b(decoded, weight)


def _plain(eqn: Any, *places: int) -> bool:
    """Whether operands are weights that `_weight` knows."""
    return all(eqn.invars[i].aval.dtype in STORED for i in places)


# -- hyper-connections, norms and rotations --------------------------------------------------------


def write_mixes(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Any:
    """`numerics.mixes`: raw, scale, base, all float32 by its rule."""
    numbers = _shape(eqn, 0)[0], cfg.hc_mult, cfg.hc_sinkhorn_iters, cfg.hc_eps
    return _emit(b, "mixes", _whole(b, eqn, values, 0, 1, 2), _made(eqn), *numbers)


def write_raw_mixes(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value:
    """`hyper.raw_mixes`: base, fn, scale, streams."""
    fn, (streams,) = _weight(b, eqn, values, 1), _whole(b, eqn, values, 3)
    (columns, k), rows = _shape(eqn, 1), _shape(eqn, 3)[0]
    return _emit(b, "raw_mixes", (fn, streams), _made(eqn), rows, k, columns, cfg.rms_norm_eps)


def write_norm(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value | None:
    """`numerics.rms_norm`: x, weight."""
    if not _floats(eqn, 0) or not _plain(eqn, 1):
        return None
    (x,), weight, (*rows, k) = _whole(b, eqn, values, 0), _weight(b, eqn, values, 1), _shape(eqn, 0)
    return _emit(b, "rms_norm", (x, weight), _made(eqn), _product(rows), k, cfg.rms_norm_eps)


def _product(shape: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


def write_normed(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value:
    """`hyper.normed`: weight, pre, streams."""
    weight, (pre, streams) = _weight(b, eqn, values, 0), _whole(b, eqn, values, 1, 2)
    numbers = *_shape(eqn, 2), cfg.rms_norm_eps
    return _emit(b, "normed", (weight, pre, streams), _made(eqn), *numbers)


def write_expand(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value:
    """`hyper.expand`: y, the mix's pre, post and comb, streams."""
    return _emit(b, "expand", _whole(b, eqn, values, 0, 2, 3, 4), _made(eqn), *_shape(eqn, 4))


def write_rotated(b: Builder, eqn: Any, *values: Value) -> Value:
    """`rope.rotated`: x, cos, sin. Whether it turns back is in what it is made of."""
    back = any(e.primitive.name == "neg" for e in eqn.params["jaxpr"].jaxpr.eqns)
    (rows, *heads, k), pairs = _shape(eqn, 0), _shape(eqn, 1)[1]
    numbers = rows, _product(heads), k, pairs, -1.0 if back else 1.0
    return _emit(b, "rotated", _whole(b, eqn, values, 0, 1, 2), _made(eqn), *numbers)


# -- products --------------------------------------------------------------------------------------

# Rows up to which a product of one thread takes no longer than torch's: with registers of 512 bits
# 0.6 of its time at 48 rows, with those of 256 bits as long. Of more, torch may use threads.
_FEW = 48


def write_dot(b: Builder, eqn: Any, *values: Value) -> Value | None:
    """`numerics.dot` of few rows and plain weights: x [T, K], w [N, K]."""
    if len(values) != 2 or not _floats(eqn, 0, 1) or len(_shape(eqn, 1)) != 2:
        return None
    (rows, k), (columns, _) = _shape(eqn, 0), _shape(eqn, 1)
    if rows > _FEW:
        return None
    return _emit(b, "group_product", _whole(b, eqn, values, 0, 1), _made(eqn), rows, 1, k, columns)


def write_group_dot(b: Builder, eqn: Any, *values: Value) -> Value | None:
    """`numerics.group_dot` of plain weights: x [T, G, K], w [G * N, K]."""
    if len(values) != 2 or not _floats(eqn, 0, 1) or len(_shape(eqn, 1)) != 2:
        return None
    (rows, groups, k), columns = _shape(eqn, 0), _shape(eqn, 1)[0]
    numbers = rows, groups, k, columns // groups
    return _emit(b, "group_product", _whole(b, eqn, values, 0, 1), _made(eqn), *numbers)


def write_route(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Any:
    """`moe.route`: the gate's bias, perhaps bias_vl, and weight, then x and `image`."""
    *biases, weight, x, image = range(len(values))
    (rows, d), (count, k) = _shape(eqn, x), (_shape(eqn, weight)[0], eqn.outvars[0].aval.shape[1])
    if not _floats(eqn, x) or not _plain(eqn, weight):
        return None
    bias = [_weight(b, eqn, values, place) for place in (biases[0], biases[-1])]
    operands = *_whole(b, eqn, values, x), _weight(b, eqn, values, weight), *bias
    return _emit(
        b, "route", (*operands, *_whole(b, eqn, values, image)), _made(eqn), rows, d, count, k,
        cfg.gate_temp, cfg.routed_scaling_factor, int(cfg.norm_topk_prob and k > 1),
    )  # fmt: skip


def write_experts(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value | None:
    """`moe.routed_experts`, as `functions.write_experts` takes it."""
    shapes = [_shape(eqn, i) for i in range(len(values))]
    stacked = [len(s) for s in shapes[:4]] == [4, 4, 4, 0] and _plain(eqn, 0, 1, 2)
    if not stacked or not _floats(eqn, 4) or values[3].const is None:
        return None
    layer = int(values[3].const)
    w1, w2, w3 = (b(of_layer, s, layer=layer) for s in values[:3])
    operands = *_whole(b, eqn, values, 4, 5, 6), b(paired, w1, w3), w2
    (rows, k), (count, d, n) = shapes[5], shapes[1][1:]
    return _emit(b, "experts", operands, _made(eqn), rows, k, count, n, d, cfg.swiglu_limit)


def write_shared(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value | None:
    """`moe.shared_expert` of plain weights: w1, w2, w3, x."""
    if len(values) != 4 or not _plain(eqn, 0, 1, 2) or not _floats(eqn, 3):
        return None
    w1, w2, w3 = (_weight(b, eqn, values, place) for place in range(3))
    (x,) = _whole(b, eqn, values, 3)
    (d, n), rows = _shape(eqn, 1), _shape(eqn, 3)[0]
    operands = x, b(_below, w1, w3), w2
    return _emit(b, "shared_expert", operands, _made(eqn), rows, n, d, cfg.swiglu_limit)


def _below(first: Any, second: Any) -> Any:
    return torch.cat([first, second])


# -- attention -------------------------------------------------------------------------------------


def write_attend(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value | None:
    """`attention.attend` over a cache of float32: q, the call's window vectors, the rings and the
    layer, perhaps entries, their source and the pages, then selected, floor, sink, rows and spans.
    """
    ranks = [len(_shape(eqn, i)) for i in range(len(values))]
    paged = ranks[4:7] == [4, 0, 2]
    at = 7 if paged else 4
    cached = ranks[:4] == [3, 2, 4, 0] and ranks[at : at + 3] == [2, 1, 1]
    if not cached or not _floats(eqn, 0, 1, 2, *((4,) if paged else ())):
        return None
    if values[3].const is None or (paged and values[5].const is None):
        return None
    selected, floor, sink, _, slot, position = range(at, at + 6)
    (rows, heads, width), (_, slots, turns, _) = _shape(eqn, 0), _shape(eqn, 2)
    first, start = len(values) - 2, len(values) - 1
    entries, pages, picked = (4, 6, _shape(eqn, selected)[1]) if paged else (2, slot, 0)
    operands = _whole(
        b, eqn, values, 0, 1, 2, entries, pages, first, start, slot, position, floor, selected, sink
    )
    source, layer = int(values[5].const) if paged else 0, int(values[3].const)
    sizes = (*_shape(eqn, 4)[:3], _shape(eqn, 6)[1]) if paged else (0, 0, 0, 0)
    return _emit(
        b, "attend", operands, _made(eqn), rows, heads, width, layer, slots, turns, source, *sizes,
        cfg.sliding_window, picked, cfg.head_dim**-0.5,
    )  # fmt: skip


def write_store(b: Builder, eqn: Any, *values: Value) -> Value | None:
    """`attention.store_window` of float32: the rings and the layer, the call's window vectors, and
    the rows, of which slot and position matter.
    """
    if not _floats(eqn, 0, 2) or values[1].const is None:
        return None
    (layers, slots, turns, width), rows = _shape(eqn, 0), _shape(eqn, 2)[0]
    numbers = rows, width, layers, slots, turns, int(values[1].const)
    operands = _whole(b, eqn, values, 0, 2, 4, 5)
    made = torch.empty_like(operands[0].meta)
    stored, in_place = _stores(numbers)
    return b.emit(stored, operands, in_place=in_place, shaped=made)


@functools.cache
def _stores(numbers: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Rings with new vectors in them: a copy, and the rings themselves."""
    run = direct.function("store", ANOTHER)

    def in_place(rings: Any, *others: Any) -> Any:
        if run(rings.data_ptr(), *[t.data_ptr() for t in others], *numbers):
            raise _outside("store")
        return rings

    return lambda rings, *others: in_place(rings.clone(), *others), in_place


def write_scores(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value | None:
    """`index.scores` over a cache of float32: the query's heads and weights, entries, their source
    and the pages, ids, how many are visible, rows and spans.
    """
    ranks = [len(_shape(eqn, i)) for i in range(5)]
    if ranks != [3, 2, 4, 0, 2] or not _floats(eqn, 0, 1, 2) or values[3].const is None:
        return None
    (rows, heads, width), ids = _shape(eqn, 0), _shape(eqn, 5)
    (slots, per_slot), source = _shape(eqn, 4), int(values[3].const)
    return _emit(
        b, "scores", _whole(b, eqn, values, 0, 1, 2, 4, 8, 6, 5), _made(eqn), rows, heads, width,
        ids[-1], int(len(ids) == 1), slots, source, *_shape(eqn, 2)[:3], per_slot,
    )  # fmt: skip


def write_select(b: Builder, eqn: Any, *values: Value) -> Value:
    """`index.select`: scores, ids."""
    (rows, n), k = _shape(eqn, 0), eqn.outvars[0].aval.shape[1]
    common = int(len(_shape(eqn, 1)) == 1)
    return _emit(b, "select", _whole(b, eqn, values, 0, 1), _made(eqn), rows, n, k, common)


def write_candidates(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value:
    """`index.candidate_blocks`: scores, what is visible."""
    (rows, n), k = _shape(eqn, 0), eqn.outvars[0].aval.shape[1]
    numbers = rows, n, cfg.candidate_block_size, k
    return _emit(b, "candidates", _whole(b, eqn, values, 0, 1), _made(eqn), *numbers)


# -- Engram ----------------------------------------------------------------------------------------


def write_hashed(b: Builder, eqn: Any, *values: Value, cfg: ModelConfig) -> Value | None:
    """`engram.table_rows`: tokens, what stands for nobody, which of the Engram layers."""
    if values[2].const is None:
        return None
    of = engram.hash_constants(cfg)[int(values[2].const)]
    primes = [p for order in of.primes for p in order]
    tables = (b.const(torch.tensor(t)) for t in (of.multipliers, primes, of.offsets))
    numbers = *_shape(eqn, 0), len(of.primes[0])
    operands = *_whole(b, eqn, values, 0, 1), *tables
    return _emit(b, "hashed", operands, _made(eqn), *numbers)
