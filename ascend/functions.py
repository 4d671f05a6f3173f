"""Functions of the model by name, as a few torch calls: what the executor runs in their place.

They stand for functions that a jaxpr knows by name, with the same results up to the order of sums:
`pin` guards a product against a compiler that torch does not have, sums are torch's own, experts
are products with as many weights at once as is cheap. A caller may add to them, or replace them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ascend.executor.builder import Builder
from ascend.executor.elementwise import convert
from ascend.executor.lowering import Op, Written
from ascend.executor.rules import full, whole
from ascend.executor.values import Value
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics
from kernels_bridge.dlpack import import_torch

torch = import_torch()


# What the engine's programs call by name, of this project's functions. Names that JAX gives to its
# own functions are none of these: they change with its releases.
NAMES = (
    "_axis_sum", "_dot", "_group_dot", "_grouped", "_hashed", "_row_sum", "_scores", "attend",
    "candidate_blocks", "expand", "gumbel", "logsumexp", "mixes", "normed", "pin", "qdq_fp8",
    "qdq_index", "raw_mixes", "rms_norm", "rotated", "route", "routed_experts", "select",
    "shared_expert", "softplus", "store_window",
)  # fmt: skip


def named(cfg: ModelConfig, numerics: Numerics) -> Mapping[str, Op]:
    """The functions of a model by the names that jaxprs have for them.

    Those that round or quantize inside are left as they are, unless nothing does (float32).
    """
    mixing = functools.partial(
        mixes, streams=cfg.hc_mult, iterations=cfg.hc_sinkhorn_iters, eps=cfg.hc_eps
    )
    made: dict[str, Op] = {
        "pin": Written(lambda b, eqn, x: x), "_row_sum": row_sum, "logsumexp": logsumexp,
        "mixes": mixing, "softplus": softplus,
    }  # fmt: skip
    if numerics.dtype != "float32" or numerics.quantize_activations:
        return made
    eps, limit = cfg.rms_norm_eps, cfg.swiglu_limit
    return {
        **made,
        "routed_experts": Written(functools.partial(write_experts, limit=limit)),
        "rms_norm": Written(functools.partial(write_norm, eps=eps)),
        "normed": Written(functools.partial(write_normed, eps=eps)),
        "raw_mixes": Written(functools.partial(write_raw_mixes, eps=eps)),
        "expand": expand,
        "rotated": Written(write_rotated),
    }


def row_sum(x: Any) -> Any:
    """Sum of the last axis."""
    return torch.sum(x, -1)


def logsumexp(x: Any) -> Any:
    """log sum exp of the last axis; -inf adds nothing."""
    return torch.logsumexp(x, -1)


def softplus(x: Any) -> Any:
    """log(1 + exp(x)); beyond 50 it is x in float32."""
    return torch.nn.functional.softplus(x, threshold=50)


# -- norms and rotations ---------------------------------------------------------------------------


def _wide(b: Builder, x: Value) -> Value:
    return convert(b, x, torch.float32)


def write_norm(b: Builder, eqn: Any, x: Value, weight: Value, eps: float) -> Value:
    """`numerics.rms_norm`."""
    return b(_rms_norm, whole(b, x, eqn.invars[0].aval.shape), _wide(b, weight), eps=eps)


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return torch.rms_norm(x, weight.shape, weight, eps)


def write_normed(
    b: Builder, eqn: Any, weight: Value, pre: Value, streams: Value, eps: float
) -> Value:
    """`hyper.normed`."""
    pre, streams = (whole(b, v, eqn.invars[i].aval.shape) for i, v in ((1, pre), (2, streams)))
    return b(_normed, _wide(b, weight), pre, streams, eps=eps)


def _normed(weight: Any, pre: Any, streams: Any, eps: float) -> Any:
    collapsed = torch.bmm(pre.unsqueeze(1), streams).squeeze(1)
    return torch.rms_norm(collapsed, weight.shape, weight, eps)


def write_rotated(b: Builder, eqn: Any, x: Value, cos: Value, sin: Value) -> Value:
    """`rope.rotated`: pairs as complex numbers. Whether it turns back is in what it is made of."""
    back = any(e.primitive.name == "neg" for e in eqn.params["jaxpr"].jaxpr.eqns)
    x = whole(b, x, eqn.invars[0].aval.shape)
    cos, sin = (whole(b, v, eqn.invars[1].aval.shape) for v in (cos, sin))
    turn = b(torch.complex, cos, b(torch.neg, sin) if back else sin)
    return b(_rotated, x, turn)


def _rotated(x: Any, turn: Any) -> Any:
    width = turn.shape[-1]
    plain, pairs = x[..., : -2 * width], x[..., -2 * width :]
    pairs = torch.view_as_complex(pairs.reshape(*x.shape[:-1], width, 2))
    factor = turn.reshape(turn.shape[0], *(1 for _ in range(x.dim() - 2)), width)
    return torch.cat([plain, torch.view_as_real(pairs * factor).flatten(-2)], -1)


# -- hyper-connections -----------------------------------------------------------------------------


def write_raw_mixes(
    b: Builder, eqn: Any, base: Value, fn: Value, scale: Value, streams: Value, eps: float
) -> Value:
    """`hyper.raw_mixes`, of the parameters base, fn and scale."""
    streams = whole(b, streams, eqn.invars[3].aval.shape)
    return b(_raw_mixes, _wide(b, fn), streams, eps=eps)


def _raw_mixes(fn: Any, streams: Any, eps: float) -> Any:
    flat = streams.reshape(streams.shape[0], -1)
    return torch.nn.functional.linear(torch.rms_norm(flat, flat.shape[1:], None, eps), fn)


def expand(y: Any, pre: Any, post: Any, comb: Any, streams: Any) -> Any:
    """`hyper.expand`: post * y + comb applied to the incoming streams [T, C, D]."""
    own = post.unsqueeze(2) * y.unsqueeze(1)
    return torch.baddbmm(own, comb.transpose(1, 2), streams)


def mixes(
    raw: Any, scale: Any, base: Any, *, streams: int, iterations: int, eps: float
) -> tuple[Any, Any, Any]:
    """`numerics.mixes`: raw float32 [T, C(2 + C)] -> pre [T, C], post [T, C], comb [T, C, C].

    A turn of the normalisation is two products with a matrix of ones and two quotients, all of them
    in place.
    """
    c = streams
    every = torch.addcmul(base, raw, _of_columns(scale, c))
    gates = torch.sigmoid(every[:, : 2 * c])
    comb = torch.softmax(every[:, 2 * c :].reshape(-1, c, c), 2) + eps
    ones, little = torch.ones_like(comb), torch.full_like(comb, eps)
    for turn in range(iterations):
        if turn:
            comb.div_(torch.baddbmm(little, comb, ones))
        comb.div_(torch.baddbmm(little, ones, comb))
    return gates[:, :c] + eps, gates[:, c:] * 2, comb


def _of_columns(scale: Any, c: int) -> Any:
    """The factor of every column."""
    parts = [s.expand(n) for s, n in zip(scale, (c, c, c * c), strict=True)]
    return torch.cat(parts)


# -- experts ---------------------------------------------------------------------------------------


def write_experts(b: Builder, eqn: Any, *values: Value, limit: float) -> Value | None:
    """`model.moe.routed_experts`: float32 [T, D]; None where its weights are in another form.

    values: stacks w1, w2 and w3 [layers, E, N, K], the layer, x [T, D], the experts [T, k] and
    their weights, and what experts on slots would need.
    """
    shapes = [v.aval.shape for v in eqn.invars]
    plain = all(v.aval.dtype in STORED for v in eqn.invars[:3])
    if not plain or [len(s) for s in shapes[:4]] != [4, 4, 4, 0] or values[3].const is None:
        return None
    layer = int(values[3].const)
    w1, w2, w3 = (b(of_layer, s, layer=layer) for s in values[:3])
    x, experts, weights = (full(b, v, s) for v, s in zip(values[4:7], shapes[4:7], strict=True))
    if 3 * experts.shape[0] * experts.shape[1] < w1.shape[0]:
        pairs, down = b(paired, w1, w3), b(_downwards, w2)
        return b(_few_experts, x, experts, weights, pairs, down, limit=limit)
    both, down = b(_side_by_side, w1, w3), b(_downwards, w2)
    return b(_every_expert, x, experts, weights, both, down, limit=limit)


STORED = ("bfloat16", "float32", "uint16")  # what `decoded` knows


def decoded(weight: Any) -> Any:
    """A weight in float32; int16 are the bits of bfloat16."""
    return (weight.view(torch.bfloat16) if weight.dtype == torch.int16 else weight).float()


def of_layer(stack: Any, layer: int) -> Any:
    """One layer of weights in float32."""
    return decoded(stack[layer])


def _side_by_side(w1: Any, w3: Any) -> Any:
    """[D, 2 E N] of two stacks [E, N, D]."""
    return torch.cat([w1.reshape(-1, w1.shape[2]), w3.reshape(-1, w3.shape[2])]).t()


def _downwards(w2: Any) -> Any:
    """[E, N, D] of a stack [E, D, N]."""
    return w2.transpose(1, 2).contiguous()


def _activated(up: Any, gate: Any, limit: float) -> Any:
    return torch.nn.functional.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def paired(w1: Any, w3: Any) -> Any:
    """[E, 2 N, D] of two stacks [E, N, D]."""
    return torch.cat([w1, w3], 1)


def _few_experts(x: Any, experts: Any, weights: Any, pairs: Any, down: Any, limit: float) -> Any:
    """Of few rows: the weights of each are gathered, which is three times as much traffic."""
    t, k = experts.shape
    chosen = experts.reshape(-1)
    factor = weights.reshape(t, k, 1) * (experts < down.shape[0]).unsqueeze(2)
    chosen = chosen.clamp(max=down.shape[0] - 1)
    up_and_gate = torch.index_select(pairs, 0, chosen).reshape(t, -1, x.shape[1])
    made = torch.bmm(up_and_gate, x.float().unsqueeze(2)).reshape(t, k, -1)
    gate, up = made.chunk(2, 2)
    hidden = _activated(up, gate, limit).mul_(factor).reshape(t, 1, -1)
    rows = torch.index_select(down, 0, chosen).reshape(t, hidden.shape[2], -1)
    return torch.bmm(hidden, rows).squeeze(1)


def _every_expert(x: Any, experts: Any, weights: Any, both: Any, down: Any, limit: float) -> Any:
    """Of more: all experts on all rows, those that a row did not ask for by 0."""
    t, count = x.shape[0], down.shape[0]
    gate, up = torch.mm(x.float(), both).chunk(2, 1)
    factor = torch.zeros(t, count + 1, device=x.device)
    factor.scatter_(1, experts.clamp(max=count).long(), weights)
    hidden = _activated(up, gate, limit).reshape(t, count, -1).mul_(factor[:, :count].unsqueeze(2))
    return torch.mm(hidden.reshape(t, -1), down.reshape(-1, down.shape[2]))
